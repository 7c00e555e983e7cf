"""Waiting for what must come, however long a busy machine takes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def eventually(
    check: Callable[[], object], *, within_s: float = 60.0, every_s: float = 0.01
) -> Any:
    """Repeat `check`, which may be a coroutine function, until its result is true; return that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        result = check()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if loop.time() > deadline:
            raise AssertionError(f"{check} still returns {result!r} after {within_s} s")
        await asyncio.sleep(every_s)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """As long as the block lasts, run something that does not end by itself."""
    task = asyncio.ensure_future(work)
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
