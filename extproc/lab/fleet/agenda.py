"""Virtual time: what is to be done when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf


class Agenda:
    """Actions by their time; those of the same time in the order in which they were entered.

    Attributes:
        now: Virtual seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Have something done at a time."""
        heappush(self._entries, (at_s, next(self._order), action))

    def after(self, wait_s: float, action: Callable[[], None]) -> None:
        """Have something done in so many seconds."""
        self.at(self.now + wait_s, action)

    @property
    def next_s(self) -> float:
        """The time of the next action; infinite without one."""
        return self._entries[0][0] if self._entries else inf

    def go_to(self, at_s: float) -> None:
        """Do what is due by then, and let it be then."""
        self.run_until(at_s)
        self.now = at_s

    def run_until(self, until_s: float) -> None:
        """Do what is due by then, each at its time; `now` stays at the last."""
        entries = self._entries
        while entries and entries[0][0] <= until_s:
            self.now, _, action = heappop(entries)
            action()
