"""Traffic of a router behind a real Envoy is recorded, and the laboratory tells its times.

`pytest -s` prints what the commands print, and then a table: what was predicted of another policy,
beside what it gave on the same arrivals. EXTPROC_RECORD_S has the length of a run in seconds; 45 s
take six minutes with all seeds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.lab.calibration.fromrecord import fit_record
from extproc.lab.engine.profiles import EngineProfile, as_yaml
from extproc.lab.trials.prospects import Prospect, prospects
from extproc.lab.trials.table import line
from extproc.lab.trials.whatif import (
    WARM_UP,
    Case,
    Told,
    add,
    missing_s,
    simulate,
    told,
)
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo, percentile
from extproc.lab.workload.recorded import Record, read_record
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FleetResult
from extproc.lab.workload.traces import RANK
from tests.commandline import run
from tests.e2e.harness import RouterProcess
from tests.e2e.realfleet import PROFILE, SETTINGS, run_real, small_workload
from tests.waiting import eventually

SECONDS = float(os.environ.get("EXTPROC_RECORD_S", "30"))
EXTPROC = (sys.executable, "-m", "extproc", "lab")
NARROW = Slo(ttft_s=0.12, tpot_s=0.06)
"""Objectives that some requests miss."""
FOUNDING, OTHER = (
    Case(policy, SETTINGS.num_pods, SETTINGS.max_loras) for policy in ("founding", "least_harm")
)
SAID = (
    *("seed", "figure", "predicted (95 %)", "by the fitted profile", "real", "difference"),
    "covered",
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(200 + 8 * SECONDS)]
"""On a busy machine, no model tells what pods and clients of one process take."""


def workload_of(seed: int) -> Workload:
    """Adapters are alike: a record does not have their ranks."""
    workload = small_workload(SECONDS, seed=seed)
    return replace(workload, adapters=dict.fromkeys(workload.adapters, RANK))


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
    workload = workload_of(2)
    run = await run_real(workload, "founding", beside=recorder(path))
    record, text = read_record(path), path.read_text()
    done = await asyncio.to_thread(whatif, path, right, "--cpu-loras", "6")
    refused = await asyncio.to_thread(whatif, path, wrong, "--cpu-loras", "6")
    print(f"\n{run.disturbance}\n{done.stdout}{done.stderr}")

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
        assert (done.returncode, "would have been" in done.stdout) == (0, True)


def predicted(record: Record, profile: EngineProfile) -> Prospect:
    """Return what the model says of the other policy, by a record of `founding`."""
    settings = replace(SETTINGS, profile=profile)
    added_s = missing_s(record, simulate(record, settings, FOUNDING))
    print(f"{1e3 * added_s:.1f} ms are added to each first token; {profile.provenance}")

    def run(case: Case) -> FleetResult:
        return add(simulate(record, settings, case), added_s)

    *_, other = prospects([FOUNDING, OTHER], run, NARROW)
    return other


def wrongly_told(record: Record) -> list[Told]:
    """Return what the model says of the recorded policy that is off."""
    result = simulate(record, SETTINGS, FOUNDING)
    compared = told(record, add(result, missing_s(record, result)))
    return [each for each in compared if each.is_off]


def happened(record: Record) -> dict[str, float]:
    """Return the figures of a record, after the same warm-up."""
    after_s = WARM_UP * record.requests[-1].arrival.at_s
    requests = [each for each in record.requests if each.arrival.at_s >= after_s]
    ttfts_s = sorted(each.ttft_s for each in requests if each.ttft_s is not None)
    num_well = sum(
        each.ttft_s is not None
        and each.ttft_s <= NARROW.ttft_s
        and (each.tpot_s or 0.0) <= NARROW.tpot_s
        for each in requests
    )
    return {
        "TTFT p50, ms": 1e3 * percentile(ttfts_s, 0.5),
        "TTFT p99, ms": 1e3 * percentile(ttfts_s, 0.99),
        "served well, %": 100 * num_well / len(requests),
    }


def figures(prospect: Prospect) -> list[Interval]:
    """Return those of `happened`."""
    parts = (prospect.ttft_p50_s, 1e3), (prospect.ttft_p99_s, 1e3), (prospect.served_well, 100)
    return [
        Interval(each.mean * by, (each.low or 0.0) * by, (each.high or 0.0) * by)
        for each, by in parts
    ]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """The lines of all seeds, printed at the end."""
    lines = [line(*SAID), "|---" * len(SAID) + "|"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_what_was_predicted_of_another_policy_is_what_it_gives(
    seed: int, tmp_path: Path, table: list[str]
) -> None:
    path, other = tmp_path / "traffic.csv", tmp_path / "other.csv"
    workload = workload_of(seed)
    first = await run_real(workload, FOUNDING.policy, beside=recorder(path))
    second = await run_real(workload, OTHER.policy, beside=recorder(other))
    record = read_record(path)
    fitted = fit_record(record.requests, PROFILE, max_loras=3, max_cpu_loras=6)
    real = happened(read_record(other))
    predictions, by_fit = (figures(predicted(record, each)) for each in (PROFILE, fitted))
    for (name, value), own, fit in zip(real.items(), predictions, by_fit, strict=True):
        assert own.low is not None
        assert own.high is not None
        said = f"{own.mean:.1f} ({own.low:.1f} to {own.high:.1f})"
        apart, is_covered = own.mean / value - 1, own.low <= value <= own.high
        cells = (
            said,
            f"{fit.mean:.1f}",
            f"{value:.1f}",
            f"{apart:+.0%}",
            "yes" if is_covered else "",
        )
        table.append(line(str(seed), name, *cells))
    if busy := first.disturbance or second.disturbance:
        table.append(line(str(seed), f"the machine was too busy: {busy}", *[""] * 5))
        pytest.skip(busy)

    assert not wrongly_told(record)
    assert predictions[0].mean == pytest.approx(real["TTFT p50, ms"], rel=0.15)
    assert predictions[2].mean == pytest.approx(real["served well, %"], rel=0.15)
