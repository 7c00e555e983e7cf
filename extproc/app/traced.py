"""Decisions as spans: a stream's dispatcher that tells tracing what was asked and answered.

A part of `app`, and only there when tracing is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version

from extproc.app.observers import Observers
from extproc.config.file import ConfigError
from extproc.config.tracing import TracingConfig
from extproc.core.ports import Dispatcher, StreamSettings
from extproc.core.stream import Stream
from extproc.core.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait
from extproc.shell.rpc import Metadata
from extproc.shell.tracing import DecisionSpan, Tracing, TracingError


def make_tracing(config: TracingConfig) -> Tracing | None:
    """What makes spans, or None where that is off.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not config.enabled:
        return None
    try:
        return Tracing(sample_ratio=config.sample_ratio, version=version("lora-extproc"))
    except TracingError as error:
        raise ConfigError(str(error)) from error


def new_stream_of(
    dispatcher: Dispatcher,
    settings: StreamSettings,
    tracing: Tracing | None,
    observers: Observers,
) -> Callable[[Metadata], Stream]:
    """What makes the machine of one request; it costs nothing where tracing is off."""
    if tracing is None:
        return lambda _metadata: Stream(dispatcher, settings)

    def new_stream(metadata: Metadata) -> Stream:
        begin = partial(tracing.begin, metadata)
        return Stream(TracedDispatcher(dispatcher, begin, observers), settings)

    return new_stream


class TracedDispatcher:
    """One stream's dispatcher.

    Args:
        dispatcher: Answers.
        begin: Begins the stream's span; called once, with the first question.
        observers: Calls what makes spans.
    """

    def __init__(
        self, dispatcher: Dispatcher, begin: Callable[[], DecisionSpan], observers: Observers
    ) -> None:
        self._dispatcher = dispatcher
        self._begin = begin
        self._observers = observers
        self._span: DecisionSpan | None = None
        self._asked_at_s: float | None = None
        self._has_ended = False

    def route(self, request: RequestInfo, *, now: float) -> Pick | Rejection | Wait:
        """Ask, and put a pick or a wait into the span."""
        self._observers.tell("tracing", self._open, now)
        result = self._dispatcher.route(request, now=now)
        self._observers.tell("tracing", self._answered, result, request.model, now)
        return result

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """End the span with the error that the client gets."""
        self._dispatcher.rejected(rejection, headers)
        self._observers.tell("tracing", self._refused, rejection)

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """As without tracing."""
        self._dispatcher.finish(pick, outcome, now=now)

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """As without tracing."""
        self._dispatcher.served(pick, address, now=now)

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """As without tracing."""
        return self._dispatcher.models_body(subset, now=now)

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """As without tracing."""
        return self._dispatcher.model(name, subset, now=now)

    def _open(self, now: float) -> None:
        if self._asked_at_s is None:
            self._asked_at_s = now
            self._span = self._begin()

    def _answered(self, result: Pick | Rejection | Wait, model: str, now: float) -> None:
        span = self._span
        if span is None:
            return  # it could not be begun
        if isinstance(result, Pick):
            self._end(
                span,
                {
                    "extproc.pick_id": result.id,
                    "extproc.endpoint": result.address,
                    "extproc.policy": result.policy,
                    "extproc.reason": result.reason,
                    "extproc.wait_s": now - (self._asked_at_s or now),
                    "gen_ai.request.model": model,
                    "extproc.adapter": result.request.adapter or "",
                },
            )
        elif isinstance(result, Wait):
            span.event("held", {"extproc.reason": result.reason})

    def _refused(self, rejection: Rejection) -> None:
        if self._has_ended or (self._span is None and self._asked_at_s is not None):
            return
        self._end(
            self._span or self._begin(),
            {
                "http.response.status_code": rejection.status,
                "extproc.reason": rejection.reason.value,
            },
            error=rejection.message,
        )

    def _end(
        self,
        span: DecisionSpan,
        attributes: Mapping[str, str | int | float | bool],
        *,
        error: str = "",
    ) -> None:
        self._has_ended = True
        span.end(attributes, error=error)
