"""Does routing still pay? Ratios between rules, held against what they were.

Absolute figures belong to a machine and an hour; how much better one rule does than another on the
same requests belongs to the code. An expectation is made from several runs, and what it allows
comes from how much they differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from extproc.loadtest.compare import FIGURES, Round, ratio_of

FORMAT = "extproc-loadtest-guard-1"
FIGURE_NAMES = ("attainment", "ttft_mean_s", "loads_per_1000")
"""What is guarded, of `FIGURES`."""
NUM_SDS = 5.0
"""So many standard deviations of the runs that made the expectation are allowed: they were few,
and later runs are on other machines."""
MIN_TOLERANCE = 1.15
"""A factor that is allowed in any case."""

Pair = tuple[str, str]
Ratios = Mapping[tuple[Pair, str], float | None]
"""By pair of rules and figure; None where there is no ratio."""


class GuardError(Exception):
    """The expectation cannot be used; the message says why."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One expected ratio.

    Attributes:
        rule: The rule on top.
        other: The one below.
        figure: One of `FIGURE_NAMES`.
        ratio: Expected.
        tolerance: Factor by which it may differ, up or down.
    """

    rule: str
    other: str
    figure: str
    ratio: float
    tolerance: float


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is expected.

    Attributes:
        suite: Of which suite.
        lines: The ratios.
        num_runs: From so many runs.
        machine: Where they were made, for people.
        date: When, ISO 8601.
        format: `FORMAT`.
    """

    suite: str
    lines: Sequence[Line]
    num_runs: int
    machine: str
    date: str
    format: str = FORMAT


class Verdict(StrEnum):
    """What is to be said of one ratio."""

    OK = "ok"
    HIGH = "TOO HIGH"
    LOW = "TOO LOW"
    MISSING = "MISSING"


def verdict_of(line: Line, seen: float | None) -> Verdict:
    """Hold a ratio against what is expected; None is none."""
    if seen is None or seen <= 0:
        return Verdict.MISSING
    if seen > line.ratio * line.tolerance:
        return Verdict.HIGH
    return Verdict.LOW if seen < line.ratio / line.tolerance else Verdict.OK


def judged(expectation: Expectation, seen: Ratios) -> list[tuple[Line, float | None, Verdict]]:
    """Every expected ratio with what was seen of it."""
    told = []
    for line in expectation.lines:
        ratio = seen.get(((line.rule, line.other), line.figure))
        told.append((line, ratio, verdict_of(line, ratio)))
    return told


def pairs_of(rules: Sequence[str]) -> list[Pair]:
    """The first rule over each of the others."""
    return [(rules[0], other) for other in rules[1:]]


def ratios_of(rounds: Sequence[Round], rules: Sequence[str]) -> Ratios:
    """What a run of the guard has seen."""
    ratios: dict[tuple[Pair, str], float | None] = {}
    for rule, other in pairs_of(rules):
        for name in FIGURE_NAMES:
            ratio = ratio_of(rounds, rule, other, FIGURES[name])
            ratios[(rule, other), name] = None if ratio is None else ratio.mean
    return ratios


def lines_of(runs: Sequence[Ratios]) -> list[Line]:
    """What to expect, from several runs.

    Raises:
        GuardError: A ratio is missing in one of them, or they are fewer than two.
    """
    if len(runs) < 2:
        raise GuardError("an expectation needs two runs at least")
    return [_line(pair, name, [run.get((pair, name)) for run in runs]) for pair, name in runs[0]]


def _line(pair: Pair, name: str, values: Iterable[float | None]) -> Line:
    known = list(values)
    logs = [log(value) for value in known if value]
    if len(logs) != len(known):
        raise GuardError(f"{pair[0]} over {pair[1]}, {name}: no ratio in one of the runs")
    spread = NUM_SDS * stdev(logs) * sqrt(1 + 1 / len(logs))
    return Line(
        rule=pair[0],
        other=pair[1],
        figure=name,
        ratio=round(exp(fmean(logs)), 4),
        tolerance=round(max(MIN_TOLERANCE, exp(spread)), 3),
    )


def load_expectation(path: Path) -> Expectation:
    """Read what `save_expectation` wrote.

    Raises:
        GuardError: It cannot be read, or is something else.
    """
    try:
        expectation = msgspec.json.decode(path.read_bytes(), type=Expectation)
    except OSError as error:
        raise GuardError(f"{path}: {error.strerror}; `extproc loadtest guard --write`") from error
    except msgspec.DecodeError as error:
        raise GuardError(f"{path}: not an expectation: {error}") from error
    if expectation.format != FORMAT:
        raise GuardError(f"{path}: its format is {expectation.format!r}, not {FORMAT!r}")
    return expectation


def save_expectation(expectation: Expectation, path: Path) -> None:
    """Write it as JSON that can be reviewed line by line.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(expectation), indent=1) + b"\n")
