"""Who lets whom go first, while room is short.

Where an adapter runs, one more request for it needs no slot of its own. Tenants whose adapters run
would keep theirs for ever, and others would find none free, whatever their turn. So whoever is
asked for in vain holds up all who come after it, but for its own flow: those of a lower level, and
on its level the flows that were served more. Slots become free by that. It holds them up for
`HOLD_UP_S` at most, as what it waits for may never come.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

HOLD_UP_S = 0.25


class Precedence:
    """Those that were asked for in vain lately.

    Args:
        served: Returns what a flow of a priority has got.
    """

    def __init__(self, served: Callable[[int, str], float]) -> None:
        self._served = served
        self._first: dict[tuple[int, str], float] = {}  # level and flow, until when

    def begin(self) -> None:
        """Forget all, before they are asked for anew."""
        self._first.clear()

    def add(self, level: int, flow: str, until_s: float) -> None:
        """Have a flow go first until then."""
        self._first[level, flow] = max(until_s, self._first.get((level, flow), -inf))

    def behind_until_s(self, level: int, priority: int, flow: str, *, now: float) -> float:
        """Return until when a request has to let others go first; `now` if it has not."""
        until_s = now
        for (other, first), over_s in self._first.items():
            if over_s <= until_s or other < level:
                continue
            if other > level or (
                first != flow and self._served(priority, first) < self._served(priority, flow)
            ):
                until_s = over_s
        return until_s
