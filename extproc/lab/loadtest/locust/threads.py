"""Coroutines beside locust's greenlets, in a thread with an event loop of its own.

Locust replaces the standard library's blocking calls with gevent's. uvloop makes its own system
calls, so that it is not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import gevent
import uvloop
from gevent.event import Event

WATCH_S = 0.1
"""Between two calls of `meanwhile`."""
_T = TypeVar("_T")


class LoopThread:
    """An event loop in a thread, until the end of the `with` statement or `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._ended = gevent.get_hub().threadpool.spawn(self._loop.run_forever)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; nothing may be running in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._ended.get()
        self._loop.close()

    def wait(
        self,
        work: Callable[[], Coroutine[Any, Any, _T]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> _T:
        """Run a coroutine in the thread and wait for it, while other greenlets run.

        If this greenlet is killed, the coroutine is cancelled first, and its end awaited.

        Args:
            work: The coroutine; called in the thread.
            meanwhile: Called here now and then, and a last time when the coroutine has ended.

        Raises:
            Exception: What the coroutine raised.
        """
        tasks: list[asyncio.Task[_T]] = []
        has_ended, watcher = Event(), gevent.get_hub().loop.async_()
        watcher.start(has_ended.set)

        def begin() -> None:
            tasks.append(self._loop.create_task(work()))
            # The one method of a gevent loop that other threads may call.
            tasks[0].add_done_callback(lambda _: watcher.send())

        self._loop.call_soon_threadsafe(begin)
        try:
            while not has_ended.wait(WATCH_S):
                meanwhile()
        finally:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            has_ended.wait()
            watcher.close()
            meanwhile()
        return tasks[0].result()
