"""Whether real runs have the order that the laboratory predicts.

The laboratory predicts an order of two targets by a figure if the difference over its seeds is
significant (95 %, paired by seed; assumed with fewer than three seeds) and more than `TIE_RATIO` of
the larger value. Real runs agree if their means have the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from extproc.loadtest.figures import Figure
from extproc.loadtest.results import RunResult, policy_of
from extproc.workload.intervals import paired_difference

TIE_RATIO = 0.02
MIN_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome of a figure's predictions.

    Attributes:
        num_pairs: Pairs of targets whose order was predicted.
        wrong: Pairs with the opposite order, the one predicted to be larger first.
    """

    num_pairs: int
    wrong: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> str:
        """The text of a table's cell."""
        if not self.num_pairs:
            return "no difference predicted"
        if not self.wrong:
            return "yes"
        return "no: " + ", ".join(f"{larger} is not above {other}" for larger, other in self.wrong)


def agreement(runs: Sequence[RunResult], figure: Figure) -> Agreement:
    """Compare real runs of one scenario at one rate with virtual ones."""
    real, virtual = _values(runs, "real", figure), _values(runs, "virtual", figure)
    predicted = [
        (larger, other)
        for pair in combinations([target for target in real if target in virtual], 2)
        for larger, other in (pair, pair[::-1])
        if _is_surely_larger(virtual[larger], virtual[other])
    ]
    wrong = [
        (policy_of(larger), policy_of(other))
        for larger, other in predicted
        if fmean(real[larger].values()) <= fmean(real[other].values())
    ]
    return Agreement(len(predicted), tuple(wrong))


def distance(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """Return the median relative distance of real runs from their twins; None without any."""
    twins = {_key(run): run for run in runs if run.kind == "virtual"}
    apart = []
    for run in runs:
        twin = twins.get(_key(run)) if run.kind == "real" else None
        value, expected = figure.of(run), figure.of(twin) if twin else None
        if value is not None and expected:
            apart.append(abs(value / expected - 1))
    return median(apart) if apart else None


def _values(runs: Iterable[RunResult], kind: str, figure: Figure) -> dict[str, dict[int, float]]:
    """Return the figure by target and seed."""
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        value = figure.of(run)
        if run.kind == kind and value is not None:
            values.setdefault(run.target, {})[run.seed] = value
    return values


def _is_surely_larger(values: Mapping[int, float], others: Mapping[int, float]) -> bool:
    seeds = sorted(values.keys() & others.keys())
    ours, theirs = [values[seed] for seed in seeds], [others[seed] for seed in seeds]
    if not seeds or fmean(ours) - fmean(theirs) <= TIE_RATIO * fmean(ours):
        return False
    low = paired_difference(ours, theirs).low
    return len(seeds) < MIN_SEEDS or (low is not None and low > 0)


def _key(run: RunResult) -> tuple[str, str, float, int]:
    return run.target, run.scenario, run.rate_rps, run.seed
