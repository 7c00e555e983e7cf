"""Policies on real vLLM servers: the same requests with each, and the loads that they cause.

    pytest -s tests/vllm/test_policies.py

prints the comparison and writes loadtest/out/real/vllm.json (docs/archive/loadtest-results.md has
one). The loads are counted in the servers' workers. The model is tiny and the machine may do other
work, so only the order of the loads from disk is asserted, the figure least subject to chance. What
the times say, the printed intervals tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from rich.console import Console

from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.compare import Round
from extproc.lab.loadtest.fleetfiles import gateway_bootstrap, router_config
from extproc.lab.loadtest.loads import Block, rotated
from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.loadtest.results import LoadResult, describe_machine, real_run, save
from extproc.lab.loadtest.runs import BlockRun
from extproc.lab.loadtest.screen import line_of, print_comparison
from extproc.lab.workload.exchange import RequestForm, RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import PodTotals
from extproc.lab.workload.synthetic import zipf
from tests.e2e.harness import EnvoyProcess, RouterProcess
from tests.vllm.gateway import knows_models
from tests.vllm.server import (
    BASE_MODEL,
    MAX_CPU_LORAS,
    MAX_LORAS,
    ROOT,
    VllmClient,
    VllmServer,
    build_model,
)
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_200),
    pytest.mark.asyncio(loop_scope="module"),
]

POLICIES = ("founding", "round_robin", "least_harm")
NUM_SERVERS = 2
NUM_ADAPTERS = 10
SEEDS = (1, 2, 3)
RATE_RPS = 4.0
WARM_UP_S, DURATION_S = 4.0, 20.0
SLO = Slo(ttft_s=0.5, tpot_s=0.1)
SETTINGS = FleetSettings(
    num_pods=NUM_SERVERS,
    max_loras=MAX_LORAS,
    max_cpu_loras=MAX_CPU_LORAS,
    scrape_interval_s=0.1,
    # A server that starves for a moment on a busy machine is not one that is gone.
    report_expiry_s=6.0,
)
RESULT = ROOT / "loadtest" / "out" / "real" / "vllm.json"


def made(seed: int) -> Workload:
    """Requests for more adapters than the servers have slots, a few of them popular."""
    return zipf(
        "vllm",
        num_adapters=NUM_ADAPTERS,
        exponent=1.0,
        rate_rps=RATE_RPS,
        duration_s=WARM_UP_S + DURATION_S,
        seed=seed,
        lengths=lambda rng: (rng.randint(20, 60), rng.randint(20, 60)),
        ranks=(8,),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[VllmClient]]:
    adapters = sorted(made(1).adapters)
    folder: Path = tmp_path_factory.mktemp("policies")
    build_model(folder, adapters)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        clients = []
        for _ in range(NUM_SERVERS):
            server = VllmServer(folder, adapters)
            stack.push_async_callback(server.close)
            server.launch()
            clients.append(VllmClient(server, http))
        for client in clients:
            await client.server.start()
        yield clients


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls(servers: Sequence[VllmClient]) -> AsyncIterator[dict[str, str]]:
    """A gateway for each policy, all in front of the same servers."""
    pods = [{"address": s.server.address, "name": f"vllm-{n}"} for n, s in enumerate(servers)]
    async with AsyncExitStack() as stack:
        urls = {}
        for policy in POLICIES:
            config = {**router_config(policy, SETTINGS), "discovery": {"static": pods}}
            router = await stack.enter_async_context(RouterProcess(config))
            bootstrap = gateway_bootstrap([router.address], SETTINGS)
            envoy = await stack.enter_async_context(EnvoyProcess(bootstrap))
            await eventually(partial(knows_models, router))
            urls[policy] = envoy.url
        yield urls


async def _run(servers: Sequence[VllmClient], url: str, policy: str, seed: int) -> BlockRun:
    """Send the warm-up, then what counts, each to its last response."""
    form = RequestForm(base_model=BASE_MODEL, extra=(("ignore_eos", True), ("temperature", 0)))
    settings, workload = ReplaySettings(url, form), made(seed)
    records: list[RequestRecord] = []
    await replay(workload.window(0.0, WARM_UP_S), settings, lambda _: None)
    before = [await server.loads() for server in servers]
    await replay(workload.window(WARM_UP_S, inf), settings, records.append)
    after = [await server.loads() for server in servers]
    assert {record.error for record in records} == {""}
    result = real_run(
        records,
        target=f"policy:{policy}",
        scenario="vllm",
        rate_rps=RATE_RPS,
        seed=seed,
        slo=SLO,
        pods=[
            PodTotals(f"vllm-{number}", gpu - old_gpu, disk - old_disk)
            for number, ((gpu, disk), (old_gpu, old_disk)) in enumerate(
                zip(after, before, strict=True)
            )
        ],
    )
    block = Block("vllm", RATE_RPS, seed, workload, SETTINGS, SLO)
    return BlockRun(policy, block, result)


async def test_policies_that_know_adapters_read_fewer_from_disk_than_round_robin(
    servers: Sequence[VllmClient], urls: dict[str, str]
) -> None:
    console, rounds = Console(), list[Round]()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    for number, seed in enumerate(SEEDS):
        runs = []
        for policy in rotated(POLICIES, number):
            runs.append(await _run(servers, urls[policy], policy, seed))
            console.print(line_of(runs[-1]), soft_wrap=True)
        rounds.append(runs)
    print_comparison(console, POLICIES, rounds)
    result = LoadResult(
        name="vllm",
        about=f"{NUM_SERVERS} real vLLM servers, a tiny model on the CPU, {MAX_LORAS} slots each.",
        date=date,
        machine=describe_machine(),
        slo=SLO,
        runs=[run.result for round_ in rounds for run in round_ if run.result],
    )
    save(result, RESULT)

    loads = dict.fromkeys((f"policy:{policy}" for policy in POLICIES), 0.0)
    for run in result.runs:
        loads[run.target] += run.metrics.disk_loads_per_1000
    assert loads["policy:founding"] < loads["policy:round_robin"]
    assert loads["policy:least_harm"] < loads["policy:round_robin"]
