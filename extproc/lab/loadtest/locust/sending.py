"""The share of a test that one of locust's processes sends, in a thread beside locust's greenlets.

Locust replaces the standard library's blocking calls with gevent's. uvloop makes its own system
calls, so that it is not affected.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Self, TypeVar

import gevent
import uvloop
from gevent.event import Event

from extproc.lab.loadtest.replay import open_sender, send_when_due
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.requests import Arrival

if TYPE_CHECKING:
    from extproc.lab.loadtest.locust.plan import Plan

WATCH_S = 0.1
"""Between two calls of `meanwhile`."""
_SWITCH_S = 0.0005
"""So long the thread that sends waits for the one that fills locust's table; Python's own 5 ms
would be most of a first token's time."""
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


class Share:
    """A process's share of a test, which begins at the clock's `begun_s`.

    Attributes:
        left: Requests that no user has taken, with their places in the workload.
    """

    def __init__(self, plan: Plan, place: int, clock: Callable[[], float], begun_s: float) -> None:
        self.plan = plan
        self.left = deque(plan.share(plan.make_workload(), place))
        self._rng = Random(f"think/{plan.seed}/{place}")
        self._thread, self._opened = LoopThread(), AsyncExitStack()
        opening = open_sender(plan.settings, clock, begun_s)
        self._sender = self._thread.wait(lambda: self._opened.enter_async_context(opening))
        sys.setswitchinterval(_SWITCH_S)
        # What is there now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()

    def think_s(self) -> float:
        """Return the time to think before the next request of a closed loop, in seconds."""
        return self._rng.expovariate(1 / self.plan.think_s) if self.plan.think_s else 0.0

    def send(self, sink: Callable[[RequestRecord], None]) -> None:
        """Send the next request, or all in an open loop, and wait until all of them ended."""
        is_open, sender = self.plan.mode == "open", self._sender
        requests = [self.left.popleft() for _ in range(len(self.left) if is_open else 1)]
        # Filled by the thread, emptied by the greenlet: only greenlets may call locust.
        ended: deque[RequestRecord] = deque()

        async def send(index: int, arrival: Arrival) -> None:
            ended.append(await sender.send(arrival, index, at_s=arrival.at_s if is_open else None))

        async def send_all() -> None:
            await asyncio.sleep(-sender.now())
            await send_when_due(requests, send, sender.now if is_open else lambda: inf)

        def empty() -> None:
            for _ in range(len(ended)):
                sink(ended.popleft())

        self._thread.wait(send_all, empty)

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        self._thread.wait(self._opened.aclose)
        self._thread.close()
