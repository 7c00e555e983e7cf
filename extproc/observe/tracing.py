"""OpenTelemetry spans: one for each decision, in the trace of its request.

Envoy starts a span for its call to the router and sends its context with the call (`traceparent` in
the RPC's metadata, w3.org/TR/trace-context); ours is a child of it. If Envoy does not trace, a
sampled decision begins a trace of its own.

OpenTelemetry's own environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_BSP_SCHEDULE_DELAY`
and more) configure the export. Spans are sent as JSON over HTTP, because OpenTelemetry's protobuf
messages conflict with those of xds-protos: files of the same names. The exporter has its own thread
and drops spans rather than wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.errors import needs_extra
from extproc.files.reading import describe_failure
from extproc.files.tls import client_context
from extproc.observe.recorder import Recorder
from extproc.queue import Ticket
from extproc.types import Outcome, Pick, Rejection

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | int | float | bool]
INSTRUMENTATION = "extproc"
SPAN_NAME = "extproc.decision"
DEFAULT_SERVICE_NAME = "extproc"


class TracingError(Exception):
    """OpenTelemetry is not installed, and the message has the command; or it cannot be used."""


class Traced:
    """The observer of one stream, with a span for its decision; `begin` is called once."""

    def __init__(self, recorder: Recorder, begin: Callable[[], Span]) -> None:
        self._recorder, self._begin = recorder, begin
        self._span: Span | None = None
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
            self._recorder.observers.call("tracing", _end, self._span, {"extproc.reason": "gone"})

    def _decided(self, span: Span, result: Pick | Rejection | Ticket, now: float) -> None:
        if isinstance(result, Pick):
            self._has_ended = True
            attributes: Attributes = {
                "extproc.pick_id": result.id,
                "extproc.endpoint": result.address,
                "extproc.policy": result.policy,
                "extproc.reason": result.reason,
                "extproc.wait_s": now - (self._asked_at_s or now),
                "gen_ai.request.model": result.request.client_model,
                "extproc.adapter": result.request.adapter or "",
            }
            _end(span, attributes)
        elif not isinstance(result, Rejection):
            span.add_event("held", {"extproc.reason": result.reason})

    def _rejected(self, rejection: Rejection) -> None:
        _end(
            self._span or self._begin(),
            {
                "http.response.status_code": rejection.status,
                "extproc.reason": rejection.reason.value,
            },
            error=rejection.message,
        )


def _end(span: Span, attributes: Attributes, *, error: str = "") -> None:
    """End the span of a decision; `error` is the reason for one without an endpoint."""
    from opentelemetry.trace import StatusCode

    span.set_attributes(attributes)
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end()


class Tracing:
    """Makes spans and exports them.

    Args:
        sample_ratio: Share of the decisions without a trace that begin one; a decision within a
            trace follows that.
        version: `service.version`.
        exporter: Exports spans; OTLP as JSON over HTTP by default.

    Raises:
        TracingError: OpenTelemetry is not installed, or its file of CAs cannot be used.
    """

    def __init__(
        self, *, sample_ratio: float, version: str, exporter: SpanExporter | None = None
    ) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            otlp = exporter or otlp_exporter()
        except ImportError as error:
            raise TracingError(needs_extra("tracing.enabled", "otel", error)) from error
        attributes = {"service.name": environ.get("OTEL_SERVICE_NAME", DEFAULT_SERVICE_NAME)}
        self._provider = TracerProvider(
            resource=Resource.create({**attributes, "service.version": version}),
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(otlp))
        self._tracer = self._provider.get_tracer(INSTRUMENTATION, version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, metadata: Mapping[str, str]) -> Span:
        """Begin the span of a decision for an RPC with this metadata."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(metadata, context=Context())
        return self._tracer.start_span(SPAN_NAME, context=context, kind=SpanKind.SERVER)

    def close(self) -> None:
        """Export the remaining spans; blocks for the exporter's own time limit at most."""
        self._provider.shutdown()


def otlp_exporter() -> SpanExporter:
    """Return the exporter that OpenTelemetry's variables configure, with TLS as in all of ours.

    Raises:
        TracingError: The file of CAs that they name cannot be used.
    """
    from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter

    exporter: Any = OTLPSpanExporter()
    # It takes no context: urllib3 would make one that is not the same on every Python.
    options = exporter._client._transport._pool.connection_pool_kw
    ca_file = options.get("ca_certs")
    try:
        options["ssl_context"] = client_context(Path(ca_file) if ca_file else None)
    except OSError as error:
        raise TracingError(f"tracing: {ca_file}: {describe_failure(error)}") from error
    made: SpanExporter = exporter
    return made
