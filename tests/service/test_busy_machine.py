"""A router that gets little of its core: other processes are always ready to run there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from grpc import aio

from extproc.lab.fakepod.config import PodConfig
from extproc.stack.processes import bound_to_us
from tests import clients
from tests.e2e.harness import RouterProcess
from tests.fakepods import running_pods
from tests.waiting import beside, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INTERVAL_S = 0.05
NUM_PODS = 8
NUM_LOOPS = (2, 2, 4, 8, 16, 32)
"""Started one after the other."""


@contextmanager
def busy_loops(num: int, *, cpu: int) -> Iterator[None]:
    """So many processes that always want to run on this core."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(bound_to_us(command)) for _ in range(num)]
    try:
        for each in loops:
            os.sched_setaffinity(each.pid, {cpu})
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


class Watched:
    """A router, asked again and again for a destination and for its state.

    Attributes:
        num_answered: Requests that got a destination.
        num_looks: At its state.
        num_unknown: Endpoints without a report that counts, in all looks together.
    """

    def __init__(self, router: RouterProcess) -> None:
        self._router = router
        self.num_answered = self.num_looks = self.num_unknown = 0

    async def interval_s(self) -> float:
        return await self._router.counter("extproc_scrape_interval_seconds")

    async def is_stretched(self) -> bool:
        return await self.interval_s() > 2 * INTERVAL_S

    async def is_stretched_soon(self) -> bool:
        for _ in range(20):
            if await self.is_stretched():
                return True
            await asyncio.sleep(0.2)
        return False

    async def is_usual(self) -> bool:
        return 0 < await self.interval_s() <= 1.5 * INTERVAL_S  # a late loop adds a little

    async def send(self, channel: clients.Channel) -> None:
        while True:
            answer = await clients.route(channel, "a")
            assert answer.destination
            self.num_answered += 1
            await asyncio.sleep(0.01)

    async def look(self) -> None:
        while True:
            num_known = await self._router.counter("extproc_endpoint_known")
            self.num_unknown += NUM_PODS - int(num_known)
            self.num_looks += 1
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_busy_loops_stretch_scrapes_and_neither_requests_nor_reports_are_lost() -> None:
    """Two do not make it late where the kernel shares a core well
    and the router needs little of it, so more are started until they do."""
    cpu = max(os.sched_getaffinity(0))
    configs = [PodConfig(f"pod-{number}", adapters=["a"]) for number in range(NUM_PODS)]
    async with running_pods(*configs) as pods:
        config = {
            "discovery": {"static": [pod.address for pod in pods]},
            "scrape": {
                **{"interval_s": INTERVAL_S, "expiry_s": 20.0, "timeout_s": 10.0},
                "budget": 1.0,  # else a slow machine stretches them without any load
            },
        }
        async with (
            RouterProcess(config) as router,
            aio.insecure_channel(router.address) as channel,
        ):
            watched = Watched(router)
            await eventually(watched.is_usual)
            async with beside(watched.send(channel)), beside(watched.look()):
                usual = os.sched_getaffinity(router.pid)
                os.sched_setaffinity(router.pid, {cpu})
                with ExitStack() as loops:
                    for num in NUM_LOOPS:
                        loops.enter_context(busy_loops(num, cpu=cpu))
                        if await watched.is_stretched_soon():
                            break
                    await eventually(watched.is_stretched)
                    before = watched.num_answered
                    await eventually(lambda: watched.num_answered > before)
                os.sched_setaffinity(router.pid, usual)  # others may be busy on that core
                await eventually(watched.is_usual)

            assert watched.num_looks > 0
            assert watched.num_unknown == 0
