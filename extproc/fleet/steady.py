"""The part of a number that has been there for a while."""

from __future__ import annotations

from math import inf

STEADY_S = 15.0
"""Routers that herd move hundreds of requests from one endpoint to the next within a second."""


class Floor:
    """The least of the values of the last `STEADY_S` seconds, up to twice that; 0 at first."""

    __slots__ = ("_current", "_since_s", "low")

    def __init__(self) -> None:
        self.low = 0
        self._current = 0
        self._since_s = -inf

    def record(self, value: int, *, now: float) -> None:
        """Record a value."""
        if now - self._since_s >= STEADY_S:
            self.low, self._current, self._since_s = self._current, value, now
        if value < self._current:
            self._current = value
        if value < self.low:
            self.low = value

    def rise(self, by: int) -> None:
        """Take all values so far for higher by so much: that has been there too."""
        self.low += by
        self._current += by
