"""Markdown tables; and a suite's capacities as one: a line per policy, a column per scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from extproc.sim.trials.summary import is_bound
from extproc.workload.intervals import standard_error

Json = Mapping[str, Any]


def line(*cells: str) -> str:
    """Format a row of cells."""
    return "| " + " | ".join(cells) + " |"


def rule(num_figures: int) -> str:
    """Format what is below the head: a column of names, then columns of figures."""
    return "|---" + "|--:" * num_figures + "|"


def title(policy: str) -> str:
    """Format the name of a policy or a bound."""
    return f"*{policy}*" if is_bound(policy) else f"`{policy}`"


def markdown(result: Json) -> str:
    """Format the SLO capacities in requests per second, with half of their 95 % intervals and, in
    brackets, the part of the worst served adapter's requests that is served well there.

    The last column is the geometric mean over the scenarios of the ratio to B3's capacity, by which
    the policies are sorted. Cells of scenarios that a policy did not run are empty.
    """
    scenarios = list(result["summary"])
    rows: dict[str, dict[str, Json]] = {}
    for scenario in scenarios:
        for row in result["summary"][scenario]["rows"]:
            rows.setdefault(row["policy"], {})[scenario] = row
    lines = [line("policy", *scenarios, "of B3"), "|---" * (len(scenarios) + 2) + "|"]
    means = {policy: _of_informed(own) for policy, own in rows.items()}
    for policy in sorted(rows, key=lambda policy: (-(means[policy] or 0.0), policy)):
        own = rows[policy]
        cells = [_cell(own.get(scenario)) for scenario in scenarios]
        mean = means[policy]
        lines.append(line(title(policy), *cells, "" if mean is None else f"{mean:.0%}"))
    return "\n".join(lines)


SWEPT = {
    "attainment": ("served well, %", 100),
    "slora_satisfaction": ("S-LoRA satisfaction, %", 100),
    "throughput_rps": ("finished, req/s", 1),
    "service_gap": ("gap in service, points", 100),
}
"""Measures of a sweep: their titles, and what to multiply them with."""


def sweeps(result: Json) -> str:
    """Format what sweeps found, a line per value and policy, each figure ± its standard error."""
    runs: dict[tuple[str, float, str], list[Json]] = {}
    for trial in result["trials"]:
        if trial["sweep"]:
            key = trial["sweep"], trial["value"], trial["policy"]
            runs.setdefault(key, []).append(trial["runs"][0])
    lines = [
        line("sweep", "value", "policy", *(name for name, _ in SWEPT.values())),
        rule(len(SWEPT) + 2),
    ]
    for (sweep, value, policy), own in sorted(runs.items()):
        cells = [
            mean_cell([factor * run.get(key, 0.0) for run in own])
            for key, (_, factor) in SWEPT.items()
        ]
        lines.append(line(sweep, f"{value:g}", title(policy), *cells))
    return "\n".join(lines)


def mean_cell(values: Sequence[float]) -> str:
    """Format a mean with its standard error; nothing if there is no value."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{fmean(values):.1f} ± {standard_error(values):.1f}"


def _of_informed(rows: Mapping[str, Json]) -> float | None:
    parts: Sequence[float] = [
        row["over_informed"]["mean"] for row in rows.values() if row["over_informed"] is not None
    ]
    return exp(fmean(log(max(part, 1e-9)) for part in parts)) if parts else None


def _cell(row: Json | None) -> str:
    if row is None:
        return ""
    capacity = row["capacity_rps"]
    worst = f"({row['worst_adapter']['mean']:.0%})"
    if capacity["low"] is None:
        return f"{capacity['mean']:.1f} {worst}"
    return f"{capacity['mean']:.1f} ± {(capacity['high'] - capacity['low']) / 2:.1f} {worst}"
