"""Keeps a load test in the repository: its result, small, its plots, and its tables as Markdown.

    scripts/publish-loadtest table2-2026-11-22 loadtest/out/real/table2.json

Several results of one suite are put together; of a run that was made again the last one counts, and
`--note` is what must be known of it. The result goes to loadtest/results/NAME.json, the
plots to docs/loadtest/, the tables to the terminal (docs/loadtest-results.md has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from extproc.loadtest.figures import FIGURES, Figure
from extproc.loadtest.measures import GroupSummary
from extproc.loadtest.report.agreement import agreement
from extproc.loadtest.report.plots import colours_of, rate_charts
from extproc.loadtest.results import LoadResult, ResultError, RunResult, load, policy_of, save

ROOT = Path(__file__).parents[1]
PLOT_NAMES = ("wait", "served", "satisfaction")
_ON_WHITE = '<svg style="background:#fff" '
"""Pages that show a plot may be dark."""


def merged(parts: Sequence[LoadResult]) -> LoadResult:
    """Load tests of one suite, made apart, as one: the first one's words, all runs.

    Of a run that was made again the last one counts.

    Raises:
        ResultError: There is none, or they are not of one suite and one machine.
    """
    if not parts:
        raise ResultError("no results to merge")
    first = parts[0]
    for part in parts:
        if (part.suite, part.slo, part.machine) != (first.suite, first.slo, first.machine):
            raise ResultError(f"{part.name} of {part.date} is of another suite or machine")
    runs = {
        (run.kind, run.target, run.scenario, run.rate_rps, run.seed): run
        for part in parts
        for run in part.runs
    }
    return msgspec.structs.replace(
        first,
        date=min(part.date for part in parts),
        runs=list(runs.values()),
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        is_trimmed=any(part.is_trimmed for part in parts),
    )


def trimmed(result: LoadResult, *, num_groups: int = 6) -> LoadResult:
    """The same, small: of each run's adapters and tenants the most and the least popular.

    Virtual runs keep none: they are there for lines and tables. Those with seeds that were not run
    for real are there for the order alone.
    """
    seeds = {run.seed for run in result.of_kind("real")}
    return msgspec.structs.replace(
        result,
        runs=[
            _trimmed(run, num_groups if run.kind == "real" else 0, is_drawn=run.seed in seeds)
            for run in result.runs
        ],
        is_trimmed=True,
    )


def _trimmed(run: RunResult, num_groups: int, *, is_drawn: bool) -> RunResult:
    summary = msgspec.structs.replace(
        run.summary,
        by_adapter=_ends(run.summary.by_adapter, num_groups),
        by_tenant=_ends(run.summary.by_tenant, num_groups),
        ttft_quantiles_s=run.summary.ttft_quantiles_s if is_drawn else (),
    )
    return msgspec.structs.replace(run, summary=summary)


def _ends(groups: Mapping[str, GroupSummary], num: int) -> dict[str, GroupSummary]:
    """The first and the last `num`."""
    names = list(groups)
    kept = names if len(names) <= 2 * num else names[:num] + names[len(names) - num :]
    return {name: groups[name] for name in kept}


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
    heads = [title, *(policy_of(target) for target in targets), "order as predicted"]
    rows = [_row(runs, targets, figure) for figure in FIGURES.values()]
    line = ["---"] + ["--:"] * len(targets) + ["---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, line, *rows))


def _row(runs: Sequence[RunResult], targets: Sequence[str], figure: Figure) -> list[str]:
    pairs = [figure.shown(runs, target) for target in targets]
    cells = [f"{real} ({virtual})" if virtual else real for real, virtual in pairs]
    return [figure.name, *cells, agreement(runs, figure).words]


def main() -> None:
    """Publish the results named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--note", default=None, help="instead of the results' own")
    options = parser.parse_args()
    result = trimmed(merged([load(path) for path in options.results]))
    if options.note is not None:
        result = msgspec.structs.replace(result, note=options.note)
    path = ROOT / "loadtest" / "results" / f"{options.name}.json"
    save(result, path)
    plots = save_plots(result, ROOT / "docs" / "loadtest")
    print(markdown(result))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB; {len(plots)} plots")
