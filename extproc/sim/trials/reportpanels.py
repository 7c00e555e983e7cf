"""The plots of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from math import log
from statistics import fmean
from typing import Any

from extproc.sim.trials.summary import called, is_bound
from extproc.sim.trials.svg import Axis, Bar, Series, bar_chart, heat_map, line_chart
from extproc.sim.trials.trials import POOLED

Json = Mapping[str, Any]
MAX_HEAT_MAPS = 4
MIN_GRID = 3
"""Common rates that make a curve; with fewer, the searches' runs are drawn as well."""
RATE_RATIO = 1.1
"""Runs at rates that differ by less are one point of a curve."""


def latency_panel(
    trials: Sequence[Json], colours: Mapping[str, str], slo: Json, rates: Sequence[float]
) -> str:
    """Slowest first words and part served well, over the offered rate."""
    slowest = _series(trials, "ttft_p99_s", colours, rates)
    # Perfect pooling is searched far beyond all others.
    shown = [r for line in slowest if line.name != called(POOLED) for r, _ in line.points] or rates
    x = Axis("offered requests per second", min(shown), max(shown))
    slowest = _within(slowest, max(shown))
    y = Axis("time to first word, 99th percentile (s)", 0.03, 100.0, is_log=True)
    served = _within(_series(trials, "attainment", colours, rates), max(shown))
    lowest = min((v for line in served for _, v in line.points), default=0.0)
    part = Axis("requests served well", min(0.9, max(0.0, lowest - 0.02)), 1.0, is_percent=True)
    first = line_chart(slowest, x, y, mark=(slo["ttft_s"], "allowed"))
    second = line_chart(served, x, part, mark=(slo["target"], "required"))
    return (
        f"<div><h3>The slowest first words, as load grows</h3>{first}</div>"
        f"<div><h3>Requests served well, as load grows</h3>{second}</div>"
    )


def _series(
    trials: Sequence[Json], key: str, colours: Mapping[str, str], rates: Sequence[float]
) -> list[Series]:
    values: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in trials:
        for run in trial["runs"]:
            if run["rate_rps"] in rates:
                values[trial["rule"]][run["rate_rps"]].append(run[key])
            elif len(rates) < MIN_GRID:
                values[trial["rule"]][_near(run["rate_rps"])].append(run[key])
    return [
        Series(
            called(rule),
            [(rate, fmean(own)) for rate, own in sorted(line.items())],
            colours[rule],
            is_bound(rule),
        )
        for rule, line in values.items()
    ]


def _within(lines: Sequence[Series], highest: float) -> list[Series]:
    """The lines up to a rate."""
    return [
        replace(line, points=[point for point in line.points if point[0] <= highest])
        for line in lines
    ]


def _near(rate_rps: float) -> float:
    """A rate that those of other seeds' searches share, a few per cent off."""
    return float(f"{RATE_RATIO ** round(log(rate_rps, RATE_RATIO)):.3g}")


def loads_panel(trials: Sequence[Json], colours: Mapping[str, str]) -> str:
    """Adapter loads per rule, with the clairvoyant bound."""
    loads: defaultdict[str, list[float]] = defaultdict(list)
    bounds: list[float] = []
    for trial in trials:
        for run in trial["runs"]:
            if "belady_loads_per_1000" in run and trial["rule"] != "B0_pooled":
                loads[trial["rule"]].append(run["loads_per_1000"])
                bounds.append(run["belady_loads_per_1000"])
    if not loads:
        return ""
    bars: list[Bar] = [
        (called(rule), fmean(own), None, None, colours[rule]) for rule, own in loads.items()
    ]
    bars.sort(key=lambda bar: bar[1])
    chart = bar_chart(
        bars,
        "adapter loads per 1,000 requests, at the highest common rate",
        mark=(fmean(bounds), "clairvoyant"),
    )
    return (
        f"<div><h3>How often adapters are moved</h3>{chart}"
        '<p class="note">Clairvoyant: the least possible for requests served in their order. An '
        "overloaded server serves one adapter's queue together and can stay below.</p></div>"
    )


def sweep_panels(result: Json, colours: Mapping[str, str]) -> list[str]:
    """One factor varied: throughput and part served well."""
    panels = []
    for sweep in result["suite"]["sweeps"]:
        own = [trial for trial in result["trials"] if trial["sweep"] == sweep["name"]]
        if not own:
            continue
        x = Axis(sweep["title"], min(sweep["values"]), max(sweep["values"]), is_log=True)
        charts = []
        for key, label in (("throughput_rps", "finished requests per second"), ("attainment", "")):
            lines = _sweep_series(own, key, colours)
            highest = max(value for line in lines for _, value in line.points)
            y = (
                Axis("requests served well", 0.0, 1.0, is_percent=True)
                if key == "attainment"
                else Axis(label, 0.0, highest * 1.05)
            )
            charts.append(f"<div>{line_chart(lines, x, y)}</div>")
        panels.append(
            f"<h2>What happens with {escape(sweep['name'])}</h2><p>At {sweep['rate_rps']:g} "
            f'requests per second.</p><div class="grid">{"".join(charts)}</div>'
        )
    return panels


def _sweep_series(trials: Sequence[Json], key: str, colours: Mapping[str, str]) -> list[Series]:
    values: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in trials:
        for run in trial["runs"]:
            values[trial["rule"]][trial["value"]].append(run[key])
    return [
        Series(
            called(rule),
            [(value, fmean(own)) for value, own in sorted(line.items())],
            colours.get(rule, "#333"),
            is_bound(rule),
        )
        for rule, line in values.items()
    ]


def heat_maps(trials: Sequence[Json]) -> str:
    """Which server served which adapter when."""
    parts: list[str] = []
    for trial in trials:
        placed = trial["placement"]
        if not placed or len(parts) == MAX_HEAT_MAPS:
            continue
        counts, pods, adapters = placed["counts"], placed["pods"], placed["adapters"]
        cells = [
            [part[pod][adapter] for pod in range(len(pods)) for part in counts]
            for adapter in range(len(adapters))
        ]
        names = [f"server {number + 1}" for number in range(len(pods))]
        chart = heat_map(cells, adapters, names, len(counts))
        parts.append(f"<div><h3>{escape(called(trial['rule']))}</h3>{chart}</div>")
    if not parts:
        return ""
    return (
        "<h3>Where adapters lived</h3><p class='note'>A line is an adapter, the most popular on "
        "top; a block is a server, its columns are time from left to right. Darker means more "
        "requests. A rule that keeps adapters in place shows solid lines in few blocks.</p>"
        f'<div class="grid">{"".join(parts)}</div>'
    )
