"""Bounded work on the event loop for requests that may come at any rate: one at a time, with rests.

Responses are never old. A request that comes while a page is being made gets the next one, together
with all requests that come before that page is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from extproc.errors import ExtprocError

MAX_SHARE = 0.2
"""Largest share of the time for one kind of work, at any rate of requests."""

T = TypeVar("T")


class BusyError(ExtprocError):
    """As many wait for a turn as may."""


class Pacer:
    """Runs one job after the other, with a rest after each in proportion to its duration.

    Args:
        clock: Monotonic seconds; the loop's own by default.
        sleep: Waits for so many seconds.
        max_waiting: Jobs that wait or run at once; None for no limit.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        max_waiting: int | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self._free_at_s = 0.0

    async def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Wait for a turn, and return the result of `make`.

        Raises:
            BusyError: Too many wait.
        """
        if self._num_waiting == self._max_waiting:
            raise BusyError(f"{self._max_waiting} requests wait already")
        self._num_waiting += 1
        try:
            async with self._lock:
                return await self._run(make)
        finally:
            self._num_waiting -= 1

    async def _run(self, make: Callable[[], Awaitable[T]]) -> T:
        if self._free_at_s > self._clock():
            await self._sleep(self._free_at_s - self._clock())
        began_s = self._clock()
        try:
            return await make()
        finally:
            now = self._clock()
            self._free_at_s = now + (now - began_s) * (1 / MAX_SHARE - 1)


class SharedPage(Generic[T]):
    """One page for all requests that come before it is begun."""

    def __init__(self, make: Callable[[], Awaitable[T]], pacer: Pacer) -> None:
        self._make = make
        self._pacer = pacer
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the next page. An exception of `make` goes to everyone who waits for that page."""
        if self._next is None:
            # A task of its own: the first to ask may be cancelled.
            self._next = asyncio.get_running_loop().create_task(self._pacer.run(self._begin))
        return await asyncio.shield(self._next)

    async def _begin(self) -> T:
        self._next = None
        return await self._make()
