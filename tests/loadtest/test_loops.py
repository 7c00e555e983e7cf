"""The closed loop: one request after the other for each user."""

from __future__ import annotations

import asyncio
from random import Random

from aiohttp import web

from extproc.loadtest.locust.closedloop import ClosedLoop
from extproc.loadtest.replay import STOPPED, ReplaySettings, Sender, open_sender
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig, start_pod
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Arrival
from tests.loadtest.test_replay import server


def closed_loop(
    sender: Sender, num: int, records: list[RequestRecord], num_users: list[int]
) -> ClosedLoop:
    return ClosedLoop(
        sender,
        [(index, Arrival(0.0, "a", 10, 3)) for index in range(num)],
        records.append,
        num_users=lambda: num_users[0],
        think_s=0.001,
        rng=Random(1),
    )


async def test_users_take_requests_in_order_and_each_once() -> None:
    records: list[RequestRecord] = []
    clock = asyncio.get_running_loop().time
    pod = await start_pod(PodConfig(adapters=["a"], profile=INSTANT))
    try:
        async with open_sender(ReplaySettings(pod.url), clock, clock() + 0.1) as sender:
            await closed_loop(sender, 30, records, [4]).run()
    finally:
        await pod.stop()

    in_order = sorted(records, key=lambda record: (record.sent_s, record.index))
    assert [record.index for record in in_order] == list(range(30))
    assert all(record.sent_s == record.at_s >= 0 for record in records)


async def test_each_user_has_one_request_in_flight_and_a_stopped_one_is_recorded() -> None:
    records: list[RequestRecord] = []
    num_seen = 0

    async def never(_: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        await asyncio.sleep(3600)
        return web.Response()

    clock = asyncio.get_running_loop().time
    async with server(never) as url, open_sender(ReplaySettings(url), clock) as sender:
        loop = asyncio.create_task(closed_loop(sender, 9, records, [3]).run())
        async with asyncio.timeout(60):
            while num_seen < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        loop.cancel()
        await asyncio.wait([loop])

    assert (num_seen, [record.error for record in records]) == (3, [STOPPED] * 3)


async def test_requests_that_are_left_wait_for_a_user() -> None:
    records: list[RequestRecord] = []
    clock, num_users = asyncio.get_running_loop().time, [0]
    pod = await start_pod(PodConfig(adapters=["a"], profile=INSTANT))
    try:
        async with open_sender(ReplaySettings(pod.url), clock) as sender:
            loop = asyncio.create_task(closed_loop(sender, 5, records, num_users).run())
            await asyncio.sleep(0.1)
            num_before = len(records)
            num_users[0] = 1
            await loop
    finally:
        await pod.stop()

    assert (num_before, len(records)) == (0, 5)
