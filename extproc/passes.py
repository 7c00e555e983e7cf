"""Long work in passes, between which others may run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def last(passes: Iterator[T]) -> T:
    """Make all passes, one after the other; return what the last one yields."""
    return deque(passes, maxlen=1).pop()


def make_all(passes: Iterator[object]) -> None:
    """Make all passes, one after the other."""
    deque(passes, maxlen=0)


def at_once(in_passes: Callable[P, Iterator[T]]) -> Callable[P, T]:
    """Return a function that does in one go what another one does in passes."""

    @wraps(in_passes)
    def all_passes(*args: P.args, **kwargs: P.kwargs) -> T:
        return last(in_passes(*args, **kwargs))

    return all_passes


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel it."""


class _Pass:
    """A pass that has its turn later, unless it is cancelled."""

    __slots__ = ("take",)

    def __init__(self, take: Callable[[], object]) -> None:
        self.take: Callable[[], object] | None = take

    def cancel(self) -> None:
        self.take = None


class Turns:
    """Passes that take turns, one in each round of the event loop.

    However many there are at a time, what arrives meanwhile waits for one pass and not for all.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], TimerHandle]) -> None:
        self._call_later = call_later
        self._line = deque[_Pass]()

    def add(self, take: Callable[[], object]) -> TimerHandle:
        """Give a pass its turn, the last one so far."""
        each = _Pass(take)
        self._line.append(each)
        if len(self._line) == 1:
            self._call_later(0.0, self._take)
        return each

    def _take(self) -> None:
        take = None
        while take is None and self._line:
            take = self._line.popleft().take
        if self._line:
            self._call_later(0.0, self._take)
        if take is not None:
            take()
