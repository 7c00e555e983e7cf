"""The charts of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean
from typing import Any

from extproc.lab.trials.charts import Axis, Bar, Series, bar_chart, curve, line_chart
from extproc.lab.trials.summary import called, is_bound
from extproc.lab.trials.trials import POOLED

Json = Mapping[str, Any]
Chart = tuple[str, str, str]
"""Title, SVG and a note; an empty one is not shown."""
MIN_GRID = 3
"""With fewer common rates, the searches' runs are drawn as well."""
RATE_RATIO = 1.1
"""Runs at rates that differ by less are one point of a curve."""


def latency_charts(
    trials: Sequence[Json], colours: Mapping[str, str], slo: Json, rates: Sequence[float]
) -> list[Chart]:
    """Draw the slowest first words and the part served well, over the offered rate."""
    place = place_at(rates)
    slowest = curves(trials, "ttft_p99_s", colours, place)
    # Perfect pooling is searched far beyond all others.
    shown = [r for line in slowest if line.name != called(POOLED) for r, _ in line.points] or rates
    x = Axis("offered requests per second", min(shown), max(shown))
    slowest = _within(slowest, max(shown))
    y = Axis("time to first word, 99th percentile (s)", 0.03, 100.0, is_log=True)
    served = _within(curves(trials, "attainment", colours, place), max(shown))
    lowest = min((v for line in served for _, v in line.points), default=0.0)
    part = Axis("requests served well", min(0.9, max(0.0, lowest - 0.02)), 1.0, is_percent=True)
    first = line_chart(slowest, x, y, mark=(slo["ttft_s"], "allowed"))
    second = line_chart(served, x, part, mark=(slo["target"], "required"))
    return [
        ("The slowest first words, as load grows", first, ""),
        ("Requests served well, as load grows", second, ""),
    ]


def place_at(rates: Sequence[float]) -> Callable[[Json, Json], float | None]:
    """Return a function that places a run at its rate if that is common, or if few rates are."""

    def place(_: Json, run: Json) -> float | None:
        if run["rate_rps"] in rates:
            return float(run["rate_rps"])
        return _near(run["rate_rps"]) if len(rates) < MIN_GRID else None

    return place


def curves(
    trials: Iterable[Json],
    key: str,
    colours: Mapping[str, str],
    place: Callable[[Json, Json], float | None],
) -> list[Series]:
    """Return a line per policy of a measure of its runs; `place` says where, None leaves out."""
    values: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in trials:
        for run in trial["runs"]:
            at = place(trial, run)
            if at is not None:
                values[trial["policy"]][at].append(run[key])
    return [
        curve(
            called(policy), own, colours.get(policy, "#333333"), "o--" if is_bound(policy) else "o-"
        )
        for policy, own in values.items()
    ]


def _within(lines: Sequence[Series], highest: float) -> list[Series]:
    """Cut the lines at a rate."""
    nums = [sum(x <= highest for x, _ in line.points) for line in lines]
    return [
        replace(line, points=line.points[:num], band=line.band[:num])
        for line, num in zip(lines, nums, strict=True)
    ]


def _near(rate_rps: float) -> float:
    """Round a rate, so that runs of different seeds' searches meet."""
    return float(f"{RATE_RATIO ** round(log(rate_rps, RATE_RATIO)):.3g}")


def loads_chart(trials: Sequence[Json], colours: Mapping[str, str]) -> Chart:
    """Draw the adapter loads per policy, with the clairvoyant bound."""
    loads: defaultdict[str, list[float]] = defaultdict(list)
    bounds: list[float] = []
    for trial in trials:
        for run in trial["runs"]:
            if "belady_loads_per_1000" in run and trial["policy"] != POOLED:
                loads[trial["policy"]].append(run["loads_per_1000"])
                bounds.append(run["belady_loads_per_1000"])
    if not loads:
        return ("", "", "")
    bars: list[Bar] = [
        (called(policy), fmean(own), None, None, colours[policy]) for policy, own in loads.items()
    ]
    chart = bar_chart(
        sorted(bars, key=lambda bar: bar[1]),
        "adapter loads per 1,000 requests, at the highest common rate",
        mark=(fmean(bounds), "clairvoyant"),
    )
    return (
        "How often adapters are moved",
        chart,
        "Clairvoyant: the least possible for requests served in their order. An overloaded server "
        "serves one adapter's queue together and can stay below.",
    )


def sweep_charts(result: Json, colours: Mapping[str, str]) -> list[Json]:
    """Draw throughput and part served well over the factor of each sweep."""
    found: list[Json] = []
    for sweep in result["suite"]["sweeps"]:
        own = [trial for trial in result["trials"] if trial["sweep"] == sweep["name"]]
        if own:
            found.append({**sweep, "charts": _sweep(sweep, own, colours)})
    return found


def _sweep(sweep: Json, trials: Sequence[Json], colours: Mapping[str, str]) -> list[Chart]:
    x = Axis(sweep["title"], min(sweep["values"]), max(sweep["values"]), is_log=True)
    done, served = (
        curves(trials, key, colours, lambda trial, _: float(trial["value"]))
        for key in ("throughput_rps", "attainment")
    )
    highest = max(value for line in done for _, value in line.points)
    return [
        ("", line_chart(done, x, Axis("finished requests per second", 0.0, 1.05 * highest)), ""),
        ("", line_chart(served, x, Axis("requests served well", 0, 1, is_percent=True)), ""),
    ]
