"""Blocking calls aside of the event loop, in threads that nothing has to wait for.

A call to a network mount may never return. The threads of `asyncio.to_thread` are few and shared,
and the process waits for them in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

_T = TypeVar("_T")


class BlockingCalls:
    """Runs calls one at a time; one that hangs holds up those behind it, and nothing else.

    Args:
        timeout_s: Longest wait for a call's result, and for the calls before it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: asyncio.Future[tuple[Any, Exception | None]] | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, or raise what it raises.

        Raises:
            TimeoutError: It takes too long, or waits for one that does. It goes on, or is left out.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            while self._running is not None:
                await asyncio.wait([self._running])
            future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()
            Thread(target=self._work, args=(work, future, loop), daemon=True).start()
            self._running = future
            result, error = await asyncio.shield(future)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return] # of `work`

    def _work(
        self,
        work: Callable[[], _T],
        future: asyncio.Future[tuple[Any, Exception | None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        outcome: tuple[Any, Exception | None]
        try:
            outcome = work(), None
        except Exception as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._end, future, outcome)

    def _end(
        self,
        future: asyncio.Future[tuple[Any, Exception | None]],
        outcome: tuple[Any, Exception | None],
    ) -> None:
        self._running = None
        future.set_result(outcome)
