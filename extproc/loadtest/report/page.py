"""An HTML page about a load test for readers who do not know the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.loadtest.figures import FIGURES
from extproc.loadtest.measures import NOBODY
from extproc.loadtest.report.agreement import agreement, distance
from extproc.loadtest.report.plots import colours_of, rate_charts, wait_chart
from extproc.loadtest.report.words import delay_words, error_words
from extproc.loadtest.results import LoadResult, RunResult, load, policy_of
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.trials.pages import check_libraries, describe, rendered

NUM_SHOWN = 5
"""Adapters and tenants from either end."""
Values = Mapping[str, object]


def render(result: LoadResult, *, link: str = "") -> str:
    """Return the page, with a link to the result's file unless that is "".

    Raises:
        PageError: A library is not installed.
        ValueError: It has no runs.
    """
    real = result.of_kind("real")
    if not real:
        raise ValueError(f"{result.name}: a load test without real runs")
    check_libraries()
    profile = PROFILES.get(result.suite.profile) if result.suite else None
    policies = [policy_of(target) for target in result.targets if target.startswith("policy:")]
    return rendered(
        Path(__file__).with_name("page.html"),
        result=result,
        real=real,
        has_twins=bool(result.of_kind("virtual")),
        lagged=[run for run in real if run.summary.has_lagged],
        num_requests=sum(run.summary.num_requests for run in real),
        num_failed=sum(sum(run.summary.errors.values()) for run in real),
        delay_s=max(run.summary.delay_s.p50 for run in real),
        distances=_distances(result),
        **_orders(result),
        scenarios=[_scenario(result, name) for name in dict.fromkeys(r.scenario for r in real)],
        policies=[(policy, describe(policy)) for policy in policies],
        provenance=profile.provenance if profile else "",
        link=link,
        error_words=error_words,
        delay_words=delay_words,
        nobody=NOBODY,
        num_shown=NUM_SHOWN,
    )


def page_of(path: Path) -> str:
    """Return the page of a result's file in the same folder.

    Raises:
        OSError: It cannot be read.
        ResultError: It is something else.
        ValueError: It has no real runs, or a page cannot be made.
    """
    return render(load(path), link=path.name)


def _distances(result: LoadResult) -> list[str]:
    apart = {figure.name: distance(result.runs, figure) for figure in FIGURES.values()}
    return [
        f"{name.partition(' (')[0]} {value:.0%}"
        for name, value in apart.items()
        if value is not None
    ]


def _orders(result: LoadResult) -> Values:
    """Return the number of predicted orders, and of those that real runs have."""
    cells = dict.fromkeys((run.scenario, run.rate_rps) for run in result.of_kind("real"))
    verdicts = [
        agreement([r for r in result.runs if (r.scenario, r.rate_rps) == cell], figure)
        for cell in cells
        for figure in FIGURES.values()
    ]
    num = sum(verdict.num_pairs for verdict in verdicts)
    return {"num_orders": num, "num_right": num - sum(len(v.wrong) for v in verdicts)}


def _scenario(result: LoadResult, name: str) -> Values:
    runs = [run for run in result.runs if run.scenario == name]
    rates = sorted({run.rate_rps for run in runs if run.kind == "real"})
    at = {rate_rps: [run for run in runs if run.rate_rps == rate_rps] for rate_rps in rates}
    colours, last = colours_of(result), at[rates[-1]]
    first_seed = min(run.seed for run in last if run.kind == "real")
    waits = wait_chart([run for run in last if run.seed == first_seed], colours)
    charts = [(title, chart, "") for title, chart in rate_charts(runs, colours, result.slo)]
    specs = result.suite.scenarios if result.suite else []
    return {
        "title": next((each.title for each in specs if each.name == name and each.title), name),
        "has_twins": any(run.kind == "virtual" for run in runs),
        "charts": [*charts, (f"How long each waited, at {rates[-1]:.3g}/s", waits, "")],
        "rates": [_rate(rate_rps, own, result.targets) for rate_rps, own in at.items()],
    }


def _rate(rate_rps: float, runs: Sequence[RunResult], ordered: Sequence[str]) -> Values:
    """Return all figures at one rate: real and virtual by target, and whether the order agrees."""
    real = {
        target: [run for run in runs if run.target == target and run.kind == "real"]
        for target in ordered
    }
    targets = [target for target in ordered if real[target]]
    rows: list[dict[str, Any]] = [
        {
            "name": figure.name,
            "cells": [figure.shown(runs, target) for target in targets],
            "verdict": agreement(runs, figure),
        }
        for figure in FIGURES.values()
    ]
    return {
        "rate_rps": rate_rps,
        "targets": [policy_of(target) for target in targets],
        "has_twins": any(run.kind == "virtual" for run in runs),
        "rows": [row for row in rows if any(value for value, _ in row["cells"])],
        "first_runs": [real[target][0] for target in targets],
    }
