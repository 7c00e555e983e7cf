"""The benchmark of the load generators: server, figures, search. Nothing is measured here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from bench.generator import Held, held, highest
from bench.sseserver import NUM_ADAPTERS, NUM_PIECES
from extproc.loadtest.measures import Percentiles
from extproc.loadtest.replay import ReplaySettings, replay
from extproc.workload.exchange import RequestRecord
from tests.loadtest.loads import records
from tests.sim.lab import poisson

ROOT = Path(__file__).parents[1]


def record(index: int, *, late_s: float = 0.0, error: str = "") -> RequestRecord:
    at_s = index / 10
    sent_s = at_s + late_s
    return RequestRecord(
        index, None, "", at_s, sent_s, sent_s + 1, sent_s + 0.5, (0.01,) * 15, error=error
    )


def run_at_limit(limit_rps: float, rate_rps: float) -> Held:
    late_s = 0.0 if rate_rps <= limit_rps else 0.01
    made = [record(index, late_s=late_s) for index in range(20)]
    return held("locust", rate_rps, 20, made, cpu_s=1.0, wall_s=4.0)


async def test_the_server_streams_the_same_pieces_to_everyone() -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.sseserver", "--gap-s", "0.001"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(await server.stdout.readline())}"
    found: list[RequestRecord] = []
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as response:
            cards = (await response.json())["data"]
        await replay(poisson(20, rate_rps=200, num_adapters=3), ReplaySettings(url), found.append)
    finally:
        server.terminate()
        await server.wait()

    assert len(cards) == NUM_ADAPTERS + 1
    assert {(r.error, r.num_tokens, r.served_by) for r in found} == {("", NUM_PIECES, "bench")}


def test_a_run_in_figures() -> None:
    made = [record(index) for index in range(10)]

    run = held("locust", 10.0, 11, [*made, record(10, error="reset")], cpu_s=2.0, wall_s=4.0)

    assert (run.num_requests, run.num_failed, run.num_pieces) == (11, 1, 16.0)
    assert run.sent_rps == pytest.approx(10.0)
    assert run.cpu_share == 0.5
    assert run.cpu_s == pytest.approx(2 / 11)
    assert not run.is_held
    assert "NOT HELD" in str(run)


def test_a_rate_is_held_if_nothing_fails_and_the_median_is_not_late() -> None:
    assert run_at_limit(100, 90).is_held
    assert not run_at_limit(100, 110).is_held
    assert held("replay", 20, 60, records(), cpu_s=1, wall_s=1).delay_s == Percentiles()


@pytest.mark.parametrize("limit_rps", [120.0, 555.0, 999.0, 4000.0])
def test_the_search_ends_between_a_rate_that_is_held_and_one_close_by_that_is_not(
    limit_rps: float,
) -> None:
    best = highest(lambda rate_rps: run_at_limit(limit_rps, rate_rps), 600.0)

    assert limit_rps / 1.1 <= best <= limit_rps


def test_the_search_gives_up_at_what_nobody_would_call_load() -> None:
    assert highest(lambda rate_rps: run_at_limit(5.0, rate_rps), 600.0) == 0.0
