"""The section `policy`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from extproc.config.base import Section
from extproc.core.policies import BUILT_IN


class PolicyConfig(Section):
    """The policy that chooses a pod for each request."""

    name: str = Field(
        "least_harm",
        description=", ".join(f"`{name}`" for name in BUILT_IN)
        + ", the name of an entry point in the group `extproc.policies`, or `module:attribute`. "
        "Live.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the policy, e.g. `threshold` (requests of one adapter on "
        "one pod) for `founding`. Live.",
    )
