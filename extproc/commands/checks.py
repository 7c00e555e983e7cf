"""The result of one check of something that others run, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

Evidence = tuple[bool | None, str]
"""Whether a requirement is met, None if it could not be tried; and the observation."""


class UntriedError(Exception):
    """A requirement cannot be tried here; the text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one requirement.

    Attributes:
        passed: None if it could not be tried, e.g. without an adapter on the server.
        is_required: False if routing works without it, only worse.
    """

    requirement: str
    passed: bool | None
    detail: str
    is_required: bool = True

    @property
    def fails(self) -> bool:
        """Whether a requirement is not met."""
        return self.passed is False and self.is_required


def render(check: Check) -> str:
    """Return two lines for a terminal: result and requirement, then the observation."""
    if check.passed is None:
        verdict = "skip"
    elif check.passed:
        verdict = "pass"
    else:
        verdict = "FAIL" if check.is_required else "lack"
    return f"{verdict}  {check.requirement}\n      {check.detail}"
