"""The result of one check of something that others run, and how it is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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


async def tried(
    probe: Awaitable[Evidence],
    *,
    timeout_s: float,
    failures: tuple[type[Exception], ...],
    describe: Callable[[Exception], str],
) -> Evidence:
    """Return what a probe found. One that fails, or does not end, has found a fault.

    Args:
        timeout_s: After which it is given up, with a TimeoutError.
        failures: Of the other side, TimeoutError among them; others are bugs of ours, and raised.
        describe: Says of a failure, in one line for people, what it means.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await probe
    except UntriedError as error:
        return None, str(error)
    except failures as error:
        return False, describe(error)


def render(check: Check) -> str:
    """Return two lines for a terminal: result and requirement, then the observation."""
    if check.passed is None:
        verdict = "skip"
    elif check.passed:
        verdict = "pass"
    else:
        verdict = "FAIL" if check.is_required else "lack"
    return f"{verdict}  {check.requirement}\n      {check.detail}"
