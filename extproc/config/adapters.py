"""The section `adapters`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from extproc.config.base import Section

MAX_PATTERNS = 100


class AdaptersConfig(Section):
    """What pods do not report of adapters."""

    ranks: dict[str, Annotated[int, Field(ge=1, le=512)]] = Field(
        default_factory=dict,
        description="Rank of each adapter by its name, `r` in its `adapter_config.json`. A name "
        "with `*` (anything) stands for all that match and are not listed by name, the first such "
        f"name first; at most {MAX_PATTERNS} of them. An adapter without a rank here goes to every "
        "pod that lists it. Live.",
    )

    @field_validator("ranks")
    @classmethod
    def _few_patterns(cls, value: dict[str, int]) -> dict[str, int]:
        if sum("*" in name for name in value) > MAX_PATTERNS:
            raise ValueError(f"must have at most {MAX_PATTERNS} names with *")
        return value
