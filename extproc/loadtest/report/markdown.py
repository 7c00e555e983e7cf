"""A load test as Markdown tables, and its plots as files: for documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extproc.loadtest.figures import FIGURES, Figure
from extproc.loadtest.report.agreement import agreement
from extproc.loadtest.report.plots import colours_of, rate_charts
from extproc.loadtest.results import LoadResult, RunResult

PLOT_NAMES = ("wait", "served", "satisfaction")
_ON_WHITE = '<svg style="background:#fff" '
"""Pages that show a plot may be dark."""


def markdown(result: LoadResult) -> str:
    """A table for each scenario and rate: real figures, virtual ones in brackets."""
    cells = dict.fromkeys((run.scenario, run.rate_rps) for run in result.of_kind("real"))
    tables = [
        _table(
            f"{scenario}, {rate_rps:g}/s",
            [r for r in result.runs if (r.scenario, r.rate_rps) == (scenario, rate_rps)],
            result.targets,
        )
        for scenario, rate_rps in cells
    ]
    return "\n\n".join(tables) + "\n"


def save_plots(result: LoadResult, folder: Path) -> list[Path]:
    """Write the plots over the rate as SVG, `SCENARIO-PLOT.svg`, and answer their paths.

    Raises:
        OSError: One cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    colours = colours_of(result)
    paths = []
    for scenario in result.scenarios:
        runs = [run for run in result.runs if run.scenario == scenario]
        plots = rate_charts(runs, colours, result.slo)
        for name, (_, chart) in zip(PLOT_NAMES, plots, strict=False):
            paths.append(folder / f"{scenario}-{name}.svg")
            paths[-1].write_text(chart.replace("<svg ", _ON_WHITE, 1) + "\n", encoding="utf-8")
    return paths


def _table(title: str, runs: Sequence[RunResult], ordered: Sequence[str]) -> str:
    real = {run.target for run in runs if run.kind == "real"}
    targets = [target for target in ordered if target in real]
    heads = [title, *(target.removeprefix("rule:") for target in targets), "order as predicted"]
    rows = [_row(runs, targets, figure) for figure in FIGURES.values()]
    rule = ["---"] + ["--:"] * len(targets) + ["---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _row(runs: Sequence[RunResult], targets: Sequence[str], figure: Figure) -> list[str]:
    pairs = [figure.shown(runs, target) for target in targets]
    cells = [f"{real} ({virtual})" if virtual else real for real, virtual in pairs]
    return [figure.name, *cells, agreement(runs, figure).words]
