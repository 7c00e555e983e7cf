"""Spans by OpenTelemetry: one for each decision, in the trace of the request that it is for.

Envoy starts a span for its call to us and sends its context with the call (`traceparent` in the
RPC's metadata, w3.org/TR/trace-context); ours is a child of it. Where Envoy does not trace, a
decision begins a trace of its own, as far as it is sampled.

Where spans go, and how often, is said by OpenTelemetry's own environment variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_BSP_SCHEDULE_DELAY` and the others). They are sent as JSON
over HTTP, because OpenTelemetry's protobuf messages and those that xds-protos brings are files of
the same names. The exporter has a thread of its own and drops spans rather than wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import environ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attributes = Mapping[str, str | int | float | bool]
INSTRUMENTATION = "extproc"
SPAN_NAME = "extproc.decision"
DEFAULT_SERVICE_NAME = "extproc"


class TracingError(Exception):
    """Spans cannot be made; the message says what to install."""


class DecisionSpan:
    """The span of one decision, from its first question to its answer."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self, name: str, attributes: Attributes) -> None:
        """Note something that happened before the answer."""
        self._span.add_event(name, attributes)

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """End it with an answer; `error` says why there is no endpoint."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracing:
    """Makes spans and sends them.

    Args:
        sample_ratio: Part of the decisions without a trace that begin one; a decision in a trace
            follows it.
        version: `service.version`.
        exporter: Where spans go; OTLP as JSON over HTTP by default.

    Raises:
        TracingError: OpenTelemetry is not installed.
    """

    def __init__(
        self,
        *,
        sample_ratio: float,
        version: str,
        exporter: SpanExporter | None = None,
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingError(
                f"tracing needs OpenTelemetry: pip install 'lora-extproc[otel]' ({error})"
            ) from error
        attributes = {"service.name": environ.get("OTEL_SERVICE_NAME", DEFAULT_SERVICE_NAME)}
        self._provider = TracerProvider(
            resource=Resource.create({**attributes, "service.version": version}),
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(INSTRUMENTATION, version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, metadata: Mapping[str, str]) -> DecisionSpan:
        """Begin the span of a decision that was asked for with this RPC metadata."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(metadata, context=Context())
        return DecisionSpan(
            self._tracer.start_span(SPAN_NAME, context=context, kind=SpanKind.SERVER)
        )

    def close(self) -> None:
        """Send what is left; blocks as long as the exporter's own time limit at most."""
        self._provider.shutdown()
