"""The terminal output of a load test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, combinations
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.lab.loadtest.compare import Round, Watch, counted, mean_of, ratio_of
from extproc.lab.loadtest.results import FIGURES, Figure, RunResult
from extproc.lab.loadtest.runs import BlockRun, added_words
from extproc.lab.workload.intervals import Interval

MAX_ADDED_S = 0.03
"""Three times the sum of gateway, network and client on a quiet machine."""
_STAGE_WIDTH = 44
_AROUND = 3
"""Characters that a column has beside its text."""


@contextmanager
def watching(console: Console, num_runs: int) -> Iterator[Watch]:
    """Show a progress bar, and a line for each run."""
    columns = (
        TextColumn(f"{{task.description:<{_STAGE_WIDTH}}}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_runs)

        def on_stage(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal and text.startswith("starting"):
                console.print(text, markup=False)

        def on_run(run: BlockRun) -> None:
            progress.update(task, advance=1)
            style = "red" if run.trouble else ""
            console.print(line_of(run), style=style, markup=False, highlight=False, soft_wrap=True)

        yield Watch(on_stage, on_run)


def line_of(run: BlockRun) -> str:
    """Return a run as one line."""
    if run.result is None:
        return f"{run.block.name}: {run.trouble}"
    metrics, errors = run.result.metrics, run.result.error_words
    line = (
        f"{run.block.name}: {run.label}: served well {metrics.attainment:.1%}, "
        f"TTFT {1e3 * metrics.ttft_mean_s:.0f} ms (p99 {1e3 * metrics.ttft_p99_s:.0f} ms)"
    )
    line += f", {errors}" if errors else ""
    if run.added_s is not None and run.added_s > MAX_ADDED_S:
        line += f"; {added_words(run.added_s)}"
    return line + (f"; DOES NOT COUNT: {run.trouble}" if run.trouble else "")


def print_comparison(
    console: Console,
    labels: Sequence[str],
    rounds: Sequence[Round],
    twins: Sequence[RunResult] = (),
) -> None:
    """Print each target's figures, the ratios of every two, and the runs that do not count.

    Figures of `twins` are in brackets: of the same requests in virtual time.
    """
    for table in _figures_tables(labels, rounds, twins, console.width):
        console.print(table)
    if len(labels) > 1:
        for table in _ratios_tables(labels, rounds, console.width):
            console.print(table)
        console.print(
            "Ratios are geometric means over the blocks that both got, with their 95 % interval; "
            "* marks those that are surely not 1.",
            highlight=False,
        )
    for text in remarks(labels, rounds):
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _figures_tables(
    labels: Sequence[str], rounds: Sequence[Round], twins: Sequence[RunResult], width: int
) -> Iterator[Table]:
    num = len(counted(rounds))
    title = f"Means over {num} block{'' if num == 1 else 's'}"
    title += ", in brackets of the same requests in virtual time" if twins else ""
    heads = [*(figure.head for figure in FIGURES.values()), "added to TTFT, ms"]
    columns = [(label, [*_own_cells(label, rounds, twins)]) for label in labels]
    return _tables(title, [*heads, "requests", "failed"], columns, width)


def _own_cells(label: str, rounds: Sequence[Round], twins: Sequence[RunResult]) -> Iterator[str]:
    """Yield a target's cells of the table of figures."""
    for figure in FIGURES.values():
        yield _figure_cell(figure, label, rounds, twins)
    added_s = _added_s(rounds, label)
    yield "-" if added_s is None else f"{1e3 * added_s:.1f}"
    results = [run.result for run in _runs(rounds, label) if run.result]
    yield str(sum(run.metrics.num_offered for run in results))
    yield str(sum(run.num_errors for run in results))


def _tables(
    title: str | None,
    heads: Sequence[str],
    columns: Sequence[tuple[str, Sequence[str]]],
    width: int,
) -> Iterator[Table]:
    """Yield columns, each a name and its cells, in as many tables as leave all of them readable.

    Each table has the rows' heads; the first has the title.
    """
    room = width - 1 - _AROUND - max(map(len, heads))
    while columns:
        widths = (max(map(len, [*name.splitlines(), *cells])) for name, cells in columns)
        num = sum(end <= room for end in accumulate(_AROUND + each for each in widths)) or 1
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("")
        for name, _ in columns[:num]:
            table.add_column(name, justify="right")
        for row in zip(heads, *(cells for _, cells in columns[:num]), strict=True):
            table.add_row(*row)
        yield table
        title, columns = None, columns[num:]


def _figure_cell(
    figure: Figure, label: str, rounds: Sequence[Round], twins: Sequence[RunResult]
) -> str:
    mean = mean_of(rounds, label, figure)
    virtual = [
        value for run in twins if run.policy == label if (value := figure.of(run)) is not None
    ]
    cell = "-" if mean is None else f"{mean.mean * figure.factor:.1f}"
    return f"{cell} ({fmean(virtual) * figure.factor:.1f})" if virtual else cell


def _ratios_tables(labels: Sequence[str], rounds: Sequence[Round], width: int) -> Iterator[Table]:
    columns = []
    for label, other in combinations(labels, 2):
        ratios = (ratio_of(rounds, label, other, figure) for figure in FIGURES.values())
        columns.append((f"{label}\n/ {other}", [*map(ratio_words, ratios)]))
    return _tables("Paired ratios", [*map(short_head, FIGURES.values())], columns, width)


def ratio_words(ratio: Interval | None) -> str:
    """Return a ratio and its interval as text."""
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}"
    is_sure = not ratio.low <= 1 <= ratio.high
    return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){' *' if is_sure else '  '}"


def short_head(figure: Figure) -> str:
    """Return a figure's name without its unit."""
    return figure.head.partition(", ")[0].removeprefix("adapter ")


def remarks(labels: Sequence[str], rounds: Sequence[Round]) -> list[str]:
    """Return the runs that do not count and the targets that were slowed down, with reasons."""
    found = [
        f"{'gone since' if run.is_gone else 'not counted:'} {run.block.name}: {run.trouble}"
        for round_ in rounds
        for run in round_
        if run.trouble
    ]
    for label in labels:
        added_s = _added_s(rounds, label)
        if not _runs(rounds, label):
            found.append(f"{label}: nothing was measured")
        elif added_s is not None and added_s > MAX_ADDED_S:
            found.append(f"{label}: {added_words(added_s)}: held requests, or a busy machine")
    return found


def _runs(rounds: Sequence[Round], label: str) -> list[BlockRun]:
    return [run for round_ in counted(rounds) for run in round_ if run.label == label]


def _added_s(rounds: Sequence[Round], label: str) -> float | None:
    added_s = [run.added_s for run in _runs(rounds, label) if run.added_s is not None]
    return fmean(added_s) if added_s else None
