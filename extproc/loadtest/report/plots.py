"""The plots of a load test's page: virtual runs as lines, real ones as points in their colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from extproc.loadtest.measures import NUM_QUANTILES
from extproc.loadtest.results import LoadResult, RunResult
from extproc.sim.trials.suites import SloSpec
from extproc.sim.trials.svg import COLOURS, Axis, Series, line_chart

SHORTEST_S = 0.001
"""Shorter times are drawn as this one: the axis is logarithmic."""
QUANTILES_PER_DOT = 5
MARGIN = 0.04
"""Beside the lowest and the highest rate, as a part of what is between."""
Colours = Mapping[str, str]
"""By target."""


def colours_of(result: LoadResult) -> dict[str, str]:
    """A colour for each target."""
    return {target: COLOURS[index % len(COLOURS)] for index, target in enumerate(result.targets)}


def rate_plots(runs: Sequence[RunResult], colours: Colours, slo: SloSpec) -> list[tuple[str, str]]:
    """What happens as load grows, each with its title; none if there is only one rate."""
    rates = [run.rate_rps for run in runs]
    if min(rates) == max(rates):
        return []
    margin = MARGIN * (max(rates) - min(rates))
    x = Axis("offered requests per second", min(rates) - margin, max(rates) + margin)
    first = _over_rate(runs, "ttft_mean_s", colours)
    served = _over_rate(runs, "attainment", colours)
    satisfied = _over_rate(runs, "slora_satisfaction", colours)
    lowest = _least(served)
    part = Axis("requests served well", max(0.0, lowest - 0.05), 1.0, is_percent=True)
    seconds = _seconds("time to first word, mean (s)", first)
    score = Axis("satisfaction", max(0.0, _least(satisfied) - 0.05), 1.0)
    return [
        (
            "How long people wait for the first word",
            line_chart(first, x, seconds, mark=_mark(slo.ttft_s, seconds)),
        ),
        (
            "Requests served well",
            line_chart(served, x, part, mark=(slo.target, "aim")),
        ),
        ("Satisfaction (S-LoRA's measure)", line_chart(satisfied, x, score)),
    ]


def wait_plot(runs: Sequence[RunResult], colours: Colours) -> str:
    """How many had their first word within how long, of runs at one rate with one seed."""
    series = []
    for run in runs:
        quantiles = run.summary.ttft_quantiles_s
        points = [
            (max(SHORTEST_S, value_s), number / (NUM_QUANTILES - 1))
            for number, value_s in enumerate(quantiles)
        ]
        has_twin = any(other.kind == "virtual" and other.target == run.target for other in runs)
        series.append(_drawn(run.target, points, colours, run.kind, has_twin=has_twin))
    waits = [point[0] for each in series for point in each.points]
    if not waits:
        return ""
    x = Axis("time to first word (s)", min(waits), max(*waits, 1.1 * min(waits)), is_log=True)
    y = Axis("requests that had it by then", 0.0, 1.0, is_percent=True)
    return line_chart(series, x, y)


def _over_rate(runs: Sequence[RunResult], key: str, colours: Colours) -> list[Series]:
    """Means over seeds: of virtual runs those that the real ones have, to be the same requests."""
    series = []
    for target in dict.fromkeys(run.target for run in runs):
        own = [run for run in runs if run.target == target]
        seeds = {run.seed for run in own if run.kind == "real"} or {run.seed for run in own}
        has_twin = any(run.kind == "virtual" for run in own)
        for kind in ("virtual", "real"):
            shown = [run for run in own if run.kind == kind and run.seed in seeds]
            points = _means(shown, key)
            if points:
                series.append(_drawn(target, points, colours, kind, has_twin=has_twin))
    return series


def _means(runs: Iterable[RunResult], key: str) -> list[tuple[float, float]]:
    values: dict[float, list[float]] = {}
    for run in runs:
        values.setdefault(run.rate_rps, []).append(getattr(run.metrics, key))
    return [(rate_rps, fmean(own)) for rate_rps, own in sorted(values.items())]


def _drawn(
    target: str,
    points: Sequence[tuple[float, float]],
    colours: Colours,
    kind: str,
    *,
    has_twin: bool,
) -> Series:
    """A line for a virtual run; points for a real one, joined where it has no twin."""
    is_line = kind == "virtual" or not has_twin
    name = target.removeprefix("rule:") if is_line else ""
    is_dense = len(points) == NUM_QUANTILES
    return Series(
        name,
        points if is_line or not is_dense else points[::QUANTILES_PER_DOT],
        colours[target],
        has_line=is_line,
        has_dots=kind == "real" and not (is_line and is_dense),
    )


def _least(series: Iterable[Series]) -> float:
    return min(value for each in series for _, value in each.points)


def _seconds(label: str, series: Sequence[Series]) -> Axis:
    values = [max(SHORTEST_S, value) for each in series for _, value in each.points]
    return Axis(label, 0.8 * min(values), 1.25 * max(values), is_log=True)


def _mark(value: float, axis: Axis) -> tuple[float, str] | None:
    """A line where it is in sight."""
    return (value, "allowed") if axis.low <= value <= axis.high else None
