"""Routes of models: which requests belong together, and the claim of each (tenant, priority,
objectives).

1. A model belongs to the route that lists its name, else to the first with a pattern that matches.
2. A request's own headers take precedence over its route, for its objectives. Only the headers that
   the configuration trusts get this far (`request.controlheaders`).
3. Its priority is its route's; else the priority of the objective that it names; else 0. For
   objectives, the configuration takes precedence over the cluster's InferenceObjectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate

from msgspec import Struct
from msgspec.structs import replace

from extproc.tenancy import NO_CLAIM, Claim
from extproc.types import NO_HINTS, Hints, RequestInfo

MAX_REMEMBERED = 4096
"""Models whose route by pattern is kept: a hundred patterns take longer than a decision."""


class Objective(Struct, frozen=True):
    """A time that so many percent of a route's requests should keep."""

    seconds: float
    percentile: float


class ModelRoute(Struct, frozen=True):
    """One route.

    Attributes:
        models: Names of models, and patterns: `*` stands for anything.
        priority: None leaves it to the objective that a request names.
        ttft: Wanted time to the first token.
        tpot: Wanted time per output token.
        weight: Share of each of its tenants, which have turns of their own here. None: they have
            the same turns as elsewhere.
        tenants: Share of single tenants by their fairness id, times `weight`; 1 for any other
            tenant.
        max_held_requests: Held at once; None for the queue's own limit, as below.
        max_held_bytes: Bytes of their bodies.
        max_wait_s: For which one is held.
        waits: False: refused where it would be held.
    """

    name: str
    models: tuple[str, ...]
    priority: int | None = None
    ttft: Objective | None = None
    tpot: Objective | None = None
    weight: float | None = None
    tenants: Mapping[str, float] = {}
    max_held_requests: int | None = None
    max_held_bytes: int | None = None
    max_wait_s: float | None = None
    waits: bool = True


class ModelRoutes:
    """The routes in force, and the priorities of named objectives."""

    def __init__(
        self, routes: Sequence[ModelRoute] = (), priorities: Mapping[str, int] | None = None
    ) -> None:
        self._in_cluster: Mapping[str, int] = {}
        self.configure(routes, priorities or {})

    def configure(self, routes: Sequence[ModelRoute], priorities: Mapping[str, int]) -> None:
        """Replace the routes, in their order, and the configured priorities by objective."""
        self._configured = priorities
        self._priorities = {**self._in_cluster, **priorities}
        self._routes = {route.name: route for route in routes}
        listed = [(model, _claim(route)) for route in routes for model in route.models]
        self._by_name = {model: claim for model, claim in listed if "*" not in model}
        self._by_pattern = [(_matcher(model), claim) for model, claim in listed if "*" in model]
        self._claim_by_model = dict(self._by_name)

    def set_objectives(self, priorities: Mapping[str, int]) -> None:
        """Replace the priorities by objective that the cluster's InferenceObjectives say."""
        self._in_cluster = priorities
        self._priorities = {**priorities, **self._configured}

    @property
    def targets(self) -> Mapping[str, float]:
        """The share of requests that should have their first token in time, by route."""
        return _shares({name: route.ttft for name, route in self._routes.items()})

    @property
    def tpot_targets(self) -> Mapping[str, float]:
        """The share of streamed responses that should keep their time per output token."""
        return _shares({name: route.tpot for name, route in self._routes.items()})

    def claim(self, request: RequestInfo) -> Claim:
        """Return a request's claim; `NO_CLAIM` where nothing is configured for it."""
        is_plain = not (self._claim_by_model or self._by_pattern)
        claim = NO_CLAIM if is_plain else self.claim_of(request.written or request.model)
        return claim if request.hints is NO_HINTS else self._with_hints(claim, request.hints)

    def claim_of(self, model: str) -> Claim:
        """Return the claim of a model's requests by its route alone."""
        claim = self._claim_by_model.get(model)
        if claim is not None:
            return claim
        return self._find(model) if self._by_pattern else NO_CLAIM

    def _find(self, model: str) -> Claim:
        """Return the claim by pattern, and keep it."""
        found = (claim for matches, claim in self._by_pattern if matches(model))
        if len(self._claim_by_model) >= MAX_REMEMBERED + len(self._by_name):
            self._claim_by_model = dict(self._by_name)
        claim = self._claim_by_model[model] = next(found, NO_CLAIM)
        return claim

    def _with_hints(self, claim: Claim, hints: Hints) -> Claim:
        """Return a route's claim, changed by the request's own headers."""
        route, tenant, priority = self._routes.get(claim.route), hints.fairness_id, claim.priority
        if route is None or route.priority is None:
            priority = self._priorities.get(hints.objective, 0)
        share = 1.0 if route is None else route.tenants.get(tenant, 1.0)
        hinted = replace(
            claim,
            tenant=tenant,
            priority=priority,
            ttft_s=claim.ttft_s if hints.slo_ttft_ms is None else hints.slo_ttft_ms / 1000,
            tpot_s=claim.tpot_s if hints.slo_tpot_ms is None else hints.slo_tpot_ms / 1000,
            weight=claim.weight * share,
        )
        return claim if hinted == claim else hinted


def _shares(objectives: Mapping[str, Objective | None]) -> Mapping[str, float]:
    return {name: each.percentile / 100 for name, each in objectives.items() if each is not None}


def _claim(route: ModelRoute) -> Claim:
    """Return the claim of a request without hints."""
    return Claim(
        route=route.name,
        priority=route.priority or 0,
        ttft_s=None if route.ttft is None else route.ttft.seconds,
        tpot_s=None if route.tpot is None else route.tpot.seconds,
        weight=1.0 if route.weight is None else route.weight,
        has_own_turns=route.weight is not None,
        max_held=route.max_held_requests,
        max_held_bytes=route.max_held_bytes,
        max_wait_s=route.max_wait_s,
        waits=route.waits,
    )


def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(translate(as_fnmatch(pattern))).match


def as_fnmatch(pattern: str) -> str:
    """Return a pattern of `fnmatch` to which nothing but `*` is special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
