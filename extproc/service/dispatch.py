"""The calls of streams and the ends of picks, passed on and recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from extproc.fleet.accounting import Accounting, Completion
from extproc.fleet.evidence import NAMES_ENDPOINT, Evidence
from extproc.fleet.outliers import Outliers, Readmission
from extproc.observe.tracing import Tracing
from extproc.openai import Spelling
from extproc.peers.relay import Relay
from extproc.queue import Ticket
from extproc.request.interfaces import StreamSettings
from extproc.request.listbudget import Lists
from extproc.request.stream import Stream
from extproc.routing.rewrites import Rewrites
from extproc.routing.router import Router
from extproc.service.recorder import Recorder
from extproc.service.traced import DecisionTrace
from extproc.types import ModelCard, Outcome, Pick, Rejection, RequestInfo
from extproc.wire.rpc import Metadata

log = logging.getLogger(__name__)

_Result = TypeVar("_Result", bound=Pick | Rejection | Ticket)


@dataclass(slots=True)
class Dispatcher:
    """The router as streams see it (`request.interfaces.Dispatcher`), with each call recorded.

    Attributes:
        clock: Monotonic seconds, at the highest resolution.
        joins_names: Pods read an adapter's name after its base model's.
        spelling: The names in bodies and in lists, by that.
        trace: The calling stream's own; None where nothing is traced, for all streams.
    """

    router: Router
    accounting: Accounting
    recorder: Recorder
    clock: Callable[[], float]
    rewrites: Rewrites
    lists: Lists
    spelling: Spelling = field(init=False)
    joins_names: bool = False
    trace: DecisionTrace | None = None

    def __post_init__(self) -> None:
        self.spelling = Spelling(self._find, self.joins_names)

    def _find(self, name: str) -> ModelCard | None:
        return self.router.pool.model(name) or self.router.catalog.card(name)

    @property
    def uses_prefix_hashes(self) -> bool:
        """Whether the policy in force weighs what is cached."""
        return self.router.picker.uses_cached_bytes

    @property
    def may_rewrite(self) -> bool:
        """Whether there are rules, or declared adapters."""
        return self.rewrites.is_active or self.spelling.joins

    def concerns(self, model: str) -> bool:
        """Return whether a model has a rule, or may have another name on pods."""
        listed = self.spelling.listed(model)
        return self.rewrites.concerns(listed) or self.spelling.full(listed) != model

    def is_declared(self, model: str) -> bool:
        """Return whether pods may have a model under another name."""
        return self.rewrites.is_declared(model)

    def target_of(self, model: str, hinted: str) -> str:
        """Return the model that the pod shall read."""
        return self.rewrites.target(model, hinted)

    def route(
        self, request: RequestInfo, *, now: float, wake: Callable[[], None], num_bytes: int
    ) -> Pick | Rejection | Ticket:
        """Choose an endpoint and count the request there, or say why not, or hold it."""
        if self.trace is not None:
            self.recorder.observers.call("tracing", self.trace.asked, now)
        started_s = self.clock()
        result = self.router.route(request, now=now, wake=wake, num_bytes=num_bytes)
        return self._decided(result, request.client_model, now, self.clock() - started_s)

    def resume(self, ticket: Ticket, *, now: float) -> Pick | Rejection | Ticket:
        """Return the result of a held request, if there is one."""
        result = self.router.resume(ticket, now=now)
        if not isinstance(result, Ticket):
            self._decided(result, ticket.request.client_model, now, None)
        return result

    def gone(self, ticket: Ticket | None, *, now: float) -> None:
        """Forget the request."""
        if ticket is not None:
            self.router.leave(ticket, now=now)
        if self.trace is not None:
            self.recorder.observers.call("tracing", self.trace.left)

    def _decided(self, result: _Result, model: str, now: float, seconds: float | None) -> _Result:
        self.recorder.routed(result, seconds)
        if self.trace is not None:
            self.recorder.observers.call("tracing", self.trace.decided, result, model, now)
        return result

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Record an error response of ours."""
        self.recorder.rejected(rejection, headers)
        if self.trace is not None:
            self.recorder.observers.call("tracing", self.trace.rejected, rejection)

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """End a pick whose end its own stream saw."""
        if self.accounting.finish(pick, outcome, now=now):
            self.recorder.ended(outcome)

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Move a pick to the endpoint that served it according to the data plane."""
        self.router.pool.flights.move(pick.id, address, now=now)

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        """Return what every request gets now; None where one could be served."""
        return self.router.models.outage(subset, now=now)

    def models_body(
        self, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> bytes | Rejection:
        """Return the body of `GET /v1/models`."""
        return self.router.models.body(subset, tenant, now=now)

    def model(
        self, name: str, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> ModelCard | Rejection:
        """Return the model `name` as an endpoint in the subset has registered it."""
        return self.router.models.find(name, subset, tenant, now=now)


def new_stream_of(
    dispatcher: Dispatcher,
    settings: StreamSettings,
    tracing: Tracing | None,
) -> Callable[[Metadata, Callable[[], None]], Stream]:
    """Return the factory of streams; tracing costs nothing where it is off."""
    if tracing is None:
        return lambda _metadata, wake: Stream(dispatcher, settings, wake)

    def new_stream(metadata: Metadata, wake: Callable[[], None]) -> Stream:
        trace = DecisionTrace(partial(tracing.begin, metadata))
        return Stream(replace(dispatcher, trace=trace), settings, wake)

    return new_stream


class Doubts(Protocol):
    """Asks pods what they have, and how they are."""

    def look(self, address: str) -> None:
        """The endpoint may have lost a model."""

    def doubt(self, address: str) -> None:
        """The endpoint has failed a request."""


@dataclass(slots=True)
class Endings:
    """Ends picks by access logs and age, and handles the consequences.

    Attributes:
        relay: Takes entries about other routers' picks.
        pods: Asked where an end raises doubt.
        clock: Monotonic seconds.
    """

    accounting: Accounting
    outliers: Outliers
    recorder: Recorder
    relay: Relay
    pods: Doubts
    clock: Callable[[], float]

    def complete(self, completion: Completion) -> bool:
        """Record an access log entry; return False if it is about another router's pick."""
        flight, is_ours, doubtful = self.accounting.complete(completion, now=self.clock())
        if flight is None:
            if is_ours:
                self.recorder.unmatched()
            return is_ours
        self.recorder.completed(completion, flight.pick.request)
        if doubtful:
            self.pods.look(doubtful)
        if completion.verdict in (Evidence.FAILED, *NAMES_ENDPOINT):
            self.pods.doubt(completion.address or flight.pick.address)
        self._log_changes()
        return True

    def refused(self, pick_id: str, request_id: str, address: str) -> bool:
        """Record an attempt that an endpoint refused; return False if it is another router's."""
        is_ours = self.accounting.refused(pick_id, request_id, address, now=self.clock())
        if is_ours:
            self.recorder.refused()
        return is_ours

    def pass_on(self, pick_id: str, entry: bytes) -> None:
        """Queue the access log entry of another router's pick."""
        self.recorder.observers.call("relay", self.relay.pass_on, pick_id, entry, now=self.clock())

    def flush(self) -> None:
        """Send what is queued for other routers."""
        self.recorder.observers.call("relay", self.relay.flush, now=self.clock())

    def tick(self, *, now: float) -> None:
        """End the picks whose end was not reported in time."""
        self.recorder.given_up(len(self.accounting.expire(now=now)))
        self._log_changes()

    def _log_changes(self) -> None:
        for change in self.outliers.take_changes():
            if isinstance(change, Readmission):
                why = (
                    "" if change.is_recovered else ": the limit of ejections leaves no room for it"
                )
                log.info("endpoint %s may serve again%s", change.address, why)
            else:
                address, cause = change.address, change.cause
                log.warning("endpoint %s ejected for %g s: %s", address, change.for_s, cause)
