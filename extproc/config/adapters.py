"""The section `adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from extproc.config.base import Section

MAX_PATTERNS = 100


class RootConfig(Section):
    """A directory that pods and the router both see, each under its own path."""

    pod: Path = Field(description="As pods see it. Live.")
    router: Path = Field(description="As the router sees it. Live.")

    @field_validator("pod", "router")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        if not value.is_absolute() or ".." in value.parts:
            raise ValueError(f"{value}: must be an absolute path without ..")
        return value


class AdaptersConfig(Section):
    """Adapters: what pods do not report of them, and how those that are declared are loaded."""

    ranks: dict[str, Annotated[int, Field(ge=1, le=512)]] = Field(
        default_factory=dict,
        description="Rank of each adapter by its name, `r` in its `adapter_config.json`. A name "
        "with `*` (anything) stands for all that match and are not listed by name, the first such "
        f"name first; at most {MAX_PATTERNS} of them. An adapter without a rank here goes to every "
        "pod that lists it. Live.",
    )

    undeclared: Literal["admit", "refuse"] = Field(
        "admit",
        description="Adapters that pods list and nobody declares: whether requests for them are "
        "routed. They are never unloaded. Live.",
    )
    roots: tuple[RootConfig, ...] = Field(
        (),
        max_length=100,
        description=f"{RootConfig.__doc__} Adapters in them are checked before they are loaded, "
        "and loaded again after a failure once their files have changed. Live.",
    )
    cold_wait_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which a request waits until a pod has its adapter. Live.",
    )
    drain_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that requests for an old version, or for an adapter that is not "
        "declared any more, have to end before it is unloaded. Live.",
    )
    load_timeout_s: float = Field(
        60.0, gt=0, le=3600, allow_inf_nan=False, description="Longest load of an adapter. Live."
    )
    unload_timeout_s: float = Field(
        10.0, gt=0, le=3600, allow_inf_nan=False, description="Longest unload. Live."
    )
    max_loads: int = Field(
        4, ge=1, le=10_000, description="Loads at once on all pods; one on each. Live."
    )
    max_loads_per_minute: int = Field(
        30,
        ge=1,
        le=100_000,
        description="Loads a minute on a pod that has requests: each stalls its engine. Live.",
    )

    @field_validator("ranks")
    @classmethod
    def _few_patterns(cls, value: dict[str, int]) -> dict[str, int]:
        if sum("*" in name for name in value) > MAX_PATTERNS:
            raise ValueError(f"must have at most {MAX_PATTERNS} names with *")
        return value
