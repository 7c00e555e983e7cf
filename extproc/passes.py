"""Long work in passes, between which others may run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

WORK_S = 0.2e-3
REST_RATIO = 4
"""Seconds of CPU after which a thread rests, and for how many times as long: in a fifth of the time
the event loop waits for the interpreter's lock, for no longer than such a piece of work."""
FREE_S = 5e-3
"""Of work before the first rest: the list of a pod with two thousand adapters takes as long."""

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


class Rests:
    """The rests of a thread that works beside the event loop: four times as long as its work.

    After each input or output the loop's thread waits for the interpreter's lock. Beside one that
    parses a long page for 80 ms without rest it gets 4 ms of them.

    Args:
        clock: Seconds of CPU of the thread.
        sleep: Waits for so many seconds.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._clock, self._sleep = clock, sleep
        self._since_s: float | None = None

    def __call__(self) -> None:
        """Rest if enough work was done since the last rest, or `FREE_S` after the first call."""
        now = self._clock()
        if self._since_s is None:
            self._since_s = now + FREE_S
        elif (worked_s := now - self._since_s) >= WORK_S:
            self._sleep(REST_RATIO * worked_s)
            self._since_s = self._clock()


def no_rest() -> None:
    """Go on: the work is short, or nobody waits."""


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


class PassScheduler:
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
