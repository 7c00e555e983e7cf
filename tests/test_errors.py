"""What every part says of an extra that is not installed."""

from __future__ import annotations

from extproc.errors import needs_extra


def test_a_missing_extra_is_named_with_its_user_and_the_command() -> None:
    said = "tracing.enabled needs the extra `otel`: in a checkout, pip install '.[otel]'"

    assert needs_extra("tracing.enabled", "otel") == said
    assert needs_extra("tracing.enabled", "otel", ImportError("why")) == f"{said} (why)"
