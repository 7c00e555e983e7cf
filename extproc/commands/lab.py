"""The commands `extproc lab run` and `extproc lab report`: the laboratory at the terminal.

Here is what the laboratory itself must not know: files, processes, the real clock, and rules found
by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
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
from extproc.commands.labcache import TrialCache
from extproc.core.policies import Policy
from extproc.plugins import PolicyError, load_policy
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.opponents import TUNABLE, opponent
from extproc.sim.trials.report import render
from extproc.sim.trials.suites import Suite, SuiteError, read_suite, varied
from extproc.sim.trials.summary import FORMAT, summarize
from extproc.sim.trials.table import markdown
from extproc.sim.trials.trials import Trial, TrialResult, run_trial
from extproc.sim.trials.tuning import best_settings, settings_of

DEFAULT_OUT = Path("loadtest/out")
PAGES: dict[str, Callable[[Path], str]] = {}
"""What makes a page of a result's file that is not the laboratory's own, by the file's format."""

lab_app = typer.Typer(
    name="lab",
    help="Judge routing rules in virtual time (docs/lab.md).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

OutOption = Annotated[Path, typer.Option(help="Folder for results.")]
ResultArgument = Annotated[
    Path | None, typer.Argument(help="JSON of a run; the newest by default.")
]


@lab_app.command("run")
def run_command(
    suite: Annotated[str, typer.Argument(help="quick, development, evaluation, or a file.")],
    policy: Annotated[str, typer.Option(help="A rule of yours: module:attribute.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.")] = 0,
    fresh: Annotated[bool, typer.Option(help="Run again what this code has run before.")] = False,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Run a suite and keep what came out as JSON; an interrupted run goes on where it was."""
    console = Console()
    try:
        result = run(suite, policy=policy or None, jobs=jobs, fresh=fresh, out=out, console=console)
    except (SuiteError, PolicyError, OSError) as error:
        raise _failed(error) from error
    _print(result, console)
    console.print(f"[bold]{out / (result['suite'].name + '.json')}[/]: now `extproc lab report`")


@lab_app.command("report")
def report_command(
    result: ResultArgument = None,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Make one HTML page of a run's JSON."""
    try:
        page = report(result, out=out)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise _failed(error) from error
    Console().print(f"[bold]{page}[/]")


lab_app.command("calibrate")(calibrate_command)


@lab_app.command("table")
def table_command(
    result: ResultArgument = None,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Print a run's capacities as a Markdown table."""
    try:
        content = read_result(result or _newest(out))
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise _failed(error) from error
    typer.echo(markdown(content))


@lab_app.command("tune")
def tune_command(
    suite: Annotated[str, typer.Argument(help="Never the evaluation suite.")] = "development",
    rule: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.")] = 0,
) -> None:
    """Search every opponent's parameters with the same budget, and print the best settings."""
    console = Console()
    try:
        best = tune(suite, rules=rule or list(TUNABLE), jobs=jobs, console=console)
    except (SuiteError, OSError, KeyError) as error:
        raise _failed(error) from error
    for label, capacity_rps in best.values():
        console.print(f"{label}: {capacity_rps:.2f} req/s", markup=False)


def tune(
    name: str, *, rules: Sequence[str], jobs: int = 0, console: Console | None = None
) -> dict[str, tuple[str, float]]:
    """The best settings of each rule on a suite, and their mean capacity, requests per second.

    Raises:
        SuiteError: The suite cannot be used, or it is the one that nothing may be tuned on.
        KeyError: A rule has nothing to tune.
    """
    suite = read_suite(name)
    if suite.name == "evaluation":
        raise SuiteError("the evaluation suite is not for tuning")
    labels = [label for rule in rules for label in settings_of(rule)]
    suite = msgspec.structs.replace(suite, rules=labels, bounds=[], sweeps=[])
    shown = console or Console(quiet=True)
    return best_settings(_run_all(plan(suite), jobs or os.cpu_count() or 1, shown))


def run(
    name: str,
    *,
    policy: str | None = None,
    jobs: int = 0,
    fresh: bool = False,
    out: Path = DEFAULT_OUT,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the suite called `name`, with a rule of the user's own if there is one.

    Args:
        name: A suite in `loadtest/scenarios/`, or a path.
        policy: As in the configuration file's `policy.name`.
        jobs: Processes; 0 for one per core. The result does not depend on it.
        fresh: Do not take results of an earlier run of this very code.
        out: Where `<suite>.json` is written, and `<suite>.trials.jsonl` while it runs.
        console: Where progress is shown; None for nowhere.

    Returns:
        What was written.

    Raises:
        SuiteError: The suite cannot be used.
        PolicyError: The rule cannot be had.
        OSError: A file cannot be read or written.
    """
    suite = read_suite(name)
    if policy is not None:
        sys.path.insert(0, os.getcwd())  # a rule of one's own lies beside one
        load_policy(policy, {})
        suite = msgspec.structs.replace(suite, rules=[policy, *suite.rules])
    trials = plan(suite)
    kept = out / f"{suite.name}.trials.jsonl"
    if fresh:
        kept.unlink(missing_ok=True)
    shown = console or Console(quiet=True)
    results = _run_all(trials, jobs or os.cpu_count() or 1, shown, TrialCache(kept))
    result = {**summarize(suite, results), "provenance": PROFILES[suite.profile].provenance}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{suite.name}.json").write_bytes(msgspec.json.encode(result))
    return result


def report(result: Path | None = None, *, out: Path = DEFAULT_OUT) -> Path:
    """Write the HTML page of a result's JSON beside it, and answer its path.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: There is no run, or the file is not one.
    """
    result = result or _newest(out)
    page = result.with_suffix(".html")
    content = msgspec.json.decode(result.read_bytes())
    kind = str(content.get("format")) if isinstance(content, dict) else ""
    make_page = PAGES.get(kind)
    text = make_page(result) if make_page else render(read_result(result))
    page.write_text(text, encoding="utf-8")
    return page


def read_result(path: Path) -> dict[str, Any]:
    """What `run` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is something else.
    """
    content = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of this version's `extproc lab run`")
    return content


def _newest(out: Path) -> Path:
    found = sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"no results in {out}: first `extproc lab run quick`")
    return found[-1]


def plan(suite: Suite) -> list[Trial]:
    """Every trial of a suite, in a fixed order: bounds first, they take longest."""
    trials = [
        Trial(
            suite,
            scenario,
            rule,
            tuple(suite.seeds),
            tuple(suite.rates_of(scenario)),
            keeps_placement=rule in suite.rules[:4],
        )
        for scenario in suite.scenarios
        for rule in [*suite.bounds, *suite.rules]
    ]
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    for sweep in suite.sweeps:
        trials += [
            Trial(
                suite,
                varied(scenarios[sweep.scenario], sweep, value),
                rule,
                tuple(suite.seeds[: sweep.num_seeds]),
                (sweep.rate_rps,),
                sweep=sweep.name,
                value=value,
            )
            for value in sweep.values
            for rule in sweep.rules
        ]
    return trials


def make_policy(name: str) -> Callable[[], Policy]:
    """What makes the rule called `name`, once for each router."""
    return opponent(name) or (lambda: load_policy(name, {}))


def _run_one(trial: Trial) -> list[TrialResult]:
    return run_trial(trial, make_policy, perf_counter)


def _run_all(
    trials: list[Trial], jobs: int, console: Console, cache: TrialCache | None = None
) -> list[TrialResult]:
    """Results in the order of the trials; those that the cache has are not run."""
    done = {n: known for n, trial in enumerate(trials) if cache and (known := cache.get(trial))}
    rest = [n for n in range(len(trials)) if n not in done]
    with _progress(console, len(trials), len(done)) as advance:
        for number, results in _as_completed(trials, rest, jobs):
            done[number] = results
            if cache:
                cache.add(trials[number], results)
            advance(trials[number])
    return [result for number in range(len(trials)) for result in done[number]]


def _as_completed(
    trials: list[Trial], numbers: list[int], jobs: int
) -> Iterator[tuple[int, list[TrialResult]]]:
    if jobs == 1:
        yield from ((number, _run_one(trials[number])) for number in numbers)
        return
    # Spawned, not forked: the progress bar has threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[list[TrialResult]], int] = {
            pool.submit(_run_one, trials[number]): number for number in numbers
        }
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()


@contextmanager
def _progress(console: Console, total: int, num_done: int) -> Iterator[Callable[[Trial], None]]:
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=total, completed=num_done)

        def advance(trial: Trial) -> None:
            what = f"{trial.sweep or trial.scenario.name}: {trial.rule}"
            progress.update(task, advance=1, description=what)

        yield advance


def _print(result: dict[str, Any], console: Console) -> None:
    for name, summary in result["summary"].items():
        title = f"{name}: SLO capacity; the last three at {summary['main_rate_rps']:g} req/s"
        table = Table(title=title, padding=(0, 0, 0, 1), box=SIMPLE_HEAD)
        table.add_column("rule", no_wrap=True, min_width=24)
        for head in ("req/s", "95 %", "ratio", "of B3", "ok", "p99 s", "loads"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in summary["rows"]:
            capacity, measures = row["capacity_rps"], row["measures"]
            low, informed = capacity["low"], row["over_informed"]
            table.add_row(
                row["rule"],
                f"{capacity['mean']:.1f}",
                "" if low is None else f"{max(0.0, low):.1f}-{capacity['high']:.1f}",
                f"{row['over_baseline']['mean']:.2f}",
                "" if informed is None else f"{informed['mean']:.0%}",
                f"{measures['attainment']:.1%}",
                f"{measures['ttft_p99_s']:.2f}",
                f"{measures['loads_per_1000']:.0f}",
                style="dim" if row["is_bound"] else "",
            )
        console.print(table)


def _failed(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"extproc: {error}", style="red", markup=False)
    return typer.Exit(1)
