"""The section `policy`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from extproc.config.base import Section


class PolicyConfig(Section):
    """The policy that chooses a pod for each request."""

    name: str = Field(
        "founding",
        description="`founding`, `least_pending`, `round_robin`, `random`, the name of an entry "
        "point in the group `extproc.policies`, or `module:attribute`. Live.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the policy, e.g. `threshold` (requests of one adapter on "
        "one pod) for `founding`. Live.",
    )
