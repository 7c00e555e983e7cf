"""The engine in real time: nobody waits for ever, clients that leave are forgotten, time scales."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import INSTANT, EngineProfile
from extproc.lab.engine.records import EngineRequest, EngineStats
from extproc.lab.fakepod.runner import EngineDeadError, EngineRunner, Generation
from extproc.lab.fakepod.vllmpage import VllmPage
from tests.virtualtime import in_virtual_time
from tests.waiting import eventually


@asynccontextmanager
async def _running(
    profile: EngineProfile = INSTANT, *, max_loras: int = 2
) -> AsyncIterator[EngineRunner]:
    engine = Engine(profile, max_loras=max_loras)
    page = VllmPage(
        model_name="base",
        max_loras=max_loras,
        num_gpu_blocks=engine.kv_blocks,
        block_tokens=profile.block_tokens,
        names={name: name for name in "abc"},
        started_wall_s=0.0,
    )
    clock = asyncio.get_running_loop().time
    runner = EngineRunner(engine, page, clock=clock, wall=clock)
    task = asyncio.get_running_loop().create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _collect(generation: Generation) -> int:
    seen = 0
    while not generation.is_finished or seen < generation.num_tokens:
        seen = await generation.more(seen)
    return seen


async def test_every_request_gets_its_tokens() -> None:
    async with _running() as runner:
        generations = [
            runner.submit(EngineRequest(str(i), 10, i, "abc"[i % 3])) for i in range(1, 30)
        ]
        tokens = await asyncio.gather(*map(_collect, generations))

        assert tokens == list(range(1, 30))
        assert runner.reported == EngineStats()


async def test_an_idle_engine_wakes_for_a_request() -> None:
    async with _running() as runner:
        for i in range(3):
            await runner.submit(EngineRequest(str(i), 10, 2)).finished()
            await asyncio.sleep(0.01)

        assert runner.engine.counters.num_finished == 3


@in_virtual_time
async def test_a_step_takes_its_time() -> None:
    """10 steps of 1 s, by the loop's clock and on the page."""
    async with _running(replace(INSTANT, step_s=1.0)) as runner:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        await runner.submit(EngineRequest("r", 1, 10)).finished()

        assert clock() - started_s == pytest.approx(10.0)
        labels = {"engine": "0", "model_name": "base"}
        decode_s = runner.page.registry.get_sample_value(
            "vllm:inter_token_latency_seconds_sum", labels
        )
        assert decode_s == pytest.approx(9.0)


async def test_an_aborted_request_leaves_engine_and_page() -> None:
    async with _running(replace(INSTANT, step_s=0.005)) as runner:
        generation = runner.submit(EngineRequest("r", 10, 8000, "a"))
        await generation.more(0)
        runner.abort(generation.request)
        runner.abort(generation.request)
        await runner.submit(EngineRequest("next", 10, 2)).finished()

        assert (runner.engine.counters.num_aborted, runner.engine.counters.num_finished) == (1, 1)
        assert runner.engine.stats == EngineStats()


async def test_the_page_says_idle_after_the_only_request_was_aborted() -> None:
    async with _running(replace(INSTANT, step_s=0.005)) as runner:
        generation = runner.submit(EngineRequest("r", 10, 8000, "a"))
        await generation.more(0)
        runner.abort(generation.request)
        await eventually(lambda: not runner.reported.num_running)
        await asyncio.sleep(0.01)
        page = runner.page.render(["vllm:lora_requests_info", "vllm:num_requests_running"]).decode()
        series = {
            line.split('running_lora_adapters="')[1].split('"')[0]: float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith("vllm:lora")
        }

        assert max(series, key=lambda adapters: series[adapters]) == ""
        assert 'vllm:num_requests_running{engine="0",model_name="base"} 0.0' in page


@in_virtual_time
async def test_a_load_waits_for_the_step_and_holds_up_the_next_one() -> None:
    profile = replace(INSTANT, step_s=0.001, gpu_load_s=0.05)
    async with _running(profile, max_loras=1) as runner:
        generation = runner.submit(EngineRequest("r", 10, 8000))
        await generation.more(0)
        clock = asyncio.get_running_loop().time
        started_s = clock()
        await runner.load_adapter("a")

        assert clock() - started_s == pytest.approx(0.05, abs=1.5 * profile.step_s)
        assert runner.engine.gpu_adapters == ("a",)
        assert await generation.more(generation.num_tokens) > 0


async def test_a_dead_engine_fails_every_waiting_request() -> None:
    async with _running(replace(INSTANT, step_s=10.0)) as runner:
        generation = runner.submit(EngineRequest("r", 10, 10))
        load = asyncio.ensure_future(runner.load_adapter("a"))
        await asyncio.sleep(0.01)

    for waiting in (generation.finished(), generation.more(0), load):
        with pytest.raises(EngineDeadError):
            await waiting
    with pytest.raises(EngineDeadError):
        runner.submit(EngineRequest("late", 1, 1))
    with pytest.raises(EngineDeadError):
        await runner.load_adapter("a")
    assert runner.is_dead
