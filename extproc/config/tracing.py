"""The section `tracing`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class TracingConfig(Section):
    """Spans by OpenTelemetry (`pip install '.[otel]'`)."""

    enabled: bool = Field(
        False,
        description="Send a span for each decision, as a child of Envoy's. OpenTelemetry's "
        "environment variables, e.g. OTEL_EXPORTER_OTLP_ENDPOINT, say where to.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of decisions that are traced where Envoy has not decided that already.",
    )
