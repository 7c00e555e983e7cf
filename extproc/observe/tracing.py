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

from collections.abc import Mapping
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.errors import needs_extra
from extproc.files.reading import describe_failure
from extproc.files.tls import client_context

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | int | float | bool]
INSTRUMENTATION = "extproc"
SPAN_NAME = "extproc.decision"
DEFAULT_SERVICE_NAME = "extproc"


class TracingError(Exception):
    """OpenTelemetry is not installed, and the message has the command; or it cannot be used."""


class DecisionSpan:
    """The span of one decision."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event before the end."""
        self._span.add_event(name, attributes)

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """End it; `error` is the reason for a decision without an endpoint."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


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

    def begin(self, metadata: Mapping[str, str]) -> DecisionSpan:
        """Begin the span of a decision for an RPC with this metadata."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(metadata, context=Context())
        return DecisionSpan(
            self._tracer.start_span(SPAN_NAME, context=context, kind=SpanKind.SERVER)
        )

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
