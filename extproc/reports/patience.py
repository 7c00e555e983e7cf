"""Time as a busy event loop has it: how long pods may take, and how many are asked at once."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

_NUM_PARTS = 10
"""Parts of a timeout. A new connection, a request and its response take six turns."""
_STARTS_A_ROUND = 8
"""With 5 ms of CPU: requests go on while 1,000 pods come."""


class Patience:
    """A timeout that the event loop sees pass: a context manager, like `asyncio.timeout`.

    It passes in parts, each of which begins when the loop has seen the one before end. So it takes
    as much longer as the loop is late. A server whose answer is there is not called silent because
    this process had no core to read it with; nor does a late router ask again and get later.
    """

    def __init__(self, timeout_s: float) -> None:
        self._part_s, self._num_left = timeout_s / _NUM_PARTS, _NUM_PARTS
        self._limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._wait()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._part_s, self._pass)

    def _pass(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._wait()
        else:
            self._limit.reschedule(self._loop.time())


class PacedStarts:
    """Lets few begin in one round of the event loop, one after another."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a round of the event loop that has room."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._have_some_begin)
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _have_some_begin(self) -> None:
        for _ in range(min(_STARTS_A_ROUND, len(self._waiting))):
            waiter = self._waiting.popleft()
            if not waiter.done():  # cancelled: its endpoint has left
                waiter.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._have_some_begin)
