"""Pool and picker together: the whole decision for one request, and how long it may be put off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.core.listing import ModelListing
from extproc.core.picker import Picker, is_in_subset
from extproc.core.pool import Pool
from extproc.core.rejections import RETRY_AFTER_S, model_not_found, no_endpoints, saturated
from extproc.core.types import (
    EndpointView,
    ModelCard,
    Pick,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)

MIN_WAIT_S = 0.001
"""A policy that asks to be asked at once is asked in the next pass, not in a loop."""


@dataclass(slots=True)
class Router:
    """Answers a stream's questions from a pool and a picker.

    Attributes:
        pool: The state.
        picker: The rule in force.
        max_hold_s: Longest time that a request may wait for an endpoint, from its headers on.
    """

    pool: Pool
    picker: Picker
    max_hold_s: float = 60.0
    _listing: ModelListing = field(default_factory=ModelListing, repr=False)

    def route(self, request: RequestInfo, *, now: float) -> Pick | Rejection | Wait:
        """Choose an endpoint and count the request there, or say why not, or when to ask again.

        `request.adapter` is filled in here: only the pool knows which names are adapters. An empty
        model (a stored response) goes to the session's endpoint.
        """
        snapshot = self.pool.snapshot(now=now)
        if request.model:
            card = self.pool.model(request.model)
            if card is None:
                return _unknown(request.model, snapshot, request.subset)
            if card.parent is not None:
                request = _for_adapter(request)
        result = self.picker.pick(snapshot, request)
        if isinstance(result, Pick):
            self.pool.start(result, now=now)
        elif isinstance(result, Wait):
            return self._hold(result, request, now)
        return result

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """The body of `GET /v1/models`: what is registered on endpoints that a request may get.

        Where it could get none, or none of them has told its models, the answer of a request.
        """
        allowed = _allowed(self.pool.snapshot(now=now), subset)
        lists = [view.registered for view in allowed if view.registered is not None]
        return self._listing.body(self.pool.registry, lists) if lists else no_endpoints()

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """What is registered under `name` on an endpoint that a request may get, or its answer."""
        snapshot, card = self.pool.snapshot(now=now), self.pool.model(name)
        if card is None:
            return _unknown(name, snapshot, subset)
        has_it = any(view.has_registered(name) for view in _allowed(snapshot, subset))
        return card if has_it else no_endpoints(name)

    def _hold(self, wait: Wait, request: RequestInfo, now: float) -> Wait | Rejection:
        """The policy's wait within its bounds; a 429 for a request that has waited long enough."""
        give_up_s = request.arrived_at_s + self.max_hold_s
        if now >= give_up_s:
            return saturated(request.model, RETRY_AFTER_S)
        return Wait(min(max(wait.until_s, now + MIN_WAIT_S), give_up_s), wait.reason)


def _unknown(model: str, snapshot: Snapshot, subset: frozenset[str] | None) -> Rejection:
    """No endpoint lists the model: 404 if that is sure and the request could go to any at all."""
    is_sure = _knows_all_models(snapshot) and any(_allowed(snapshot, subset))
    return model_not_found(model) if is_sure else no_endpoints(model)


def _knows_all_models(snapshot: Snapshot) -> bool:
    """Whether every endpoint that is up has told its models, and one has.

    One that has just restarted, or come, may serve what nobody else has; 404 would tell its clients
    never to ask again. One that keeps silent, or restarts without end, is not waited for.
    """
    up = [view for view in snapshot.endpoints if view.is_ready]
    has_told = any(view.registered is not None for view in up)
    return has_told and not any(view.is_owing for view in up)


def _allowed(snapshot: Snapshot, subset: frozenset[str] | None) -> Iterator[EndpointView]:
    """The endpoints of the subset that are up: without any it is 503, whatever is asked for."""
    for view in snapshot.endpoints:
        if view.is_ready and (subset is None or is_in_subset(view.address, subset)):
            yield view


def _for_adapter(request: RequestInfo) -> RequestInfo:
    # Written out: dataclasses.replace costs several times as much on the hot path.
    return RequestInfo(
        request.model,
        request.model,
        request.path,
        request.body_bytes,
        request.request_id,
        request.session,
        request.subset,
        request.arrived_at_s,
        request.hints,
    )
