"""Work on the event loop that others can ask for as often as they like: one at a time, with rests.

Nothing that is answered is old: who asks while a page is being made gets the next one, together
with all who ask before that is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MAX_SHARE = 0.2
"""Part of the time that one kind of work takes at most, however often it is asked for."""

T = TypeVar("T")


class Turns:
    """Does one thing after the other, and rests after each in proportion to what it took.

    Args:
        clock: Monotonic seconds; the loop's own by default.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self._free_at_s = 0.0

    async def take(self, make: Callable[[], Awaitable[T]]) -> T:
        """Wait for a turn, and give what `make` gives."""
        async with self._lock:
            if self._free_at_s > self._clock():
                await self._sleep(self._free_at_s - self._clock())
            began_s = self._clock()
            try:
                return await make()
            finally:
                now = self._clock()
                self._free_at_s = now + (now - began_s) * (1 / MAX_SHARE - 1)


class SharedPage(Generic[T]):
    """One page for all who ask before it is begun.

    Args:
        make: Makes it.
        turns: Says when.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], turns: Turns) -> None:
        self._make = make
        self._turns = turns
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The next page; an error in making it is that of all who wait for it."""
        if self._next is None:
            # Not that of who asks first, who may leave.
            self._next = asyncio.get_running_loop().create_task(self._turns.take(self._begin))
        return await asyncio.shield(self._next)

    async def _begin(self) -> T:
        self._next = None
        return await self._make()
