"""Traffic of a router behind a real Envoy is recorded, and the laboratory tells its times.

`pytest -s` prints what the commands print, and what was predicted of another policy beside what it
gave on the same arrivals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.lab.engine.profiles import as_yaml
from extproc.lab.trials.whatif import Case, simulate
from extproc.lab.workload.judge import measure
from extproc.lab.workload.recorded import read_record
from tests.commandline import run
from tests.e2e.harness import RouterProcess
from tests.e2e.realfleet import PROFILE, SETTINGS, SLO, run_real, small_workload
from tests.waiting import eventually

SECONDS = float(os.environ.get("EXTPROC_RECORD_S", "30"))
EXTPROC = (sys.executable, "-m", "extproc", "lab")

pytestmark = [pytest.mark.long, pytest.mark.timeout(200 + 8 * SECONDS)]
"""On a busy machine, no model tells what pods and clients of one process take."""


def recorder(path: Path) -> Callable[[RouterProcess], AbstractAsyncContextManager[None]]:
    """Return what records a router's traffic to a file."""

    @asynccontextmanager
    async def record(router: RouterProcess) -> AsyncIterator[None]:
        with path.open("wb") as out:
            command = (*EXTPROC, "record", router.address, "--minutes", "60")
            process = await asyncio.create_subprocess_exec(
                *command, stdout=out, stderr=asyncio.subprocess.PIPE
            )
            assert process.stderr is not None
            assert b"recording" in await process.stderr.readline()
            await asyncio.sleep(2.0)  # until it watches: a record without a request fails the test
            yield
            await eventually(router.has_none_in_flight, within_s=30.0)
            await asyncio.sleep(1.0)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0

    return record


def whatif(path: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = (*EXTPROC, "whatif", str(path), "--profile", str(profile), *options)
    return run(*command)


async def test_a_record_of_real_requests_is_told_by_the_model_and_a_wrong_one_is_refused(
    tmp_path: Path,
) -> None:
    path, right, wrong = (tmp_path / name for name in ("traffic.csv", "right", "wrong"))
    right.write_text(as_yaml(PROFILE))
    wrong.write_text(as_yaml(PROFILE.slowed(2)))
    workload = small_workload(SECONDS)
    run = await run_real(workload, "founding", beside=recorder(path))
    record, text = read_record(path), path.read_text()
    added = ("--added-ms", f"{1e3 * run.added_s:.1f}", "--cpu-loras", "6")
    told = await asyncio.to_thread(whatif, path, right, *added)
    refused = await asyncio.to_thread(whatif, path, wrong, *added)
    print(f"\n{run.disturbance}\n{told.stdout}{told.stderr}")

    assert len(record.requests) == len(workload.arrivals)
    assert (record.num_pods, record.max_loras, record.num_routers) == (4, 3, 1)
    assert (record.num_missing, record.is_whole, record.policy) == (0, True, "founding")
    assert not any(name in text for name in workload.adapters)
    for request, arrival in zip(record.requests, run.workload.arrivals, strict=True):
        assert abs(request.arrival.output_tokens - arrival.output_tokens) < 40
    assert refused.returncode == 1
    assert "promises nothing" in refused.stderr
    assert "would have been" not in refused.stdout
    if not run.disturbance:
        assert (told.returncode, "would have been" in told.stdout) == (0, True)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_what_was_predicted_of_another_policy_is_what_it_gives(
    seed: int, tmp_path: Path
) -> None:
    path, other = tmp_path / "traffic.csv", tmp_path / "other.csv"
    workload = small_workload(SECONDS, seed=seed)
    await run_real(workload, "founding", beside=recorder(path))
    real = await run_real(workload, "least_harm", beside=recorder(other))
    if real.disturbance:
        pytest.skip(f"the machine is too busy: {real.disturbance}")
    case = Case("least_harm", SETTINGS.num_pods, SETTINGS.max_loras)
    # The result of a real run is less what network and Envoy added to it.
    predicted = measure(simulate(read_record(path), SETTINGS, case), SLO)
    happened = measure(replace(real.result, warm_up_s=0.1 * workload.duration_s), SLO)
    for name in ("ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "attainment"):
        print(f"{seed} {name}: {getattr(predicted, name):.3f} {getattr(happened, name):.3f}")

    assert predicted.ttft_p50_s == pytest.approx(happened.ttft_p50_s, rel=0.25)
