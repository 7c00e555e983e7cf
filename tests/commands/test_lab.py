"""`extproc lab run` ends with all of its processes, however it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.commandline import Command, commands

NUM_SCENARIOS = 10
SCENARIOS = ", ".join(
    f"{{name: z{number}, workload: {{num_adapters: 12, output_tokens: 20}}}}"
    for number in range(NUM_SCENARIOS)
)
SUITE = f"""
name: tiny
about: Two servers.
num_requests: 3200
seeds: [1, 2]
rates_rps: [8, 16]
fleet: {{num_pods: 2, max_loras: 4}}
policies: [founding, round_robin, random, least_pending]
scenarios: [{SCENARIOS}]
"""
NUM_PROCESSES = 4  # the command, its two workers, and multiprocessing's own
NUM_TRIALS = 4 * NUM_SCENARIOS  # so many that some are left when the first is noticed


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT, signal.SIGKILL]
)
def test_a_run_that_is_ended_leaves_no_worker_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    suite, kept = tmp_path / "suite.yaml", tmp_path / "tiny.trials.jsonl"
    suite.write_text(SUITE)
    with commands() as started:
        run = Command(tmp_path, "lab", "run", str(suite), "--jobs", "2", "--out", str(tmp_path))
        started.append(run)
        run.wait_until_started(NUM_PROCESSES)
        run.wait_until(kept.exists)  # the workers are at their second trials
        os.kill(run.process.pid, number)
        status = run.process.wait(timeout=180)
        run.wait_until_gone()

    assert status != 0
    assert len(kept.read_text().splitlines()) < NUM_TRIALS
