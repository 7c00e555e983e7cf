"""What has a pod read at once whose next report would be waited for."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack

import pytest

from extproc.lab.fakepod.pod import RunningPod
from extproc.service.clocks import Clocks
from extproc.types import Endpoint
from tests.builders import pick, request
from tests.observe.scene import Scene
from tests.waiting import eventually

NEVER_S = 1e6


@pytest.mark.parametrize("news", ["a request more than it has run", "a request that failed"])
async def test_a_pod_that_says_what_is_expected_is_read_at_once_for_what_happens_there(
    news: str, pods: list[RunningPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_S", "GROWTH", "LOOK_S", "MAX_LOOK_S"):
        monkeypatch.setattr(f"extproc.reports.pace.{name}", NEVER_S)
    scene, address = Scene(), pods[0].address
    scene.pool.set_endpoints([Endpoint(address)])
    async with AsyncExitStack() as stack:
        reading = scene.reads(Clocks(time.monotonic, time.time, random.Random(0), time.thread_time))
        stack.push_async_callback(reading.aclose)
        reading.set_endpoints([Endpoint(address)])
        scrapes = reading._scraper

        def is_calm() -> bool:
            rest, _ = scrapes._rests.get(address, (None, None))
            return rest is not None and rest.calm_s > 100 and scrapes.wait_s(address) is not None

        def read_at_s() -> float:
            return scene.pool._tracked[address].reported_at_s or 0.0

        await eventually(is_calm)
        before_s = read_at_s()
        if news == "a request more than it has run":
            made = pick("ours", endpoints=(address,), info=request("a"))
            scene.pool.flights.start(made, now=time.monotonic())
        else:
            reading.doubt(address)

        await eventually(lambda: read_at_s() > before_s)
