"""A running server is measured with completions and pages alone. All in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
import pytest
from aiohttp import web

from extproc.lab.calibration.live import CalibrationError, LiveServer, Phase
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig, build_app
from tests.virtualtime import in_virtual_time

PROFILE = replace(INSTANT, step_s=0.01, disk_load_s=0.5, gpu_load_s=0.3, max_model_len=256)


@asynccontextmanager
async def running(adapters: str = "", max_cpu_loras: int = 2) -> AsyncIterator[LiveServer]:
    """A fake pod with two slots, connected to. Adapters have one letter each."""
    clock = asyncio.get_running_loop().time
    config = PodConfig(
        profile=PROFILE, adapters=list(adapters), max_loras=2, max_cpu_loras=max_cpu_loras
    )
    app = build_app(config, wall=clock)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "pod")
            await web.UnixSite(runner, path).start()
            connector = aiohttp.UnixConnector(path, force_close=True)
            async with aiohttp.ClientSession(connector=connector) as session:
                server = LiveServer(session, "http://pod", clock=clock, rng=Random(1))
                await server.connect()
                yield server
    finally:
        await runner.cleanup()


@in_virtual_time
async def test_it_says_what_it_has() -> None:
    async with running("ab") as server:
        await server.complete("a", 8, 4)
        await server.read()

        assert (server.base_model, server.adapters) == ("base", ("a", "b"))
        assert (server.max_model_len, server.max_loras) == (256, 2)


@in_virtual_time
async def test_a_phase_keeps_its_number_of_requests_in_flight() -> None:
    async with running("ab") as server:
        samples = await server.measure(Phase(3, 16, 12, ("a", "b")), window_s=0.5)

        assert samples  # one at a moment without requests is left out
        for sample in samples:
            assert sample.num_adapters == 2
            assert 1.5 < sample.num_decoding <= 3
            assert sample.step_s == pytest.approx(PROFILE.step_s)
        assert (await server.read()).num_running == 0


@in_virtual_time
async def test_both_kinds_of_loads_are_measured_with_enough_adapters() -> None:
    async with running("abcdef", max_cpu_loras=4) as server:
        await server.complete("a", 8, 4)
        await server.read()
        all_told = await server.measure_loads(tuple("abcdef"), 4)
        no_disk = await server.measure_loads(tuple("abcd"), 4)
        nothing = await server.measure_loads(("a", "b"), 4)

    to_gpu = {"gpu_load_s": PROFILE.gpu_load_s, "gpu_load_per_rank_s": 0.0}
    from_disk = {"disk_load_s": PROFILE.disk_load_s, "disk_load_per_rank_s": 0.0}
    assert all_told == pytest.approx(to_gpu | from_disk)
    assert no_disk == pytest.approx(to_gpu)
    assert nothing == {}


@in_virtual_time
async def test_with_as_many_places_as_slots_only_the_sum_is_measured() -> None:
    """vLLM's default: what loses its slot leaves the CPU cache, too."""
    async with running("abc") as server:
        await server.complete("a", 8, 4)
        await server.read()
        costs = await server.measure_loads(("a", "b", "c"), None)

    whole_s = PROFILE.disk_load_s + PROFILE.gpu_load_s
    assert costs["gpu_load_s"] == 0.0
    assert costs["disk_load_s"] == pytest.approx(whole_s)


@in_virtual_time
async def test_a_refusal_is_an_error() -> None:
    async with running() as server:
        with pytest.raises(CalibrationError, match="HTTP 404 for nobody"):
            await server.complete("nobody", 8, 4)
        with pytest.raises(CalibrationError, match="HTTP 404 for nobody"):
            await server.measure(Phase(1, 8, 4, ("nobody",)), window_s=0.5)
