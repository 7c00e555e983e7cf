"""The section `policy`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from extproc.config.base import Section
from extproc.routing.policies import BUILT_IN


class PolicyConfig(Section):
    """The policy that chooses a pod for each request."""

    name: str = Field(
        "least_harm",
        description=", ".join(f"`{name}`" for name in BUILT_IN)
        + ", the name of an entry point in the group `extproc.policies`, or `module:attribute`. "
        "Live.",
    )
    fallback: str = Field(
        "least_pending",
        description="The built-in policy that takes the requests for which the policy raises an "
        "error or chooses what it may not; empty: they get a 503 with the code `policy_failed`. "
        "Live.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the policy, e.g. `threshold` (requests of one adapter on "
        "one pod) for `founding`. Live.",
    )

    @field_validator("fallback")
    @classmethod
    def _is_built_in(cls, name: str) -> str:
        if name and name not in BUILT_IN:
            raise ValueError(f"is {name!r}; allowed: {', '.join(BUILT_IN)}, or empty")
        return name
