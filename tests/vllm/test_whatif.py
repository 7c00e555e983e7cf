"""Traffic of two real vLLM servers is recorded, and the laboratory tells what another policy gives.

    EXTPROC_RECORD_S=600 pytest -s -m '' tests/vllm/test_whatif.py

prints a table: what was predicted of `least_harm` by a record of `founding`, beside what it gave on
the same arrivals (docs/archive/lab-checks-envoy.md has one). Two engines, a router, an Envoy and a
client share the machine, and a model of pods has no such neighbours: so the profile is fitted to
the record, and beside it stands one that was calibrated on a server without them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.lab.calibration.calibrate import calibrate
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.fleetfiles import gateway_bootstrap, router_config
from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.trials.table import table
from extproc.lab.workload.exchange import RequestForm, RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.recorded import Record, read_record
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.synthetic import zipf
from tests.e2e.harness import EnvoyProcess, RouterProcess
from tests.e2e.whatifs import Question, Row, figures, heads, recorder
from tests.vllm.enginetrace import prefer
from tests.vllm.gateway import knows_models
from tests.vllm.server import BASE_MODEL, VllmServer, build_model
from tests.waiting import eventually

SECONDS = float(os.environ.get("EXTPROC_RECORD_S", "60"))
NUM_ADAPTERS, RATE_RPS, SEEDS = 10, 2.0, (1, 2, 3)
"""At twice the rate two engines take both cores of a small machine, and each other's steps."""
LIMITS = {
    "--max-num-seqs": 16,
    "--max-num-batched-tokens": 256,
    "--max-loras": 2,
    "--max-cpu-loras": 4,
}
QUESTION = Question(
    FleetSettings(
        num_pods=2,
        max_loras=LIMITS["--max-loras"],
        max_cpu_loras=LIMITS["--max-cpu-loras"],
        # A server that starves for a moment on a busy machine is not one that is gone.
        report_expiry_s=6.0,
        profile=replace(
            INSTANT,
            kv_capacity_tokens=1_048_448,
            block_tokens=128,
            max_num_seqs=LIMITS["--max-num-seqs"],
            max_num_batched_tokens=LIMITS["--max-num-batched-tokens"],
            max_model_len=512,
        ),
    ),
    Slo(ttft_s=0.15, tpot_s=0.05),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600 + 3 * SECONDS),
    pytest.mark.asyncio(loop_scope="module"),
]


def workload_of(seed: int) -> Workload:
    """Requests for more adapters than the servers have slots, a few of them popular."""
    return zipf(
        "vllm",
        num_adapters=NUM_ADAPTERS,
        exponent=1.0,
        rate_rps=RATE_RPS,
        duration_s=SECONDS,
        seed=seed,
        lengths=lambda rng: (rng.randint(20, 200), rng.randint(10, 60)),
        ranks=(8,),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[VllmServer]]:
    adapters, folder = sorted(workload_of(1).adapters), tmp_path_factory.mktemp("whatif")
    build_model(folder, adapters)
    flags = [str(part) for limit in LIMITS.items() for part in limit]
    async with AsyncExitStack() as stack:
        servers = [VllmServer(folder, adapters, flags) for _ in range(QUESTION.settings.num_pods)]
        for server in servers:
            stack.push_async_callback(server.close)
            server.launch()
            prefer(server.pid)
        for server in servers:
            await server.start()
        yield servers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def question(servers: Sequence[VllmServer]) -> Question:
    """With the profile of a server that is alone."""
    settings = QUESTION.settings
    profile = await calibrate(
        servers[0].url,
        settings.profile,
        adapters=sorted(workload_of(1).adapters),
        max_requests=settings.profile.max_num_seqs or 1,
        max_cpu_loras=settings.max_cpu_loras,
        window_s=0.7,
    )
    print(f"\n{profile}")
    return replace(QUESTION, settings=replace(settings, profile=profile))


@pytest.fixture(scope="module")
def lines() -> Iterator[list[Row]]:
    """The lines of all seeds, printed as a table at the end."""
    found = list[Row]()
    yield found
    print("\n" + table(heads("calibrated"), found))


async def _recorded(
    servers: Sequence[VllmServer], policy: str, workload: Workload, path: Path
) -> Record:
    """Send the workload through a gateway with this policy, and return what was recorded."""
    settings, records = QUESTION.settings, list[RequestRecord]()
    pods = [{"address": each.address, "name": f"vllm-{n}"} for n, each in enumerate(servers)]
    config = {**router_config(policy, settings), "discovery": {"static": pods}}
    form = RequestForm(base_model=BASE_MODEL, extra=(("ignore_eos", True), ("temperature", 0)))
    async with (
        RouterProcess(config) as router,
        EnvoyProcess(gateway_bootstrap([router.address], settings)) as envoy,
    ):
        await eventually(partial(knows_models, router))
        async with recorder(path)(router):
            await replay(workload, ReplaySettings(envoy.url, form), records.append)
    assert {each.error for each in records} == {""}
    return read_record(path)


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_was_predicted_of_another_policy_is_what_real_engines_give(
    servers: Sequence[VllmServer],
    question: Question,
    seed: int,
    tmp_path: Path,
    lines: list[Row],
) -> None:
    workload = workload_of(seed)
    record = await _recorded(servers, question.recorded, workload, tmp_path / "first.csv")
    other = await _recorded(servers, question.other, workload, tmp_path / "second.csv")
    assert record.is_whole
    assert len(record.requests) == len(workload.arrivals)
    real, alone = question.happened(other), question.settings.profile
    try:
        fitted = question.fitted(record)
    except ValueError as error:
        lines.append((str(seed), f"refused: {error}", *[""] * 5))
        return
    own, by_alone = (question.predicted(record, each) for each in (fitted, alone))
    lines += question.rows(seed, own, by_alone, real)
    for name, profile in ("fitted", fitted), ("calibrated", alone):
        off = question.wrongly_told(record, profile)
        print(f"{name}: off in {[(each.what, each.of, round(each.error, 2)) for each in off]}")

    p50, _, well = figures(own)
    if not question.wrongly_told(record, fitted):  # else the command promises nothing
        assert p50.mean == pytest.approx(real["TTFT p50, ms"], rel=0.15)
        assert well.mean == pytest.approx(real["served well, %"], rel=0.15)
