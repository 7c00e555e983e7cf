"""Passes over bodies take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel it."""


class _Pass:
    """A pass over a body that has its turn later, unless it is cancelled."""

    __slots__ = ("take",)

    def __init__(self, take: Callable[[], None]) -> None:
        self.take: Callable[[], None] | None = take

    def cancel(self) -> None:
        self.take = None


class Passes:
    """Passes over bodies, one in each round of the event loop.

    However many are read at a time, what arrives meanwhile waits for one pass and not for all.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], TimerHandle]) -> None:
        self._call_later = call_later
        self._turns = deque[_Pass]()

    def add(self, take: Callable[[], None]) -> TimerHandle:
        """Give a pass its turn, the last one so far."""
        turn = _Pass(take)
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._call_later(0.0, self._take)
        return turn

    def _take(self) -> None:
        take = None
        while take is None and self._turns:
            take = self._turns.popleft().take
        if self._turns:
            self._call_later(0.0, self._take)
        if take is not None:
            take()
