"""Who lets whom go first, while room is short.

Where an adapter runs, one more request for it needs no slot of its own. Tenants whose adapters run
would keep theirs for ever, and others would find none free, whatever their turn. So whoever is
asked for in vain holds up all who come after it, but for its own flow: those of a lower level, and
on its level the flows that were served more. Slots become free by that. It holds them up for
`HOLD_UP_S` at most, as what it waits for may never come; and its flow, if it got nothing by that,
not again before `AGAIN_S`. Otherwise each of its requests would, one after the other, and others
would get nothing for as long as they keep coming.
"""

from __future__ import annotations

from collections.abc import Callable

HOLD_UP_S = 0.25
AGAIN_S = 2 * HOLD_UP_S
"""From the begin of one hold-up in vain to that of the flow's next."""

MAX_FIRST = 16
"""Flows that hold up others at a time: the first in order hold up the most."""


class Precedence:
    """Those that were asked for in vain lately.

    Args:
        served: Returns what a flow of a priority has got.
    """

    def __init__(self, served: Callable[[int, str], float]) -> None:
        self._served = served
        self._first: dict[tuple[int, int, str], float] = {}  # level, priority, flow: until when

    def __len__(self) -> int:
        return len(self._first)

    def begin(self) -> None:
        """Forget all, before they are asked for anew."""
        self._first.clear()

    def add(self, level: int, priority: int, flow: str, until_s: float) -> None:
        """Have a flow of a priority go first until then. The first in order come first here."""
        key = level, priority, flow
        if key in self._first or len(self._first) < MAX_FIRST:
            self._first[key] = max(until_s, self._first.get(key, until_s))

    def behind_until_s(self, level: int, priority: int, flow: str, *, now: float) -> float:
        """Return until when a request has to let others go first; `now` if it has not."""
        until_s = now
        for (other, of, first), over_s in self._first.items():
            if over_s <= until_s or other < level:
                continue
            if other > level:
                goes_first = (of, first) != (priority, flow)
            else:
                goes_first = self._served(priority, first) < self._served(priority, flow)
            if goes_first:
                until_s = over_s
        return until_s
