"""Does routing still pay? Ratios between policies, held against what they were.

    python -m bench.guard                             # as `make loadtest-ci`: two minutes
    python -m bench.guard --swap founding=random      # see it fail
    python -m bench.guard --write --runs 5            # a new expectation

Absolute figures belong to a machine and an hour; how much better one policy does than another with
the same requests belongs to the code. An expectation is made from several runs; its tolerance comes
from how much they differed. It exits with 1 if the ratios are not as expected and with 3 if
the machine was too busy to measure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from extproc.commands.failure import FAILED
from extproc.commands.loadtest import NOT_MEASURED, measured, status_of
from extproc.lab.loadtest.compare import Round, is_disturbed, ratio_of
from extproc.lab.loadtest.loads import plan_suite
from extproc.lab.loadtest.results import FIGURES, describe_machine
from extproc.lab.loadtest.screen import remarks, short_head
from extproc.lab.loadtest.targets import TargetSpec, parse_targets
from extproc.lab.trials.specs import Suite
from extproc.lab.trials.suites import read_suite, scenarios_of

EXPECTATION = Path(__file__).parents[1] / "loadtest" / "results" / "expectation.json"
FIGURE_NAMES = ("attainment", "ttft_mean_s", "loads_per_1000")
"""The guarded ones of `FIGURES`."""
NUM_SDS = 5.0
"""So many standard deviations of the runs that made the expectation are allowed: they were few,
and later runs are on other machines."""
MIN_TOLERANCE = 1.15
"""A factor that is allowed in any case."""
NUM_REPEATS = 1
"""So often a block is sent again if the machine disturbed it."""
MAX_ADDED_S = 0.1
"""Ten times what gateway and network add on two busy cores: a process stood still. None of the
policies that are guarded holds requests."""
OK = "ok"

Pair = tuple[str, str]
Ratios = Mapping[tuple[Pair, str], float | None]
"""By pair of policies and figure; None where there is no ratio."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One expected ratio.

    Attributes:
        policy: The policy on top.
        other: The one below.
        figure: One of `FIGURE_NAMES`.
        ratio: Expected.
        tolerance: Factor by which it may differ, up or down.
    """

    policy: str
    other: str
    figure: str
    ratio: float
    tolerance: float

    def verdict(self, seen: float | None) -> str:
        """`OK`, or what is wrong with the ratio that was seen; None is none."""
        if seen is None or seen <= 0:
            return "MISSING"
        if seen > self.ratio * self.tolerance:
            return "TOO HIGH"
        return "TOO LOW" if seen < self.ratio / self.tolerance else OK


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """Expected ratios, and where they are from.

    Attributes:
        suite: Of which suite.
        lines: The ratios.
        num_runs: From so many runs.
        machine: Where they were made, for people.
        date: When, ISO 8601.
    """

    suite: str
    lines: Sequence[Line]
    num_runs: int
    machine: str
    date: str

    def verdicts(self, seen: Ratios) -> list[tuple[Line, float | None, str]]:
        """Every expected ratio with the one that was seen and its verdict."""
        found = [(line, seen.get(((line.policy, line.other), line.figure))) for line in self.lines]
        return [(line, ratio, line.verdict(ratio)) for line, ratio in found]


def ratios_of(rounds: Sequence[Round], policies: Sequence[str]) -> Ratios:
    """The first policy over each of the others, by figure."""
    return {
        ((policies[0], other), name): found.mean if found else None
        for other in policies[1:]
        for name in FIGURE_NAMES
        for found in [ratio_of(rounds, policies[0], other, FIGURES[name])]
    }


def lines_of(runs: Sequence[Ratios]) -> list[Line]:
    """The ratios to expect, from two runs or more.

    Raises:
        ValueError: A ratio is missing in one of them.
    """
    return [_line(pair, name, [run.get((pair, name)) for run in runs]) for pair, name in runs[0]]


def _line(pair: Pair, name: str, values: Iterable[float | None]) -> Line:
    known = list(values)
    logs = [log(value) for value in known if value]
    if len(logs) != len(known):
        raise ValueError(f"{pair[0]} over {pair[1]}, {name}: no ratio in one of the runs")
    spread = NUM_SDS * stdev(logs) * sqrt(1 + 1 / len(logs))
    return Line(
        policy=pair[0],
        other=pair[1],
        figure=name,
        ratio=round(exp(fmean(logs)), 4),
        tolerance=round(max(MIN_TOLERANCE, exp(spread)), 3),
    )


def measured_ratios(suite: Suite, specs: Sequence[TargetSpec], console: Console) -> Ratios:
    """The ratios of a run in which every block counts.

    Raises:
        typer.Exit: The machine disturbed one block twice, or a target is gone.
    """
    labels = [spec.label for spec in specs]
    blocks = plan_suite(suite, scenarios_of(suite, ()))
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


def swapped(specs: Sequence[TargetSpec], swap: str) -> list[TargetSpec]:
    """The targets, one of them by another policy under its own name."""
    if not swap:
        return list(specs)
    name, _, other = swap.partition("=")
    (instead,) = parse_targets([f"policy:{other}"])
    return [replace(instead, label=name) if spec.label == name else spec for spec in specs]


def verdict_table(verdicts: Iterable[tuple[Line, float | None, str]]) -> Table:
    """Expected and seen, line by line."""
    table = Table(box=SIMPLE_HEAD)
    for head in ("ratio", "of", "expected", "allowed", "seen", "verdict"):
        table.add_column(head, justify="left" if head in ("ratio", "of", "verdict") else "right")
    for line, seen, verdict in verdicts:
        low, high = line.ratio / line.tolerance, line.ratio * line.tolerance
        table.add_row(
            f"{line.policy}/{line.other}",
            short_head(FIGURES[line.figure]),
            f"{line.ratio:.3f}",
            f"{low:.2f}-{high:.2f}",
            "-" if seen is None else f"{seen:.3f}",
            verdict,
            style="green" if verdict == OK else "red",
        )
    return table


def main(
    arguments: Sequence[str] | None = None, *, name: str = "guard", path: Path = EXPECTATION
) -> int:
    """Run the suite called `name` and hold it against the expectation; the exit status."""
    parser = argparse.ArgumentParser(
        prog="bench.guard", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="make a new expectation instead")
    parser.add_argument("--runs", type=int, default=5, help="from so many runs, two or more")
    parser.add_argument("--swap", default="", help="NAME=OTHER: run policy OTHER as NAME")
    options = parser.parse_args(arguments)
    console, suite = Console(highlight=False), read_suite(name)
    specs = swapped(parse_targets([f"policy:{policy}" for policy in suite.policies]), options.swap)
    try:
        if options.write:
            lines = lines_of([measured_ratios(suite, specs, console) for _ in range(options.runs)])
            _write(name, lines, options.runs, path)
            return 0
        expected = msgspec.json.decode(path.read_bytes(), type=Expectation)
        verdicts = expected.verdicts(measured_ratios(suite, specs, console))
    except typer.Exit as error:
        return error.exit_code
    console.print(verdict_table(verdicts))
    is_ok = all(verdict == OK for _, _, verdict in verdicts)
    text = "all as expected" if is_ok else "NOT as expected"
    console.print(f"{text} (expectation of {expected.date}, from {expected.num_runs} runs)")
    return 0 if is_ok else FAILED


def _write(name: str, lines: Sequence[Line], num_runs: int, path: Path) -> None:
    date = datetime.now(UTC).date().isoformat()
    made = Expectation(
        suite=name, lines=lines, num_runs=num_runs, machine=describe_machine(), date=date
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


if __name__ == "__main__":
    raise SystemExit(main())
