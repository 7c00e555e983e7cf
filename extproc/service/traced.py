"""Decisions as spans; used only where tracing is on."""

from __future__ import annotations

from collections.abc import Callable

from extproc import __version__
from extproc.config import Config
from extproc.config.file import ConfigError
from extproc.observe.tracing import DecisionSpan, Tracing, TracingError
from extproc.queue import Ticket
from extproc.types import Pick, Rejection, Wait


def make_tracing(config: Config) -> Tracing | None:
    """Make the tracing that is configured; None where it is off.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its environment variables cannot be used.
    """
    if not config.tracing.enabled:
        return None
    ratio = config.tracing.sample_ratio
    try:
        return Tracing(sample_ratio=ratio, version=__version__)
    except TracingError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # OpenTelemetry reads its own environment variables
        raise ConfigError(f"tracing: {error or type(error).__name__}") from error


class DecisionTrace:
    """The span of one stream's decision; `begin` begins it and is called once."""

    def __init__(self, begin: Callable[[], DecisionSpan]) -> None:
        self._begin = begin
        self._span: DecisionSpan | None = None
        self._asked_at_s: float | None = None
        self._has_ended = False

    def asked(self, now: float) -> None:
        """Begin the span at the first request for a decision."""
        if self._asked_at_s is None:
            self._asked_at_s = now
            self._span = self._begin()

    def decided(self, result: Pick | Rejection | Wait | Ticket, model: str, now: float) -> None:
        """Record a pick or a wait in the span."""
        span = self._span
        if span is None:
            return  # beginning it failed
        if isinstance(result, Pick):
            self._has_ended = True
            span.end(
                {
                    "extproc.pick_id": result.id,
                    "extproc.endpoint": result.address,
                    "extproc.policy": result.policy,
                    "extproc.reason": result.reason,
                    "extproc.wait_s": now - (self._asked_at_s or now),
                    "gen_ai.request.model": model,
                    "extproc.adapter": result.request.adapter or "",
                }
            )
        elif not isinstance(result, Rejection):
            span.event("held", {"extproc.reason": result.reason})

    def left(self) -> None:
        """End the span of a request that ended undecided: its client has left, say."""
        if self._span is not None and not self._has_ended:
            self._has_ended = True
            self._span.end({"extproc.reason": "gone"})

    def rejected(self, rejection: Rejection) -> None:
        """End the span with the error that the client gets."""
        if self._has_ended or (self._span is None and self._asked_at_s is not None):
            return
        self._has_ended = True
        (self._span or self._begin()).end(
            {
                "http.response.status_code": rejection.status,
                "extproc.reason": rejection.reason.value,
            },
            error=rejection.message,
        )
