"""Blocking calls aside of the event loop, those that hang among them."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from extproc.files.blocking import BlockingCalls
from tests.commandline import output_of


async def test_a_call_returns_or_raises_what_the_work_does() -> None:
    aside = BlockingCalls(timeout_s=10)

    assert await aside.call(lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        await aside.call(lambda: 1 // 0)


async def test_calls_run_one_at_a_time() -> None:
    aside, running, most = BlockingCalls(timeout_s=10), [0], [0]

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        running[0] -= 1

    await asyncio.gather(*(aside.call(work) for _ in range(20)))

    assert most == [1]


async def test_a_call_that_hangs_starts_no_further_threads_and_may_come_back() -> None:
    aside, is_free, calls = BlockingCalls(timeout_s=0.05), threading.Event(), list[str]()

    def hang() -> None:
        calls.append("hang")
        is_free.wait()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await aside.call(hang)
    assert calls == ["hang"]

    is_free.set()
    while True:
        try:
            assert await aside.call(lambda: "back") == "back"
        except TimeoutError:
            continue  # the thread has not ended yet
        break


def test_a_process_ends_while_a_call_hangs() -> None:
    code = """
import asyncio, contextlib, threading
from extproc.files.blocking import BlockingCalls

async def main():
    with contextlib.suppress(TimeoutError):
        await BlockingCalls(timeout_s=0.05).call(threading.Event().wait)

asyncio.run(main())
"""
    output_of(sys.executable, "-c", code)
