"""Work that is asked for too often is shared, and has its part of the time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from extproc.observe.pacing import MAX_SHARE, BusyError, Pacer, SharedPage


class Time:
    """A clock that moves by sleeping and by working."""

    def __init__(self) -> None:
        self.now = 100.0
        self.worked_s = 0.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def work(self, seconds: float) -> float:
        self.now += seconds
        self.worked_s += seconds
        return seconds


async def test_work_is_limited_to_its_share_of_the_time() -> None:
    time = Time()
    turns = Pacer(time.clock, time.sleep)
    for seconds in (0.1, 3.0, 0.2, 0.0, 1.0):
        assert await turns.run(partial(time.work, seconds)) == seconds
    await turns.run(lambda: time.work(0.0))

    assert time.worked_s == pytest.approx(MAX_SHARE * (time.now - 100.0))


async def test_the_first_is_not_waited_for_and_neither_is_one_after_a_rest() -> None:
    time = Time()
    turns = Pacer(time.clock, time.sleep)
    await turns.run(lambda: time.work(1.0))
    time.now += 1000.0
    await turns.run(lambda: time.work(1.0))

    assert time.now == 1102.0


async def test_so_many_wait_at_most_and_there_is_room_again_afterwards() -> None:
    time, going_on = Time(), asyncio.Event()
    turns = Pacer(time.clock, time.sleep, max_waiting=2)
    waiting = [asyncio.ensure_future(turns.run(going_on.wait)) for _ in range(3)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [type(each.exception()) for each in waiting if each.done()] == [BusyError]
    going_on.set()
    assert await asyncio.gather(*waiting[:2]) == [True, True]

    assert await turns.run(lambda: time.work(1.0)) == 1.0


async def test_who_asks_while_a_page_is_made_gets_the_next_one_with_all_others() -> None:
    going_on, num_begun = asyncio.Event(), 0

    async def make() -> int:
        nonlocal num_begun
        num_begun += 1
        made = num_begun
        await going_on.wait()
        return made

    page = SharedPage(make, Pacer(lambda: 0.0))
    first = asyncio.create_task(page.get())
    while not num_begun:
        await asyncio.sleep(0)
    others = [asyncio.create_task(page.get()) for _ in range(50)]
    await asyncio.sleep(0)
    others[0].cancel()  # one that leaves takes the page from nobody
    going_on.set()

    assert await first == 1
    assert set(await asyncio.gather(*others[1:])) == {2}
    assert num_begun == 2


async def test_a_page_that_cannot_be_made_is_an_error_for_those_who_wait_and_no_longer() -> None:
    results = iter([ValueError("broken"), None])

    async def make() -> str:
        error = next(results)
        if error is not None:
            raise error
        return "page"

    page = SharedPage(make, Pacer(lambda: 0.0))
    with pytest.raises(ValueError, match="broken"):
        await page.get()

    assert await page.get() == "page"
