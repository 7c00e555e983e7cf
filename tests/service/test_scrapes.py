"""What has a pod read at once whose next report would be waited for; and who hears of its lists."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack

import pytest

from extproc.lab.fakepod.podserver import RunningPod
from extproc.learned.losses import LogLine
from extproc.pods.scraping import COMPARE_S
from extproc.service.clocks import Clocks
from extproc.types import Endpoint, Snapshot
from tests.builders import address, cards, endpoint, pick, request
from tests.observe.scene import Scene
from tests.waiting import eventually

NEVER_S = 1e6


@pytest.mark.parametrize("news", ["a request more than it has run", "a request that failed"])
async def test_a_pod_that_says_what_is_expected_is_read_at_once_for_what_happens_there(
    news: str, pods: list[RunningPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_S", "GROWTH", "RECHECK_S", "MAX_RECHECK_S"):
        monkeypatch.setattr(f"extproc.reports.pace.{name}", NEVER_S)
    scene, where = Scene(), pods[0].address
    scene.pool.set_endpoints([Endpoint(where)])
    async with AsyncExitStack() as stack:
        reading = scene.reads(Clocks(time.monotonic, time.time, random.Random(0), time.thread_time))
        stack.push_async_callback(reading.aclose)
        reading.set_endpoints([Endpoint(where)])
        scrapes = reading._scraper

        def is_calm() -> bool:
            rest, _ = scrapes._rests.get(where, (None, None))
            return rest is not None and rest.calm_s > 100 and scrapes.wait_s(where) is not None

        def read_at_s() -> float:
            return scene.pool._pods[where].reports.reported_at_s or 0.0

        await eventually(is_calm)
        before_s = read_at_s()
        if news == "a request more than it has run":
            made = pick("ours", endpoints=(where,), info=request("a"))
            scene.pool.flights.start(made, now=time.monotonic())
        else:
            reading.doubt(where)

        await eventually(lambda: read_at_s() > before_s)


async def test_who_follows_the_lists_of_models_hears_of_other_ones_and_of_failures_alone() -> None:
    scene, heard, found = Scene(), list[bool](), list[int]()
    scene.pool.set_endpoints([endpoint(1)])
    clocks = Clocks(lambda: 1.0, lambda: 1.0, random.Random(0))
    pods = scene.reads(clocks, lambda: heard.append(True))
    for names in ("ab", "ab", "abc", "abc"):
        pods._on_models(address(1), tuple(cards(*names)), 1.0, 0.0)
        assert pods._on_same_models(address(1), 1.0, 0.0)
        found.append(len(heard))
    pods._on_models_failure(address(1), "HTTP 503", False)
    await pods.aclose()

    assert (found, len(heard)) == ([1, 1, 2, 2], 3)


async def test_pods_are_compared_with_their_peers_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, looked_s = Scene(), list[float]()
    pods = scene.reads(Clocks(lambda: scene.now, lambda: scene.now, random.Random(0)))

    def look(snapshot: Snapshot) -> list[LogLine]:
        looked_s.append(snapshot.now)
        return []

    monkeypatch.setattr(pods.slow, "update", look)
    began_s = scene.now
    for _ in range(10):
        pods.tick()
        scene.now += 1.0
    await pods.aclose()

    assert looked_s == [began_s, began_s + COMPARE_S, began_s + 2 * COMPARE_S]
