"""The command `extproc loadtest guard`: a run of a small suite, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from extproc.commands.failure import FAILED, failure
from extproc.commands.session import NOT_MEASURED, measured, refusing, status_of
from extproc.loadtest.blocks import Block
from extproc.loadtest.compare import FIGURES, is_disturbed
from extproc.loadtest.guard import (
    Expectation,
    Line,
    Ratios,
    Verdict,
    judged,
    lines_of,
    load_expectation,
    ratios_of,
    save_expectation,
)
from extproc.loadtest.loads import plan_suite, read_suite, scenarios_of
from extproc.loadtest.results import describe_machine
from extproc.loadtest.screen import remarks, short_head
from extproc.loadtest.targets import TargetError, TargetSpec, parse_targets
from extproc.workload.files import own_folder

EXPECTATION = own_folder("results") / "expectation.json"
NUM_REPEATS = 1
"""So often a block is sent again if the machine disturbed it."""
MAX_ADDED_S = 0.1
"""Ten times what gateway and network add on two busy cores: a process stood still. None of the
rules that are guarded holds requests."""
_STYLES = {Verdict.OK: "green"}


def guard_command(
    suite: Annotated[str, typer.Option(help="Suite to run.")] = "guard",
    expectation: Annotated[
        Path, typer.Option(help="JSON file with the ratios that are expected.")
    ] = EXPECTATION,
    write: Annotated[
        bool, typer.Option(help="Write that file anew from several runs, instead of comparing.")
    ] = False,
    runs: Annotated[int, typer.Option(min=2, help="Number of runs for --write.")] = 5,
    swap: Annotated[
        str, typer.Option(help="NAME=OTHER: measure the policy OTHER under the name NAME.")
    ] = "",
) -> None:
    """Compare the ratios between policies with those expected; takes two minutes."""
    with refusing():
        found = read_suite(suite)
        specs = _swapped(parse_targets([f"rule:{rule}" for rule in found.rules]), swap)
        blocks = plan_suite(found, scenarios_of(found, ()))
        expected = None if write else load_expectation(expectation)
    console = Console(highlight=False)
    if expected is None:
        seen = [_run(specs, blocks, console) for _ in range(runs)]
        _write(found.name, seen, expectation)
        console.print(f"written: {expectation}", soft_wrap=True)
        return
    told = judged(expected, _run(specs, blocks, console))
    console.print(verdict_table(told))
    is_ok = all(verdict is Verdict.OK for _, _, verdict in told)
    text = "all as expected" if is_ok else "NOT as expected"
    console.print(f"{text} (expectation of {expected.date}, from {expected.num_runs} runs)")
    raise typer.Exit(0 if is_ok else FAILED)


def _write(suite: str, seen: Sequence[Ratios], path: Path) -> None:
    """Write what to expect after these runs.

    Raises:
        typer.Exit: It cannot be written, or a ratio is missing.
    """
    machine, date = describe_machine(), datetime.now(UTC).date().isoformat()
    with refusing():
        lines = lines_of(seen)
    made = Expectation(suite=suite, lines=lines, num_runs=len(seen), machine=machine, date=date)
    try:
        save_expectation(made, path)
    except OSError as error:
        raise failure(error, FAILED) from error


def _run(specs: Sequence[TargetSpec], blocks: Sequence[Block], console: Console) -> Ratios:
    """A run in which every block counts.

    Raises:
        typer.Exit: The machine disturbed one block twice, or a target is gone.
    """
    labels = [spec.label for spec in specs]
    rounds = measured(
        specs, blocks, console, headers={}, num_repeats=NUM_REPEATS, max_added_s=MAX_ADDED_S
    )
    for text in remarks(labels, rounds):
        console.print(text, style="red", markup=False, soft_wrap=True)
    if status_of(rounds) == FAILED:
        raise typer.Exit(FAILED)
    if any(map(is_disturbed, rounds)):
        console.print("not measured: the machine is too busy", style="red")
        raise typer.Exit(NOT_MEASURED)
    return ratios_of(rounds, labels)


def _swapped(specs: Sequence[TargetSpec], swap: str) -> list[TargetSpec]:
    """The targets, one of them by another rule under its own name."""
    if not swap:
        return list(specs)
    name, _, other = swap.partition("=")
    if name not in [spec.label for spec in specs]:
        raise TargetError(f"swap {swap!r}: give NAME=OTHER of {', '.join(s.label for s in specs)}")
    (instead,) = parse_targets([f"rule:{other}"])
    return [replace(instead, label=name) if spec.label == name else spec for spec in specs]


def verdict_table(told: Sequence[tuple[Line, float | None, Verdict]]) -> Table:
    """Expected, seen and what is to be said of it, line by line."""
    table = Table(box=SIMPLE_HEAD)
    for head in ("ratio", "of", "expected", "allowed", "seen", "verdict"):
        table.add_column(head, justify="left" if head in ("ratio", "of", "verdict") else "right")
    for line, seen, verdict in told:
        low, high = line.ratio / line.tolerance, line.ratio * line.tolerance
        table.add_row(
            f"{line.rule}/{line.other}",
            short_head(FIGURES[line.figure]),
            f"{line.ratio:.3f}",
            f"{low:.2f}-{high:.2f}",
            "-" if seen is None else f"{seen:.3f}",
            verdict.value,
            style=_STYLES.get(verdict, "red"),
        )
    return table
