"""The section about a policy in shadow."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from extproc.config.base import Section


class ShadowConfig(Section):
    """Another policy that is asked about some decisions after they were made, in a process of its
    own. Nothing depends on its answers; metrics, the live page and `extproc watch` compare them
    ([a policy in shadow](first-policy.md#try-it-in-shadow))."""

    name: str = Field(min_length=1, description="As `policy.name` has it. Live.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Its keyword arguments, as `policy.args` has them. Live."
    )
    share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Share of the decisions that it is asked about, drawn at random. Live.",
    )
    cpu_budget: float = Field(
        0.05,
        ge=0.001,
        le=1,
        description="Cores (CPU seconds a second) that it may take: its process, from the start "
        "on, and the router's work for it. Beyond that it is not asked, and the decisions are "
        "counted as skipped. Live.",
    )
    max_choice_s: float = Field(
        1.0,
        ge=0.01,
        le=60,
        description="Seconds after which its process is ended that has not answered. Live.",
    )
    max_memory_bytes: int = Field(
        128 * 1024 * 1024,
        ge=64 * 1024 * 1024,
        le=2**40,
        description="Bytes of memory of its process, 25 MB without the policy's own. If it asks "
        "for more, it ends. They count for the limit of the router's container. Live.",
    )
