"""Traffic of a router behind a real Envoy is recorded, and the laboratory tells its times.

`pytest -s` prints what the commands print, and then a table: what was predicted of another policy,
beside what it gave on the same arrivals. EXTPROC_RECORD_S has the length of a run in seconds; 45 s
take six minutes with all seeds.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.lab.engine.profiles import as_yaml
from extproc.lab.trials.table import table
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.recorded import read_record
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.traces import RANK
from tests.commandline import run
from tests.e2e.realfleet import PROFILE, SETTINGS, run_real, small_workload
from tests.e2e.whatifs import EXTPROC, Question, Row, figures, heads, recorder

SECONDS = float(os.environ.get("EXTPROC_RECORD_S", "30"))
QUESTION = Question(SETTINGS, Slo(ttft_s=0.12, tpot_s=0.06))

pytestmark = [pytest.mark.long, pytest.mark.timeout(200 + 8 * SECONDS)]
"""On a busy machine, no model tells what pods and clients of one process take."""


def workload_of(seed: int) -> Workload:
    """Adapters are alike: a record does not have their ranks."""
    workload = small_workload(SECONDS, seed=seed)
    return replace(workload, adapters=dict.fromkeys(workload.adapters, RANK))


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


@pytest.fixture(scope="module")
def lines() -> Iterator[list[Row]]:
    """The lines of all seeds, printed as a table at the end."""
    found = list[Row]()
    yield found
    print("\n" + table(heads("fitted"), found))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_what_was_predicted_of_another_policy_is_what_it_gives(
    seed: int, tmp_path: Path, lines: list[Row]
) -> None:
    path, other = tmp_path / "traffic.csv", tmp_path / "other.csv"
    workload = workload_of(seed)
    first = await run_real(workload, QUESTION.recorded, beside=recorder(path))
    second = await run_real(workload, QUESTION.other, beside=recorder(other))
    record = read_record(path)
    real = QUESTION.happened(read_record(other))
    own, by_fit = (QUESTION.predicted(record, each) for each in (PROFILE, QUESTION.fitted(record)))
    lines += QUESTION.rows(seed, own, by_fit, real)
    if busy := first.disturbance or second.disturbance:
        lines.append((str(seed), f"the machine was too busy: {busy}", *[""] * 5))
        pytest.skip(busy)

    p50, _, well = figures(own)
    assert not QUESTION.wrongly_told(record, PROFILE)
    assert p50.mean == pytest.approx(real["TTFT p50, ms"], rel=0.15)
    assert well.mean == pytest.approx(real["served well, %"], rel=0.15)
