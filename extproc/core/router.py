"""Pool and picker together: the whole decision for one request, and how long it may be held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from extproc.core.claims import NO_CLAIM
from extproc.core.costs import BYTES_PER_TOKEN
from extproc.core.following import Asked, Asking
from extproc.core.listing import ModelListing
from extproc.core.modelroutes import ModelRoutes
from extproc.core.picker import Picker, is_in_subset
from extproc.core.pool import Pool
from extproc.core.rejections import RETRY_AFTER_S, model_not_found, no_endpoints, saturated
from extproc.core.routes import ONE_PROMPT_PATHS
from extproc.core.types import EndpointView, ModelCard, Pick, Rejection, RequestInfo, Snapshot, Wait

MIN_WAIT_S = 0.001
"""A policy that wants to be asked again at once is asked in the next pass, not in a loop."""


@dataclass(slots=True)
class Router:
    """Routes requests and lists models, from a pool and a picker."""

    pool: Pool
    picker: Picker
    max_hold_s: float = 60.0  # longest that a request may wait for an endpoint, from its headers on
    routes: ModelRoutes = field(default_factory=ModelRoutes)
    _listing: ModelListing = field(default_factory=ModelListing, repr=False)

    def route(
        self, request: RequestInfo, *, now: float, asking: Asking | None = None
    ) -> Pick | Rejection | Wait:
        """Choose an endpoint and count the request there, or say why not, or when to ask again."""
        result = self.choose(request, now=now, asking=asking)
        if isinstance(result, Pick):
            self.pool.flights.start(result, now=now)
        return result

    def choose(
        self, request: RequestInfo, *, now: float, asking: Asking | None = None
    ) -> Pick | Rejection | Wait:
        """Choose as `route` does, and count nothing.

        `request.adapter` and `request.claim` are filled in here: only the pool knows which names
        are adapters. An empty model (a stored response) goes to the session's endpoint.
        """
        snapshot = self.pool.snapshot(now=now)
        if request.model:
            card = self.pool.model(request.model)
            if card is None:
                return _unknown(request.model, snapshot, request.subset)
            request = self._known(request, card)
        claim = self.routes.claim(request)
        if claim is not NO_CLAIM:
            request = replace(request, claim=claim)
        result = self.picker.pick(snapshot, request, asking)
        if isinstance(result, Wait) and not isinstance(result, Asked):
            return self._hold(result, request, now)
        return result

    def led_hold_s(self, answer_s: float) -> float:
        """Return the longest hold by a router that leads, from a request's headers on.

        That is the policy's own `hold_s`, if it has one, and `answer_s` for the last word.
        """
        hold_s = getattr(self.picker.policy, "hold_s", None)
        if isinstance(hold_s, int | float):
            return min(self.max_hold_s, hold_s + answer_s)
        return self.max_hold_s

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """Return the body of `GET /v1/models`: the models of the endpoints that a request may get.

        Where it may get none, or none has listed its models, the rejection that a request gets.
        """
        allowed = _allowed(self.pool.snapshot(now=now), subset)
        lists = [view.registered for view in allowed if view.registered is not None]
        return self._listing.body(self.pool.registry, lists) if lists else no_endpoints()

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """Return the model registered under `name` on an endpoint that a request may get."""
        snapshot, card = self.pool.snapshot(now=now), self.pool.model(name)
        if card is None:
            return _unknown(name, snapshot, subset)
        has_it = any(view.has_registered(name) for view in _allowed(snapshot, subset))
        return card if has_it else no_endpoints(name)

    def _known(self, request: RequestInfo, card: ModelCard) -> RequestInfo:
        """Add what the pool knows of a request."""
        adapter = None if card.parent is None else request.model
        request = self._within_context(request, card)
        cached = self.pool.beginnings.find(request) if self.picker.uses_cached_bytes else None
        if cached:
            return replace(request, adapter=adapter, cached_bytes=cached)
        return request if adapter is None else replace(request, adapter=adapter)

    def _within_context(self, request: RequestInfo, card: ModelCard) -> RequestInfo:
        """Add the size of the context, where the body is longer than that."""
        base = card if card.parent is None else self.pool.model(card.parent)
        if base is None or base.max_model_len is None or request.path not in ONE_PROMPT_PATHS:
            return request
        context_bytes = BYTES_PER_TOKEN * base.max_model_len
        if request.body_bytes <= context_bytes:
            return request
        return replace(request, context_bytes=context_bytes)

    def _hold(self, wait: Wait, request: RequestInfo, now: float) -> Wait | Rejection:
        """Return the policy's wait within its bounds; 429 for a request held for `max_hold_s`."""
        give_up_s = request.arrived_at_s + self.max_hold_s
        if now >= give_up_s:
            return saturated(request.model, RETRY_AFTER_S)
        return Wait(min(max(wait.until_s, now + MIN_WAIT_S), give_up_s), wait.reason)


def _unknown(model: str, snapshot: Snapshot, subset: frozenset[str] | None) -> Rejection:
    """Reject a model that no endpoint lists: 404 if that is sure and any endpoint is allowed."""
    is_sure = _knows_all_models(snapshot) and any(_allowed(snapshot, subset))
    return model_not_found(model) if is_sure else no_endpoints(model)


def _knows_all_models(snapshot: Snapshot) -> bool:
    """Return whether every ready endpoint has listed its models, and at least one has.

    A new or restarted endpoint may serve a model that no other has; 404 would tell its clients
    never to ask again. One that stays silent, or restarts again and again, is not waited for.
    """
    up = [view for view in snapshot.endpoints if view.is_ready]
    has_told = any(view.registered is not None for view in up)
    return has_told and not any(view.is_owing for view in up)


def _allowed(snapshot: Snapshot, subset: frozenset[str] | None) -> Iterator[EndpointView]:
    """Yield the ready endpoints of the subset; without any, every request gets 503."""
    for view in snapshot.endpoints:
        if view.is_ready and (subset is None or is_in_subset(view.address, subset)):
            yield view
