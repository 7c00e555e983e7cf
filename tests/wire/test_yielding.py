"""Long work takes turns: one pass of it in each round of the event loop."""

from __future__ import annotations

import asyncio

from extproc.wire.yielding import yield_to_requests


async def test_one_pass_is_made_in_each_round_however_many_work() -> None:
    rounds: list[int] = []
    now = 0

    def count() -> None:
        nonlocal now
        now += 1
        loop.call_soon(count)

    async def work() -> None:
        for _ in range(5):
            await yield_to_requests()
            rounds.append(now)

    loop = asyncio.get_running_loop()
    loop.call_soon(count)
    await asyncio.gather(*(work() for _ in range(4)))

    assert len(set(rounds)) == len(rounds) == 20
    assert rounds == sorted(rounds)


async def test_a_task_that_is_cancelled_takes_nobody_s_turn() -> None:
    waiting = [asyncio.create_task(yield_to_requests()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[2].cancel()

    done = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(each) for each in done] == [
        asyncio.CancelledError,
        type(None),
        asyncio.CancelledError,
    ]
    await yield_to_requests()
