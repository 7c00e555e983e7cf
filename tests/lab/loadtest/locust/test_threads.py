"""Coroutines in a thread of their own, for which a greenlet waits."""

from __future__ import annotations

import asyncio
from contextlib import closing

import gevent
import pytest

from extproc.lab.loadtest.locust.loadplan import LoopThread


def test_a_greenlet_gets_what_the_coroutine_returns_or_raises() -> None:
    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 42

    async def fail() -> None:
        raise ValueError("no")

    with closing(LoopThread()) as thread:
        assert thread.wait(answer) == 42
        with pytest.raises(ValueError, match="no"):
            thread.wait(fail)


def test_a_killed_greenlet_cancels_the_coroutine_and_takes_what_it_left() -> None:
    seen: list[str] = []
    left: list[str] = []

    async def send() -> None:
        try:
            seen.append("sending")
            await asyncio.sleep(3600)
        finally:
            left.append("cut")

    with closing(LoopThread()) as thread:
        user = gevent.spawn(thread.wait, send, lambda: seen.extend(left))
        with gevent.Timeout(60):
            while not seen:
                gevent.sleep(0.01)
        user.kill()

    assert seen == ["sending", "cut"]
