"""Another policy on trial."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from extproc.config.base import Section


class TrialConfig(Section):
    """A policy that decides for a share of the requests, until it is found worse."""

    name: str = Field(description="As `policy.name` has it. Live.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of that policy. Live."
    )
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
