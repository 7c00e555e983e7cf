"""Pool and picker together: the whole decision for one request, and its accounting."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.core.listing import ModelListing
from extproc.core.picker import Picker, is_in_subset
from extproc.core.pool import Pool
from extproc.core.rejections import model_not_found, no_endpoints
from extproc.core.types import ModelCard, Pick, Rejection, RequestInfo, Snapshot, Wait


@dataclass(slots=True)
class Router:
    """Answers a stream's questions from a pool and a picker.

    Attributes:
        pool: The state.
        picker: The rule in force.
    """

    pool: Pool
    picker: Picker
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
                is_sure = _knows_all_models(snapshot) and _allows_a_ready_one(snapshot, request)
                return model_not_found(request.model) if is_sure else no_endpoints(request.model)
            if card.parent is not None:
                request = _for_adapter(request)
        result = self.picker.pick(snapshot, request)
        if isinstance(result, Pick):
            self.pool.start(result, now=now)
        return result

    def models_body(self) -> bytes:
        """The body of `GET /v1/models`: everything registered on any endpoint."""
        return self._listing.body(self.pool.registry)

    def model(self, name: str) -> ModelCard | None:
        """What is registered under `name` on any endpoint."""
        return self.pool.model(name)


def _knows_all_models(snapshot: Snapshot) -> bool:
    """Whether every endpoint that is up has told its models, and one has.

    One that has just restarted, or come, may serve what nobody else has; 404 would tell its clients
    never to ask again. One that keeps silent, or restarts without end, is not waited for.
    """
    up = [view for view in snapshot.endpoints if view.is_ready]
    has_told = any(view.registered is not None for view in up)
    return has_told and not any(view.is_owing for view in up)


def _allows_a_ready_one(snapshot: Snapshot, request: RequestInfo) -> bool:
    """Whether the subset has an endpoint that is up: a subset without one is 503, whatever else."""
    subset = request.subset
    return subset is None or any(
        view.is_ready and is_in_subset(view.address, subset) for view in snapshot.endpoints
    )


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
