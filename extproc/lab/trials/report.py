"""A suite's results as one HTML page, from the JSON of `summary.summarize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.errors import needs_extra
from extproc.lab.opponents import DESCRIPTIONS
from extproc.lab.trials.charts import COLOURS, GREYS, Bar, bar_chart
from extproc.lab.trials.reportpanels import latency_charts, loads_chart, sweep_charts
from extproc.lab.trials.summary import called, is_bound, speed

Json = Mapping[str, Any]
MAX_BOUND_RATIO = 2.5
"""Bounds further above the best policy are written as text: their bars would dwarf the others."""

_COLUMNS = (
    ("served well", "attainment", "{:.1%}"),
    ("first word p50, s", "ttft_p50_s", "{:.3f}"),
    ("first word p99, s", "ttft_p99_s", "{:.2f}"),
    ("per word p99, s", "tpot_p99_s", "{:.4f}"),
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
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PageError(needs_extra("a page", "loadtest", error)) from error
    suite = result["suite"]
    if not result["summary"]:
        raise PageError(f"{suite['name']} was run at fixed rates: a page is about capacities")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["svg"] = Markup
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
