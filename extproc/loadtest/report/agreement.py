"""Whether real runs come out in the order that the laboratory predicts.

Of two targets the laboratory predicts an order by a measure if, over its seeds, the difference is
surely not nought (95 %, paired by seed; with fewer than three seeds that cannot be said and is
taken as given) and more than `TIE_RATIO` of the larger value. Real runs agree if their means differ
the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from extproc.loadtest.results import RunResult
from extproc.workload.intervals import paired_difference

TIE_RATIO = 0.02
MIN_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """What runs are compared by.

    Attributes:
        name: For people.
        key: Field of `Metrics`.
        form: How to print a value.
        needs_pods: Known only of pods that can be asked.
        is_more_better: Else less is.
    """

    name: str
    key: str
    form: str
    needs_pods: bool = False
    is_more_better: bool = True

    def of(self, run: RunResult) -> float | None:
        """Its value in a run; None if it is not known."""
        value: float = getattr(run.metrics, self.key)
        return None if self.needs_pods and not run.knows_pods else value

    def shown(self, runs: Iterable[RunResult], target: str) -> tuple[str, str]:
        """A target's mean over real runs, and over virtual ones with their seeds, for people."""
        own = [run for run in runs if run.target == target]
        seeds = {run.seed for run in own if run.kind == "real"}
        real, virtual = (
            mean_of([run for run in own if run.kind == kind and run.seed in seeds], self)
            for kind in ("real", "virtual")
        )
        return self._text(real), self._text(virtual)

    def _text(self, value: float | None) -> str:
        return "" if value is None else self.form.format(value)


MEASURES = (
    Measure("finished per second", "throughput_rps", "{:.2f}"),
    Measure("first token, mean (s)", "ttft_mean_s", "{:.2f}", is_more_better=False),
    Measure("first token, median (s)", "ttft_p50_s", "{:.2f}", is_more_better=False),
    Measure("first token, 99th percentile (s)", "ttft_p99_s", "{:.2f}", is_more_better=False),
    Measure("SLO attainment", "attainment", "{:.1%}"),
    Measure("S-LoRA satisfaction", "slora_satisfaction", "{:.3f}"),
    Measure("adapter loads per 1,000", "loads_per_1000", "{:.0f}", True, False),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What became of one prediction.

    Attributes:
        num_pairs: Pairs of targets whose order was predicted.
        wrong: Those that came out the other way round, the one predicted to be larger first.
    """

    num_pairs: int
    wrong: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> str:
        """For a table's cell."""
        if not self.num_pairs:
            return "no difference predicted"
        if not self.wrong:
            return "yes"
        return "no: " + ", ".join(f"{larger} is not above {other}" for larger, other in self.wrong)


def mean_of(runs: Iterable[RunResult], measure: Measure) -> float | None:
    """Mean over runs; None if there is none, or it is not known."""
    values = [value for run in runs if (value := measure.of(run)) is not None]
    return fmean(values) if values else None


def agreement(runs: Sequence[RunResult], measure: Measure) -> Agreement:
    """Hold real runs of one scenario at one rate against virtual ones."""
    real, virtual = _values(runs, "real", measure), _values(runs, "virtual", measure)
    predicted = [
        (larger, other)
        for pair in combinations([target for target in real if target in virtual], 2)
        for larger, other in (pair, pair[::-1])
        if _is_surely_larger(virtual[larger], virtual[other])
    ]
    wrong = [
        (larger.removeprefix("rule:"), other.removeprefix("rule:"))
        for larger, other in predicted
        if fmean(real[larger].values()) <= fmean(real[other].values())
    ]
    return Agreement(len(predicted), tuple(wrong))


def distance(runs: Sequence[RunResult], measure: Measure) -> float | None:
    """Median over all runs that have a twin of how far the real value is from the virtual one.

    As a part of the virtual value; None if there is nothing to compare.
    """
    twins = {_key(run): run for run in runs if run.kind == "virtual"}
    apart = []
    for run in runs:
        twin = twins.get(_key(run)) if run.kind == "real" else None
        value, expected = measure.of(run), measure.of(twin) if twin else None
        if value is not None and expected:
            apart.append(abs(value / expected - 1))
    return median(apart) if apart else None


def _values(runs: Iterable[RunResult], kind: str, measure: Measure) -> dict[str, dict[int, float]]:
    """By target and seed."""
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        value = measure.of(run)
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
