"""The command `extproc lab`: the laboratory at the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.commands.calibrate import calibrate_command
from extproc.commands.failure import FAILED, failure
from extproc.commands.hints import own_command
from extproc.commands.labmisses import load_test_tables, misses, overload
from extproc.commands.labrun import (
    DEFAULT_OUT,
    OnTrial,
    Watching,
    newest,
    read_json,
    read_result,
    result_path,
    run,
    tune,
)
from extproc.loadtest.results import FORMAT as LOADTEST_FORMAT
from extproc.loadtest.results import load
from extproc.plugins import PolicyError
from extproc.sim.opponents import TUNABLE
from extproc.sim.trials.aim import aim_tables
from extproc.sim.trials.report import render
from extproc.sim.trials.suites import SuiteError
from extproc.sim.trials.summary import speed
from extproc.sim.trials.table import markdown, sweeps
from extproc.sim.trials.trials import Trial

lab_app = typer.Typer(
    name="lab",
    help="Compare policies in virtual time (docs/lab.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_TABLE_CHARS = 200
"""Most columns of the terminal for a table: one that is too wide is not cut."""
_LINE_INTERVAL_S = 10.0
"""Between two lines about the progress where there is no terminal."""

JobsOption = Annotated[int, typer.Option(min=0, help="Processes to run it in; 0 for one per core.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the results.")]
FileOption = Annotated[Path, typer.Option(help="Folder of the results, or their .json file.")]
ResultArgument = Annotated[
    Path | None, typer.Argument(help="JSON file of a run; the newest one by default.")
]


@lab_app.command("run")
def run_command(
    suite: Annotated[
        str, typer.Argument(help="Suite to run: quick, development, evaluation, or a file.")
    ],
    policy: Annotated[
        str, typer.Option(help="A policy of your own to add to the suite: module:attribute.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this policy alone, without bounds and sweeps; may be repeated."),
    ] = None,
    jobs: JobsOption = 0,
    fresh: Annotated[
        bool, typer.Option(help="Ignore the kept results of earlier runs of the same code.")
    ] = False,
    out: FileOption = DEFAULT_OUT,
) -> None:
    """Run a suite and write its results as JSON; an interrupted run continues where it stopped."""
    console = Console()
    try:
        result = run(
            suite,
            policy=policy or None,
            only=only or (),
            jobs=jobs,
            fresh=fresh,
            out=out,
            watching=_progress(console),
        )
    except (SuiteError, PolicyError, OSError) as error:
        raise failure(error, FAILED) from error
    _print(result, console)
    console.print(speed(result["timing"]))
    written = result_path(out, result["suite"].name)
    console.print(f"[bold]{written}[/]: next, `{own_command()} lab report`")


@lab_app.command("report")
def report_command(
    result: ResultArgument = None,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Write a run's results as one HTML page."""
    try:
        page = report(result, out=out)
    except (OSError, ValueError) as error:
        raise failure(error, FAILED) from error
    Console().print(f"[bold]{page}[/]")


lab_app.command("calibrate")(calibrate_command)


@lab_app.command("table")
def table_command(
    result: ResultArgument = None,
    out: OutOption = DEFAULT_OUT,
    aim: Annotated[
        str, typer.Option(help="A policy: how near it is to B3, and to every opponent.")
    ] = "",
    swept: Annotated[
        bool, typer.Option("--sweeps", help="What the suite's sweeps found instead.")
    ] = False,
) -> None:
    """Print a run's capacities as Markdown; of a load test, what is served well and to whom."""
    try:
        text = _table(result or newest(out), aim, sweeps if swept else markdown)
    except (OSError, ValueError) as error:
        raise failure(error, FAILED) from error
    typer.echo(text)


@lab_app.command("tune")
def tune_command(
    suite: Annotated[
        str, typer.Argument(help="Suite to tune on; never the evaluation suite.")
    ] = "development",
    policy: Annotated[
        list[str] | None, typer.Option(help="Tune this policy only; may be repeated.")
    ] = None,
    jobs: JobsOption = 0,
) -> None:
    """Search the parameters of every opponent with the same budget, and print the best ones."""
    console = Console()
    try:
        best = tune(suite, policies=policy or list(TUNABLE), jobs=jobs, watching=_progress(console))
    except (SuiteError, OSError, KeyError) as error:
        raise failure(error, FAILED) from error
    for label, capacity_rps in best.values():
        console.print(f"{label}: {capacity_rps:.2f} req/s", markup=False)


@lab_app.command("misses")
def misses_command(
    suite: Annotated[str, typer.Argument(help="Suite that has the scenarios.")],
    places: Annotated[
        list[str], typer.Argument(help="Scenarios with their rates in requests/s: zipf@68.")
    ],
    policy: Annotated[
        list[str],
        typer.Option(help="Policy, bound or variant's label; the others are compared to the first"),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from the suite's first.")] = 6,
    requests: Annotated[int, typer.Option(min=20, help="Requests of a run.")] = 1200,
    fleet: Annotated[
        list[str] | None, typer.Option(help="Setting of every fleet: num_routers=1.")
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Cost of the engine: disk_load_s=0.4.")
    ] = None,
    jobs: JobsOption = 0,
) -> None:
    """Print what policies do not serve well at fixed rates, in %, compared seed by seed."""
    try:
        table = misses(
            suite,
            places,
            policy,
            num_seeds=seeds,
            num_requests=requests,
            fleet=_values(fleet or ()),
            profile=_values(profile or ()),
            jobs=jobs,
            watching=_progress(Console(stderr=True)),
        )
    except (SuiteError, OSError, ValueError) as error:
        raise failure(error, FAILED) from error
    typer.echo(table)


@lab_app.command("overload")
def overload_command(
    suite: Annotated[str, typer.Argument(help="Suite to run: overload, tenants, or a file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy or variant's label; all of the suite's by default."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many of the suite's seeds.")] = 100,
    fleet: Annotated[
        list[str] | None, typer.Option(help="Setting of every fleet: num_routers=1.")
    ] = None,
    jobs: JobsOption = 0,
) -> None:
    """Print what is served well beyond capacity, and what tenants get beside each other."""
    try:
        tables = overload(
            suite,
            policy or (),
            num_seeds=seeds,
            fleet=_values(fleet or ()),
            jobs=jobs,
            watching=_progress(Console(stderr=True)),
        )
    except (SuiteError, OSError, ValueError) as error:
        raise failure(error, FAILED) from error
    typer.echo(tables)


def _values(pairs: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` pairs, whose values are JSON.

    Raises:
        ValueError: One is not such a pair.
    """
    values = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            values[key] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"{pair}: not key=value, as num_routers=1") from error
    return values


def report(result: Path | None = None, *, out: Path = DEFAULT_OUT) -> Path:
    """Write the HTML page of a result beside its JSON file, and return its path.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: There is no result, or the file is not one.
    """
    result = result or newest(out)
    if _is_load_test(result):
        raise ValueError(f"{result} is a load test's: `{own_command()} lab table {result}`")
    page = result.with_suffix(".html")
    page.write_text(render(read_result(result)), encoding="utf-8")
    return page


def _table(path: Path, aim: str, table: Callable[[dict[str, Any]], str]) -> str:
    if _is_load_test(path):
        return load_test_tables(load(path))
    content = read_result(path)
    return aim_tables(content, aim) if aim else table(content)


def _is_load_test(path: Path) -> bool:
    content = read_json(path)
    return isinstance(content, dict) and content.get("format") == LOADTEST_FORMAT


def _progress(console: Console) -> Watching:
    """Return a progress bar that names the last trial; without a terminal, a line now and then."""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )

    @contextmanager
    def logging(num_trials: int, num_known: int) -> Iterator[OnTrial]:
        started_s = said_s = perf_counter()
        num_done = num_known

        def advance(_trial: Trial) -> None:
            nonlocal num_done, said_s
            num_done, now = num_done + 1, perf_counter()
            if now - said_s >= _LINE_INTERVAL_S:
                said_s = now
                typer.echo(f"{num_done} of {num_trials} trials, {now - started_s:.0f} s", err=True)

        typer.echo(f"{num_trials} trials, of which {num_known} are known", err=True)
        yield advance

    @contextmanager
    def watching(num_trials: int, num_known: int) -> Iterator[OnTrial]:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting", total=num_trials, completed=num_known)

            def advance(trial: Trial) -> None:
                what = f"{trial.sweep or trial.scenario.name}: {trial.label or trial.policy}"
                progress.update(task, advance=1, description=what)

            yield advance

    return watching if console.is_terminal else logging


def _print(result: dict[str, Any], console: Console) -> None:
    for name, summary in result["summary"].items():
        at_rate = f"the last three at {summary['main_rate_rps']:g} req/s"
        title = f"{name}: SLO capacity and its worst adapter; {at_rate}"
        table = Table(title=title, padding=(0, 0, 0, 1), box=SIMPLE_HEAD)
        table.add_column("policy", no_wrap=True, min_width=24)
        for head in ("req/s", "95 %", "worst", "of B3", "ok", "p99 s", "loads"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in summary["rows"]:
            capacity, measures = row["capacity_rps"], row["measures"]
            low, informed = capacity["low"], row["over_informed"]
            table.add_row(
                row["policy"],
                f"{capacity['mean']:.1f}",
                "" if low is None else f"{max(0.0, low):.1f}-{capacity['high']:.1f}",
                f"{row['worst_adapter']['mean']:.0%}",
                "" if informed is None else f"{informed['mean']:.0%}",
                f"{measures['attainment']:.1%}",
                f"{measures['ttft_p99_s']:.2f}",
                f"{measures['loads_per_1000']:.0f}",
                style="dim" if row["is_bound"] else "",
            )
        console.print(table, width=_TABLE_CHARS, crop=False)
