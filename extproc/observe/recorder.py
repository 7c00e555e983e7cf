"""The outcomes of requests, for metrics, published decisions and attainment.

Each is called through `Observers`: no response depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from extproc.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.observe.arms import ArmRecorder
from extproc.observe.attainment import OTHER, Attainment, is_in_time
from extproc.observe.decisions import DecisionsService
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.paths import normalize_path, path_label
from extproc.pods.completion import Completion, DecisionRecord, Ended
from extproc.queue import Ticket
from extproc.routing.rewrites import Rewrites
from extproc.tenancy import Claim
from extproc.types import Outcome, Pick, Rejection

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recorder:
    """Records the outcomes of requests, as reported by streams (`StreamObserver`) and by other
    sources.

    Attributes:
        knows_times: Whether completions carry response times; if not, attainment is not recorded.
        claim_of: Returns the claim of a model's requests by their route.
        rewrites: Judges the canaries among the targets.
        clock: Monotonic seconds.
        wall_clock: Wall seconds.
        arms: Records for a policy on trial.
    """

    telemetry: Telemetry
    decisions: DecisionsService
    attainment: Attainment
    knows_times: Callable[[], bool]
    observers: Observers
    claim_of: Callable[[str], Claim]
    rewrites: Rewrites
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    arms: ArmRecorder = field(default_factory=ArmRecorder)

    def asked(self, now: float) -> None:
        """Nothing is recorded before there is a result."""

    def decided(
        self, result: Pick | Rejection | Ticket, seconds: float | None, *, now: float
    ) -> None:
        """Record a routing result and the seconds it took; None for that of a held request."""
        # As `Observers.call`, here and in `completed`, where every request comes.
        try:
            self.telemetry.routed(result, seconds)
        except Exception:
            self.observers.failed("telemetry")
        if type(result) is Pick:
            decisions = self.decisions
            try:
                if decisions.is_read:
                    decisions.publish(DecisionRecord(result, self.wall_clock(), seconds or 0.0))
                else:
                    decisions.skip()
            except Exception:
                self.observers.failed("decisions")

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Record an error response of ours to the request with `headers`."""
        self.observers.call("telemetry", self.telemetry.rejections.add, (rejection.reason,))
        path = headers.get(":path", "").partition("?")[0]
        request_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        wall_s, shown = self.wall_clock(), path[:MAX_PATH_CHARS]
        record = DecisionRecord(rejection, wall_s, 0.0, request_id, shown)
        self.observers.call("decisions", self.decisions.publish, record)
        counted = self.observers.call("attainment", self._judge_rejection, path, rejection)
        if counted is not None:
            claim = self.claim_of(rejection.model)
            self.observers.call("telemetry", self.telemetry.route_judged, claim, False)

    def left(self) -> None:
        """Nothing is recorded: the queue counts who leaves it."""

    def refused(self) -> None:
        """Record that an endpoint refused a request as it is full."""
        self.observers.call("telemetry", self.telemetry.full_answers.add)

    def ended(self, pick: Pick, outcome: Outcome) -> None:
        """Record the end of a pick that its own stream reported."""
        call, ended = self.observers.call, Ended(pick, outcome)
        call("telemetry", self.telemetry.completed, outcome)
        call("decisions", self.decisions.ended, ended, self.wall_clock())
        if pick.request.drawn_target:
            call("canaries", self.rewrites.ended, ended, None)
        if self.arms.trial is not None:
            call("arms", self.arms.ended, ended, None)

    def completed(self, ended: Ended, completion: Completion, *, now: float) -> None:
        """Record the end of a pick that an entry of the access log reported."""
        call, telemetry, request = self.observers.call, self.telemetry, ended.pick.request
        is_attained = None
        if self.knows_times():
            path, claim = path_label(request.path or OTHER), request.claim
            try:
                self.attainment.completed(path, completion, now)
            except Exception:
                self.observers.failed("attainment")
            try:
                telemetry.logged(ended, completion)
            except Exception:
                self.observers.failed("telemetry")
            if claim.ttft_s is not None:
                is_attained = is_in_time(claim.ttft_s, completion)
                call("telemetry", telemetry.route_judged, claim, is_attained)
        else:
            call("telemetry", telemetry.completed, completion.outcome, completion.lag_s)
        try:
            self.decisions.ended(ended, self.wall_clock())
        except Exception:
            self.observers.failed("decisions")
        if request.drawn_target:
            call("canaries", self.rewrites.ended, ended, is_attained)
        if self.arms.trial is not None:
            ttft_s = self.attainment.ttft_s if self.knows_times() else None
            call("arms", self.arms.ended, ended, ttft_s)

    def unmatched(self) -> None:
        """Record an access log entry for a pick of ours that had already ended."""
        self.observers.call("telemetry", self.telemetry.unmatched.add)

    def scraped(self, duration_s: float) -> None:
        """Record a page of metrics, and how long it took."""
        self.observers.call("telemetry", self.telemetry.scrape_s.observe, duration_s)

    def scrape_failed(self, address: str) -> None:
        """Record that an endpoint sent no page."""
        self.observers.call("telemetry", self.telemetry.scrape_failures.add, (address,))

    def eds_refused(self, message: str) -> None:
        """Record that Envoy refused the endpoints."""
        log.error("Envoy refused the pods: %s", message)
        self.telemetry.eds_refusals.add()

    def given_up(self, picks: Sequence[Pick]) -> None:
        """Record picks that ended with an unknown outcome."""
        for pick in picks:
            self.ended(pick, Outcome.EXPIRED)
        self.observers.call("telemetry", self.telemetry.expired.add, (), len(picks))

    def _judge_rejection(self, path: str, rejection: Rejection) -> tuple[str, bool] | None:
        if not self.knows_times():
            return None
        label = path_label(normalize_path(path) or OTHER)
        return self.attainment.rejected(label, rejection, now=self.clock())
