"""Long work takes turns: one pass of it in each round of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from extproc.passes import PassScheduler


async def yield_to_requests() -> None:
    """Let requests go on, and wait for this task's turn.

    All long work takes turns, however much there is. With `asyncio.sleep(0)` in its place, what
    arrives waits for a pass of everything that is being done.
    """
    loop = asyncio.get_running_loop()
    scheduler = _schedulers.get(loop) or _schedulers.setdefault(loop, PassScheduler(_call_later))
    waiter = loop.create_future()
    handle = scheduler.add(lambda: waiter.set_result(None))
    try:
        await waiter
    except asyncio.CancelledError:
        handle.cancel()
        raise


def _call_later(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    # Not the loop's own method: it would keep the loop alive.
    return asyncio.get_running_loop().call_later(delay_s, callback)


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, PassScheduler] = WeakKeyDictionary()
