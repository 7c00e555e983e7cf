"""Which of many like events is worth a line in the log."""

from __future__ import annotations

INTERVAL_S = 10.0
"""Between two lines about events of one kind."""


class Seldom:
    """Lets one event through per interval and counts the others.

    Args:
        interval_s: Seconds.
    """

    __slots__ = ("_interval_s", "_next_s", "_num_held_back")

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._next_s = -float("inf")
        self._num_held_back = 0

    def admit(self, *, now: float) -> int | None:
        """None to hold an event back; else how many were held back since the last one."""
        if now < self._next_s:
            self._num_held_back += 1
            return None
        num_held_back, self._num_held_back = self._num_held_back, 0
        self._next_s = now + self._interval_s
        return num_held_back
