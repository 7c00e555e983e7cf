"""The section `log`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from extproc.config.base import Section


class LogConfig(Section):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is written."
    )
    json_lines: bool = Field(True, description="One JSON object per line; plain text otherwise.")
