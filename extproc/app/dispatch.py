"""The core's decisions, observed: measured, counted, published, and ended by completions.

A part of `app`: the place where core objects and the shell's counters meet. It decides nothing,
and whoever only looks on is called through `Observers`: an answer depends on none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from extproc.app.observers import Observers
from extproc.core.accounting import Accounting, Completion, DecisionRecord
from extproc.core.attainment import OTHER, Attainment
from extproc.core.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.core.pool import InFlight
from extproc.core.router import Router
from extproc.core.routes import normalize_path, path_label
from extproc.core.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait
from extproc.shell.decisions import DecisionsService
from extproc.shell.telemetry import Telemetry

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ObservedDispatcher:
    """What a stream asks, answered by the router and told to telemetry.

    Attributes:
        router: Decides.
        accounting: Ends.
        telemetry: Counts.
        decisions: Publishes.
        clock: Monotonic seconds, of the finest kind there is.
        wall_clock: Wall seconds, for people.
        on_doubt: Called with the address of an endpoint that may have lost a model.
        attainment: Judges which requests were answered in time.
        observers: Calls all that only looks on.
    """

    router: Router
    accounting: Accounting
    telemetry: Telemetry
    decisions: DecisionsService
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    on_doubt: Callable[[str], None]
    attainment: Attainment
    observers: Observers

    def route(self, request: RequestInfo, *, now: float) -> Pick | Rejection | Wait:
        """Choose an endpoint and count the request there, or say why not, or when to ask again."""
        started_s = self.clock()
        result = self.router.route(request, now=now)
        seconds = self.clock() - started_s
        self.observers.tell("telemetry", self.telemetry.routed, result, seconds)
        if isinstance(result, Pick):
            record = DecisionRecord(result, self.wall_clock(), seconds)
            self.observers.tell("decisions", self.decisions.publish, record)
        return result

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Count and publish an error that a client gets from us."""
        self.observers.tell("telemetry", self.telemetry.rejected, rejection)
        path = headers.get(":path", "").partition("?")[0]
        request_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        wall_s, shown = self.wall_clock(), path[:MAX_PATH_CHARS]
        record = DecisionRecord(rejection, wall_s, 0.0, request_id, shown)
        self.observers.tell("decisions", self.decisions.publish, record)
        self.observers.tell("attainment", self._judge_rejection, path, rejection)

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """The body of `GET /v1/models`."""
        return self.router.models_body(subset, now=now)

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """What is registered under `name` on an endpoint that a request may get."""
        return self.router.model(name, subset, now=now)

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """End a pick that its own stream saw the end of."""
        if self.accounting.finish(pick, outcome, now=now):
            self.observers.tell("telemetry", self.telemetry.completed, outcome)

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Count a pick where the data plane says that it was served."""
        self.router.pool.move(pick.id, address, now=now)

    def give_up(self, flights: Sequence[InFlight]) -> None:
        """Count picks that the pool has finished because nobody said how they ended."""
        for _ in flights:
            self.observers.tell("telemetry", self.telemetry.completed, Outcome.EXPIRED)
        self.observers.tell("telemetry", self.telemetry.picks_expired, len(flights))

    def complete(self, completion: Completion) -> bool:
        """Take an entry of Envoy's access log. False if it is about no pick of this router."""
        flight, is_ours, doubtful = self.accounting.complete(completion, now=self.clock())
        tell = self.observers.tell
        if flight is None:
            if is_ours:
                tell("telemetry", self.telemetry.completion_unmatched)
            return is_ours
        tell("telemetry", self.telemetry.completed, completion.outcome, completion.lag_s)
        tell("attainment", self._judge, flight.pick.request.path, completion)
        if doubtful:
            self.on_doubt(doubtful)
        for news in self.router.pool.outliers.take_news():
            log.warning("endpoint %s ejected for %g s: %s", news.address, news.for_s, news.cause)
        return True

    def _judge(self, path: str, completion: Completion) -> None:
        if self.accounting.knows_times():
            counted = self.attainment.completed(
                path_label(path or OTHER),
                completion.outcome,
                completion.status,
                completion.first_body_byte_s,
                completion.duration_s,
                now=self.clock(),
            )
            self._judged(counted)

    def _judge_rejection(self, path: str, rejection: Rejection) -> None:
        if self.accounting.knows_times():
            label = path_label(normalize_path(path) or OTHER)
            self._judged(self.attainment.rejected(label, rejection, now=self.clock()))

    def _judged(self, counted: tuple[str, bool] | None) -> None:
        if counted is not None:
            self.observers.tell("telemetry", self.telemetry.slo_judged, *counted)
