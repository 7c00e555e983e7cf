"""Policies beside the one in force: on trial, and in shadow."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from extproc.config.base import Section


class OtherPolicy(Section):
    """A policy beside the one in force."""

    name: str = Field(min_length=1, description="As `policy.name` has it. Live.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Its keyword arguments, as `policy.args` has them. Live."
    )


class TrialConfig(OtherPolicy):
    """A policy that decides for a share of the requests, until it is found worse."""

    share: float = Field(
        0.05,
        gt=0,
        le=0.5,
        description="Probability that a request, conversation or tenant is in the trial's arm. "
        "Live.",
    )
    by: Literal["request", "tenant"] = Field(
        "request",
        description="`request`: each request has an arm, and all requests of a session have the "
        "same. `tenant`: each tenant has one, and requests without a tenant have none. Live.",
    )


class ShadowConfig(OtherPolicy):
    """Another policy that is asked about some decisions after they were made, in a process of its
    own. Nothing depends on its answers; metrics, the live page and `extproc watch` compare them
    ([a policy in shadow](first-policy.md#try-it-in-shadow))."""

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
