"""Long work takes turns: one pass of it in each round of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary


async def turn() -> None:
    """Let requests go on, and wait for this task's turn.

    All long work takes turns: one pass in each round of the event loop, however much there is. With
    `asyncio.sleep(0)` in its place, what arrives waits for a pass of everything that is being done.
    """
    loop = asyncio.get_running_loop()
    line = _lines.setdefault(loop, deque())
    waiter = loop.create_future()
    line.append(waiter)
    if len(line) == 1:
        loop.call_soon(_next, loop, line)
    await waiter


_Line = deque["asyncio.Future[None]"]
_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()


def _next(loop: asyncio.AbstractEventLoop, line: _Line) -> None:
    while line:
        waiter = line.popleft()
        if not waiter.done():  # else its task was cancelled
            waiter.set_result(None)
            break
    if line:
        loop.call_soon(_next, loop, line)
