"""The section `tracing`. Part of `extproc.config`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class TracingConfig(Section):
    """Spans by OpenTelemetry (`pip install 'lora-extproc[otel]'`)."""

    is_on: bool = Field(
        False,
        description="Send a span for each decision, as a child of Envoy's. Where to is said by "
        "OpenTelemetry's environment variables, e.g. OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Part of the decisions traced where Envoy does not say whether to.",
    )
