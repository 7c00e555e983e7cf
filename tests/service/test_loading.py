"""Declared adapters, as far as the application shows them to requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence

import pytest

from extproc.adapters.declared import Declaration
from extproc.config.file import parse_config
from extproc.routing.policies import Founding
from extproc.routing.precedence import Offer
from extproc.service.clocks import Clocks
from extproc.service.loading import Adapters, OnTicked
from extproc.service.routing import Routing
from extproc.types import ModelCard
from tests.builders import BASE, address, base_card, endpoint, report


class Scene:
    """One pod that lists the base model and what it is told to, and nobody answers there."""

    def __init__(self, *cards: ModelCard, clock: Callable[[], float] = time.monotonic) -> None:
        config = parse_config("discovery: {file: pods.yaml}")
        clocks = Clocks(clock, time.time, random.Random(0))
        self.routing = Routing(config, Founding(), router_id="r", clocks=clocks)
        pool, now = self.routing.pool, clocks.clock()
        pool.set_endpoints([endpoint(1)])
        pool.record_report(address(1), report(), taken_at_s=now)
        pool.record_models(address(1), [base_card(), *cards], now=now)
        self.adapters = Adapters(
            config,
            self.routing,
            router_id="r",
            poke=lambda _address: None,
            clocks=clocks,
            on_ticked=self._ticked,
        )
        self.on_ticked: OnTicked | None = None

    async def _ticked(self, forgotten: Sequence[str]) -> None:
        if self.on_ticked is not None:
            await self.on_ticked(forgotten)

    def declare(self, *declared: Declaration) -> None:
        self.adapters.declare({each.name: Offer(each) for each in declared})

    async def tick(self) -> None:
        """Let it look at the pods once."""
        ticked = asyncio.Event()

        async def on_ticked(_forgotten: Sequence[str]) -> None:
            ticked.set()

        self.on_ticked = on_ticked
        task = asyncio.create_task(self.adapters.run())
        await ticked.wait()
        task.cancel()


async def test_a_name_whose_old_version_still_serves_is_rewritten() -> None:
    """Back to no version: pods have the old one alone until the new source is loaded."""
    scene = Scene(ModelCard("sql@1", BASE, "/adapters/1"))
    scene.declare(Declaration("sql", "/adapters/2"))
    await scene.tick()

    assert scene.adapters.planner.serving("sql") == "sql@1"
    assert scene.routing.rewrites.concerns("sql")


async def test_a_declaration_takes_no_requests_from_a_base_model() -> None:
    scene = Scene()
    scene.declare(Declaration(BASE, "/adapters/1"), Declaration("sql", "/adapters/2"))
    await scene.tick()

    catalog = scene.routing.router.catalog
    assert catalog.card(BASE) is None
    assert catalog.card("sql") is not None


async def test_a_look_that_breaks_is_logged_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = itertools.count(0.0, 1e-9)
    scene = Scene(clock=lambda: next(seconds))
    scene.declare(Declaration("sql", "/adapters/1"))
    looks = asyncio.Semaphore(0)

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        looks.release()
        scene.adapters.look()
        raise ValueError("broke")

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for _ in range(2):
        await looks.acquire()
    task.cancel()

    assert "planning the next loads raised an error" in caplog.text


async def test_looks_that_take_long_leave_time_for_requests() -> None:
    seconds = itertools.count(0.0, 10.0)
    scene = Scene(clock=lambda: next(seconds))
    scene.declare(Declaration("sql", "/adapters/1"))
    num_looks = 0

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        nonlocal num_looks
        num_looks += 1
        scene.adapters.look()

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()

    assert num_looks == 1


async def test_it_rests_until_something_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.service.loading.INTERVAL_S", 3600)
    scene = Scene(ModelCard("sql", BASE, "/adapters/1"), clock=lambda: 0.0)
    scene.declare(Declaration("sql", "/adapters/1"))
    num_looks = 0

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        nonlocal num_looks
        num_looks += 1

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for expected in (1, 2, 3):
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_looks == expected
        scene.adapters.look()
    task.cancel()
