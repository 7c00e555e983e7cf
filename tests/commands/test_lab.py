"""`extproc lab run`: how it ends, and what it prints."""

from __future__ import annotations

import os
import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from extproc.commands.lab import Progress, print_tables
from extproc.lab.trials.table import HEADS, table
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


def test_the_time_that_is_left_is_told_by_the_trials_of_this_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not by those that an earlier one left."""
    now = [0.0]
    progress = Progress(lambda: now[0])
    for num_done, at_s in ((10, 0.0), (11, 5.0), (14, 20.0)):
        now[0] = at_s
        progress(num_done, 20)

    assert capsys.readouterr().err.splitlines() == [
        "10 of 20 trials, 0 s",
        "14 of 20 trials, 20 s, about 30 s left",
    ]


def test_a_terminal_gets_the_columns_that_matter_and_a_pipe_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenarios = [f"scenario-{number}" for number in range(1, 9)]
    cells = [f"cell-{number}" for number in range(len(HEADS))]
    places = table(HEADS, [[*cells[:2], "", *cells[3:]]])
    capacities = table(["policy", *scenarios, "of B3"], [cells[:10]])
    text = f"{places}\n\n{capacities}"
    terminal = Console(file=StringIO(), width=80, force_terminal=True, record=True)

    print_tables(terminal, text)
    shown = terminal.export_text()
    print_tables(Console(file=StringIO(), width=80), text)

    assert capsys.readouterr().out == f"{text}\n"
    assert "|" not in shown
    words = shown.split()
    assert [each for each in words if each.startswith("cell-")] == [
        *("cell-0", "cell-1", "cell-3", "cell-6", "cell-9"),
        *("cell-0", "cell-1", "cell-2", "cell-3", "cell-9"),
    ]
    assert "B3" in words
    assert max(map(len, shown.splitlines())) <= 80
