"""Decisions as spans, where tracing is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extproc.observe.recorder import Recorder
from extproc.observe.tracing import DecisionSpan
from extproc.queue import Ticket
from extproc.types import Outcome, Pick, Rejection


class Traced:
    """The observer of one stream, with a span for its decision; `begin` is called once."""

    def __init__(self, recorder: Recorder, begin: Callable[[], DecisionSpan]) -> None:
        self._recorder, self._begin = recorder, begin
        self._span: DecisionSpan | None = None
        self._asked_at_s: float | None = None
        self._has_ended = False

    def asked(self, now: float) -> None:
        """Begin the span at the first request for a decision."""
        self._asked_at_s = now
        self._span = self._recorder.observers.call("tracing", self._begin)

    def decided(
        self, result: Pick | Rejection | Ticket, seconds: float | None, *, now: float
    ) -> None:
        """Record a pick or a wait in the span, too."""
        self._recorder.decided(result, seconds, now=now)
        if self._span is not None:  # beginning it has not failed
            self._recorder.observers.call("tracing", self._decided, self._span, result, now)

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """End the span with the error that the client gets."""
        self._recorder.rejected(rejection, headers)
        if self._has_ended or (self._span is None and self._asked_at_s is not None):
            return
        self._has_ended = True
        self._recorder.observers.call("tracing", self._rejected, rejection)

    def ended(self, pick: Pick, outcome: Outcome) -> None:
        """Record the outcome; the span is over."""
        self._recorder.ended(pick, outcome)

    def left(self) -> None:
        """End the span of a request that ended undecided: its client has left, say."""
        if self._span is not None and not self._has_ended:
            self._has_ended = True
            self._recorder.observers.call("tracing", self._span.end, {"extproc.reason": "gone"})

    def _decided(self, span: DecisionSpan, result: Pick | Rejection | Ticket, now: float) -> None:
        if isinstance(result, Pick):
            self._has_ended = True
            span.end(
                {
                    "extproc.pick_id": result.id,
                    "extproc.endpoint": result.address,
                    "extproc.policy": result.policy,
                    "extproc.reason": result.reason,
                    "extproc.wait_s": now - (self._asked_at_s or now),
                    "gen_ai.request.model": result.request.client_model,
                    "extproc.adapter": result.request.adapter or "",
                }
            )
        elif not isinstance(result, Rejection):
            span.event("held", {"extproc.reason": result.reason})

    def _rejected(self, rejection: Rejection) -> None:
        (self._span or self._begin()).end(
            {
                "http.response.status_code": rejection.status,
                "extproc.reason": rejection.reason.value,
            },
            error=rejection.message,
        )
