"""How far a policy is from what it aims at: near B3, ahead of founding, and behind no opponent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from extproc.sim.trials.summary import is_bound, pairs
from extproc.sim.trials.table import line, rule, title
from extproc.sim.trials.trials import INFORMED
from extproc.workload.intervals import Interval, is_not_worse, paired_ratio

FOUNDING = "founding"
Json = Mapping[str, Any]
Capacities = Mapping[str, Mapping[int, float]]
"""Requests per second, by policy and seed."""


def aim_tables(result: Json, policy: str) -> str:
    """Format three tables in Markdown, from a suite's result.

    By scenario, the capacities of a policy and its variants, with their paired ratios to B3 and to
    the founding rule; by policy, the median and the worst scenario's ratio to B3; and the opponents
    that the policy is not surely at least 0.97 of, by scenario.

    Raises:
        ValueError: The result is without this policy, founding or B3 in a scenario.
    """
    scenarios = _capacities(result["trials"])
    for name, capacities in scenarios.items():
        for needed in (policy, FOUNDING, INFORMED):
            if needed not in capacities:
                raise ValueError(f"scenario {name} was not run with {needed}")
    variants = [each["label"] for each in result["suite"]["variants"] if each["policy"] == policy]
    ours = [policy, *variants]
    return "\n\n".join(
        (
            _by_scenario(scenarios, ours),
            _by_policy(scenarios),
            _not_behind(scenarios, ours),
        )
    )


def _capacities(trials: Sequence[Json]) -> Mapping[str, Capacities]:
    found: dict[str, dict[str, dict[int, float]]] = {}
    for trial in trials:
        if not trial["sweep"]:
            own = found.setdefault(trial["scenario"], {}).setdefault(trial["policy"], {})
            own[trial["seed"]] = trial["capacity_rps"]
    return found


def _by_scenario(scenarios: Mapping[str, Capacities], ours: Sequence[str]) -> str:
    head = "requests/s; over B3; over founding (lower ends of 95 %)"
    names = [f"`{name}`" for name in (FOUNDING, *ours)]
    lines = [line(head, "B3", *names), rule(2 + len(ours))]
    for name, capacities in scenarios.items():
        references = [f"{_mean(capacities[each]):.1f}" for each in (INFORMED, FOUNDING)]
        cells = []
        for own in ours:
            over = [_over(capacities, own, other) for other in (INFORMED, FOUNDING)]
            known = [_ratio(each) for each in over if each]
            cells.append("; ".join([f"{_mean(capacities[own]):.1f}", *known]) if known else "")
        lines.append(line(name, *references, *cells))
    return "\n".join(lines)


def _by_policy(scenarios: Mapping[str, Capacities]) -> str:
    ratios: dict[str, dict[str, float]] = {}
    for name, capacities in scenarios.items():
        for policy in capacities:
            if policy != INFORMED and (over := _over(capacities, policy, INFORMED)):
                ratios.setdefault(policy, {})[name] = over.mean
    lines = [line("over B3", "median", "worst", "in", "scenarios"), rule(4)]
    for policy, own in sorted(ratios.items(), key=lambda item: -median(item[1].values())):
        worst = min(own, key=lambda name: own[name])
        figures = f"{median(own.values()):.2f}", f"{own[worst]:.2f}"
        lines.append(line(title(policy), *figures, worst, str(len(own))))
    return "\n".join(lines)


def _not_behind(scenarios: Mapping[str, Capacities], ours: Sequence[str]) -> str:
    lines = [line("not surely behind", "in", f"`{ours[0]}` over it (95 %)"), rule(2)]
    for name, capacities in scenarios.items():
        for other in sorted(capacities):
            over = _over(capacities, ours[0], other)
            if other in ours or is_bound(other) or over is None or is_not_worse(over):
                continue
            to = "" if over.low is None else f" ({over.low:.2f} to {over.high:.2f})"
            lines.append(line(f"`{other}`", name, f"{over.mean:.2f}{to}"))
    return "\n".join(lines)


def _over(capacities: Capacities, policy: str, other: str) -> Interval | None:
    """Return the paired ratio of two policies; None without a seed that both were run with."""
    own, others = pairs(capacities.get(policy, {}), capacities[other])
    return paired_ratio(own, others) if own else None


def _mean(values: Mapping[int, float]) -> float:
    return fmean(values.values())


def _ratio(ratio: Interval) -> str:
    return f"{ratio.mean:.2f}" + ("" if ratio.low is None else f" ({ratio.low:.2f})")
