"""The plots of a load test: virtual runs as lines, real ones as points in their colours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from extproc.loadtest.measures import NUM_QUANTILES
from extproc.loadtest.results import LoadResult, RunResult, policy_of
from extproc.sim.trials.charts import COLOURS, Axis, Series, curve, line_chart
from extproc.sim.trials.specs import SloSpec

SHORTEST_S = 0.001
"""The shortest time drawn: the axis is logarithmic."""
QUANTILES_PER_DOT = 5
MARGIN = 0.04
"""Space at both ends of the rate axis, as a share of the range."""
Colours = Mapping[str, str]
"""By target."""


def colours_of(result: LoadResult) -> dict[str, str]:
    """Return a colour for each target."""
    return {target: COLOURS[index % len(COLOURS)] for index, target in enumerate(result.targets)}


def rate_charts(runs: Sequence[RunResult], colours: Colours, slo: SloSpec) -> list[tuple[str, str]]:
    """Return charts over the rate, each with its title; none if there is only one rate."""
    rates = [run.rate_rps for run in runs]
    if min(rates) == max(rates):
        return []
    margin = MARGIN * (max(rates) - min(rates))
    x = Axis("offered requests per second", min(rates) - margin, max(rates) + margin)
    first, served, satisfied = (
        rate_curves(runs, key, colours)
        for key in ("ttft_mean_s", "attainment", "slora_satisfaction")
    )
    waits = [max(SHORTEST_S, value) for value in _values(first)]
    seconds = Axis("time to first word, mean (s)", 0.8 * min(waits), 1.25 * max(waits), is_log=True)
    is_in_sight = seconds.low <= slo.ttft_s <= seconds.high
    allowed = (slo.ttft_s, "allowed") if is_in_sight else None
    low = max(0.0, min(_values(served)) - 0.05)
    part = Axis("requests served well", low, 1.0, is_percent=True)
    score = Axis("satisfaction", max(0.0, min(_values(satisfied)) - 0.05), 1.0)
    return [
        ("How long people wait for the first word", line_chart(first, x, seconds, mark=allowed)),
        ("Requests served well", line_chart(served, x, part, mark=(slo.target, "aim"))),
        ("Satisfaction (S-LoRA's measure)", line_chart(satisfied, x, score)),
    ]


def wait_chart(runs: Sequence[RunResult], colours: Colours) -> str:
    """Return the distribution of waits for the first word, for runs of one rate and seed."""
    series = []
    for run in runs:
        points = [
            (max(SHORTEST_S, value_s), number / (NUM_QUANTILES - 1))
            for number, value_s in enumerate(run.summary.ttft_quantiles_s)
        ]
        has_twin = any(other.kind == "virtual" and other.target == run.target for other in runs)
        is_line = run.kind == "virtual" or not has_twin
        name, form = (run.policy, "-") if is_line else ("", "o")
        shown = points if is_line else points[::QUANTILES_PER_DOT]
        series.append(Series(name, shown, colours[run.target], form))
    waits = [point[0] for each in series for point in each.points]
    if not waits:
        return ""
    x = Axis("time to first word (s)", min(waits), max(*waits, 1.1 * min(waits)), is_log=True)
    return line_chart(series, x, Axis("requests that had it by then", 0, 1, is_percent=True))


def rate_curves(runs: Sequence[RunResult], key: str, colours: Colours) -> list[Series]:
    """Return a measure over the rate: lines for virtual runs, points for real ones.

    Points are joined if there is no twin. Virtual runs are those of the real ones' seeds.
    """
    series = []
    for target in dict.fromkeys(run.target for run in runs):
        own = [run for run in runs if run.target == target]
        seeds = {run.seed for run in own if run.kind == "real"} or {run.seed for run in own}
        has_twin = any(run.kind == "virtual" for run in own)
        for kind, form in (("virtual", "-"), ("real", "o" if has_twin else "o-")):
            values: defaultdict[float, list[float]] = defaultdict(list)
            for run in own:
                if run.kind == kind and run.seed in seeds:
                    values[run.rate_rps].append(getattr(run.metrics, key))
            name = "" if form == "o" else policy_of(target)
            if values:
                series.append(curve(name, values, colours[target], form))
    return series


def _values(series: Iterable[Series]) -> list[float]:
    return [value for each in series for _, value in each.points]
