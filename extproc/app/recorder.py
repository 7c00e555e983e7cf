"""What became of requests, told to all that looks on: counted, published, judged. Part of `app`.

It decides nothing, and calls everybody through `Observers`: no answer depends on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.app.observers import Observers
from extproc.core.accounting import Completion, DecisionRecord
from extproc.core.attainment import OTHER, Attainment
from extproc.core.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.core.routes import normalize_path, path_label
from extproc.core.types import Outcome, Pick, Rejection, Wait
from extproc.shell.decisions import DecisionsService
from extproc.shell.telemetry import Telemetry


@dataclass(slots=True)
class Recorder:
    """Records what became of requests.

    Attributes:
        telemetry: Counts.
        decisions: Publishes.
        attainment: Judges which requests were answered in time.
        knows_times: Whether completions say how long their answers took; where not, nothing is
            judged.
        observers: Calls these three.
        clock: Monotonic seconds.
        wall_clock: Wall seconds, for people.
    """

    telemetry: Telemetry
    decisions: DecisionsService
    attainment: Attainment
    knows_times: Callable[[], bool]
    observers: Observers
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def routed(self, result: Pick | Rejection | Wait, seconds: float) -> None:
        """Record what choosing gave, and how long it took."""
        self.observers.tell("telemetry", self.telemetry.routed, result, seconds)
        if isinstance(result, Pick):
            self._publish(DecisionRecord(result, self.wall_clock(), seconds))

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Record an error that the client of the request with `headers` gets from us."""
        self.observers.tell("telemetry", self.telemetry.rejected, rejection)
        path = headers.get(":path", "").partition("?")[0]
        request_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        wall_s, shown = self.wall_clock(), path[:MAX_PATH_CHARS]
        self._publish(DecisionRecord(rejection, wall_s, 0.0, request_id, shown))
        self.observers.tell("attainment", self._judge_rejection, path, rejection)

    def ended(self, outcome: Outcome) -> None:
        """Record the end of a pick that its own stream saw."""
        self.observers.tell("telemetry", self.telemetry.completed, outcome)

    def completed(self, completion: Completion, path: str) -> None:
        """Record the end of a pick that the access log told of."""
        tell, telemetry = self.observers.tell, self.telemetry
        tell("telemetry", telemetry.completed, completion.outcome, completion.lag_s)
        tell("attainment", self._judge, completion, path)

    def unmatched(self) -> None:
        """Record an entry of the access log about a pick of ours that had ended."""
        self.observers.tell("telemetry", self.telemetry.completion_unmatched)

    def given_up(self, count: int) -> None:
        """Record picks that were ended without a word on how they did."""
        for _ in range(count):
            self.ended(Outcome.EXPIRED)
        self.observers.tell("telemetry", self.telemetry.picks_expired, count)

    def _publish(self, record: DecisionRecord) -> None:
        self.observers.tell("decisions", self.decisions.publish, record)

    def _judge(self, completion: Completion, path: str) -> None:
        if self.knows_times():
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
        if self.knows_times():
            label = path_label(normalize_path(path) or OTHER)
            self._judged(self.attainment.rejected(label, rejection, now=self.clock()))

    def _judged(self, counted: tuple[str, bool] | None) -> None:
        if counted is not None:
            self.observers.tell("telemetry", self.telemetry.slo_judged, *counted)
