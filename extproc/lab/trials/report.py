"""A suite's results as one HTML page, from the JSON of `summary.summarize`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from extproc.errors import needs_extra
from extproc.lab.opponents import DESCRIPTIONS
from extproc.lab.trials.charts import (
    COLOURS,
    GREYS,
    Axis,
    Bar,
    Series,
    bar_chart,
    curve,
    line_chart,
)
from extproc.lab.trials.summary import called, is_bound, speed
from extproc.lab.trials.trials import POOLED

if TYPE_CHECKING:
    from jinja2 import Environment

Json = Mapping[str, Any]
Chart = tuple[str, str, str]
"""Title, SVG and a note; an empty one is not shown."""
RATE_RATIO = 1.1
"""Runs at rates that differ by less are one point of a curve."""
MAX_BOUND_RATIO = 2.5
"""Bounds further above the best policy are written as text: their bars would dwarf the rest."""

_COLUMNS = (
    ("served well", "attainment", "{:.1%}"),
    ("first token p50, s", "ttft_p50_s", "{:.3f}"),
    ("first token p99, s", "ttft_p99_s", "{:.2f}"),
    ("per token p99, s", "tpot_p99_s", "{:.4f}"),
    ("done /s", "throughput_rps", "{:.1f}"),
    ("S-LoRA satisf.", "slora_satisfaction", "{:.3f}"),
    ("adapter loads /1000", "loads_per_1000", "{:.0f}"),
    ("queue wait, s", "queue_wait_s", "{:.3f}"),
    ("max/mean load", "max_over_mean_load", "{:.2f}"),
    ("worst adapter", "worst_adapter", "{:.0%}"),
)


class PageError(ValueError):
    """A page cannot be rendered here."""


def render(result: Json) -> str:
    """Render the page: self-contained, with charts as inline SVG, for light and dark screens.

    Raises:
        PageError: A library is not installed, or the result has no capacities.
    """
    environment, suite = templates(), result["suite"]
    if not result["summary"]:
        raise PageError(f"{suite['name']} was run at fixed rates: a page is about capacities")
    colours = colours_of(suite)
    return environment.get_template("report.html").render(
        suite=suite,
        scenarios=[_scenario(result, scenario, colours) for scenario in suite["scenarios"]],
        sweeps=sweep_charts(result, colours),
        policies=[
            *((label, describe(label)) for label in suite["policies"]),
            *((row["label"], _changed(row)) for row in suite.get("variants", ())),
        ],
        columns=_COLUMNS,
        called=called,
        provenance=result["provenance"],
        num_runs=sum(len(trial["runs"]) for trial in result["trials"]),
        speed=speed(result["timing"]),
    )


def templates() -> Environment:
    """Return the pages of this folder, to be rendered.

    Raises:
        PageError: A library is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PageError(needs_extra("a page", "loadtest", error)) from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["svg"] = Markup
    return environment


def describe(label: str) -> str:
    """Return a description of a policy in one line."""
    return DESCRIPTIONS.get(label.partition("?")[0], "yours")


def colours_of(suite: Json) -> dict[str, str]:
    """Return a colour for each policy; bounds are grey."""
    policies = [policy for policy in suite["policies"] if not is_bound(policy)]
    policies += [variant["label"] for variant in suite.get("variants", ())]
    colours = {policy: COLOURS[index % len(COLOURS)] for index, policy in enumerate(policies)}
    return {**colours, **{bound: GREYS.get(bound[:2], GREYS["B4"]) for bound in suite["bounds"]}}


def _changed(variant: Json) -> str:
    fleet = ", ".join(f"{key} {value}" for key, value in variant["fleet"].items())
    return f"{variant['policy']} in a fleet with {fleet}"


def _scenario(result: Json, scenario: Json, colours: Mapping[str, str]) -> Json:
    suite, summary = result["suite"], result["summary"][scenario["name"]]
    rows = summary["rows"]
    own = [t for t in result["trials"] if t["scenario"] == scenario["name"] and not t["sweep"]]
    policies = [row for row in rows if not row["is_bound"]]
    limit_rps = MAX_BOUND_RATIO * policies[0]["capacity_rps"]["mean"]
    beyond = [row for row in rows if row["is_bound"] and row["capacity_rps"]["mean"] > limit_rps]
    rates = scenario["rates_rps"] or suite["rates_rps"]
    return {
        "title": scenario["title"] or scenario["name"],
        "rate_rps": summary["main_rate_rps"],
        "rows": rows,
        "policies": policies,
        "better": [row["policy"] for row in policies if (row["over_baseline"]["low"] or 0) > 1],
        "capacities": _capacity_chart([row for row in rows if row not in beyond], colours),
        "beyond": [f"{called(row['policy'])}: {row['capacity_rps']['mean']:.3g}" for row in beyond],
        "charts": [
            *latency_charts(own, colours, suite["slo"], rates),
            loads_chart(own, colours),
        ],
    }


def _capacity_chart(rows: Sequence[Json], colours: Mapping[str, str]) -> str:
    capacities = [(row["policy"], row["capacity_rps"]) for row in rows]
    bars: list[Bar] = [
        (called(policy), rps["mean"], rps["low"], rps["high"], colours[policy])
        for policy, rps in capacities
    ]
    return bar_chart(bars, "capacity: requests per second served well (mean and 95 % interval)")


# --- its charts ---------------------------------------------------------------------------------


def latency_charts(
    trials: Sequence[Json], colours: Mapping[str, str], slo: Json, rates: Sequence[float]
) -> list[Chart]:
    """Draw the slowest first tokens and the part served well, over the offered rate."""
    slowest, served = (
        curves(trials, key, colours, lambda _, run: near(run["rate_rps"], rates))
        for key in ("ttft_p99_s", "attainment")
    )
    # Perfect pooling is searched far beyond all others.
    shown = [r for line in slowest if line.name != called(POOLED) for r, _ in line.points] or rates
    x = Axis("offered requests per second", min(shown), max(shown))
    slowest = _within(slowest, max(shown))
    y = Axis("time to first token, 99th percentile (s)", 0.03, 100.0, is_log=True)
    served = _within(served, max(shown))
    lowest = min((v for line in served for _, v in line.points), default=0.0)
    part = Axis("requests served well", min(0.9, max(0.0, lowest - 0.02)), 1.0, is_percent=True)
    first = line_chart(slowest, x, y, mark=(slo["ttft_s"], "allowed"))
    second = line_chart(served, x, part, mark=(slo["target"], "required"))
    return [
        ("The slowest first tokens, as load grows", first, ""),
        ("Requests served well, as load grows", second, ""),
    ]


def curves(
    trials: Iterable[Json],
    key: str,
    colours: Mapping[str, str],
    place: Callable[[Json, Json], float],
) -> list[Series]:
    """Return a line per policy of a measure of its runs, each at its `place`."""
    values: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trial in trials:
        for run in trial["runs"]:
            values[trial["policy"]][place(trial, run)].append(run[key])
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


def near(rate_rps: float, rates: Sequence[float]) -> float:
    """Return a common rate as it is, any other one rounded: runs of different seeds' searches
    meet.
    """
    if rate_rps in rates:
        return rate_rps
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
        "Clairvoyant: the least possible for requests served in their order. An overloaded pod "
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
