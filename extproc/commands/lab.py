"""The command `extproc lab`: the laboratory at the terminal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated

import aiohttp
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from extproc.commands.failure import FAILED, PASSED_ON, failing, failure, http_url
from extproc.commands.hints import own_command
from extproc.commands.labrecord import record
from extproc.commands.labrun import DEFAULT_OUT, newest, read_json, read_result, result_path, run
from extproc.commands.labwhatif import whatif
from extproc.commands.panels import Commands
from extproc.errors import ExtprocError
from extproc.files.refusals import tls_failure
from extproc.files.tls import SYSTEM_TRUST
from extproc.lab.calibration.calibrate import calibrate
from extproc.lab.engine.profiles import PROFILES, as_yaml
from extproc.lab.loadtest.results import FORMAT as LOADTEST_FORMAT
from extproc.lab.loadtest.results import LoadResult, load
from extproc.lab.trials.report import render
from extproc.lab.trials.runplan import read_values
from extproc.lab.trials.suites import PlanError
from extproc.lab.trials.summary import FIXED, speed
from extproc.lab.trials.table import places, ratios, tables
from extproc.plugins import PolicyError

lab_app = Commands(
    name="lab",
    help="Judge policies and size a fleet, in virtual time or with real requests (docs/lab.md).",
    add_completion=False,
)

_SHOWN = (
    *("place", "policy", "tenant", "misses, %"),
    *("served well, req/s", "p99 of the median adapter, s"),
)
_NUM_SHOWN = 5
"""Columns of other tables: the last, and the first of the others."""
_LINE_INTERVAL_S = 10.0
"""Between two lines about the progress."""


@lab_app.command("run")
def run_command(
    suite: Annotated[
        str, typer.Argument(help="Suite to run: quick, development, evaluation, or a file.")
    ],
    at: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO@RATE",
            help="Run at these rates in requests/s, as zipf@68, instead of searching capacities.",
        ),
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Run at all the suite's rates instead of a search.")
    ] = False,
    policy: Annotated[
        str, typer.Option(help="A policy of your own to add to the suite: module:attribute.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this policy, bound or variant alone, without sweeps; may be repeated: the "
            "rest are compared with the first."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, from the suite's first.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=20, help="Requests of a run.")] = None,
    fleet: Annotated[
        list[str] | None, typer.Option(help="Setting of every fleet, such as `num_routers=1`.")
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Cost of the engine, such as `disk_load_s=0.4`.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 for one per core.")] = 0,
    fresh: Annotated[
        bool, typer.Option(help="Ignore the kept results of earlier runs of the same code.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of the results, or their .json file.")
    ] = DEFAULT_OUT,
) -> None:
    """Run a suite, print its tables, and write its results as JSON.

    An interrupted run continues where it stopped.
    """
    # A Ctrl-C ends the process as a kill would, and its workers with it: what is done is kept, and
    # a KeyboardInterrupt that came while the pool's locks are taken would leave them taken.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        result = run(
            suite,
            at or (),
            fixed=fixed,
            policy=policy or None,
            only=only or (),
            num_seeds=seeds,
            num_requests=requests,
            fleet=read_values(fleet or ()),
            profile=read_values(profile or ()),
            jobs=jobs,
            fresh=fresh,
            out=out,
            on_trial=Progress(),
        )
    except (PlanError, PolicyError, OSError, ValueError) as error:
        raise failure(error, FAILED) from error
    finally:
        signal.signal(signal.SIGINT, before)
    path, text = result_path(out, result["suite"]["name"]), tables(result)
    path.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    print_tables(Console(), text)
    typer.echo(f"{speed(result['timing'])}\nresults: {path}")
    typer.echo(f"tables with all columns: {path.with_suffix('.md')}")
    if result["summary"]:
        typer.echo(f"next: `{own_command()} lab report --html`")


@lab_app.command("report")
def report_command(
    result: Annotated[
        Path | None, typer.Argument(help="JSON file of a run; the newest one by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = DEFAULT_OUT,
    over: Annotated[str, typer.Option(help="Print the capacities relative to this policy's.")] = "",
    html: Annotated[
        bool, typer.Option("--html", help="Also write the capacities and their charts as a page.")
    ] = False,
) -> None:
    """Print the tables of a run, or of a load test beside its virtual twin."""
    with failing(OSError, ValueError, status=FAILED):
        path = result or newest(out)
        print_tables(Console(), _tables(path, over))
        if html:
            typer.echo(report(path))


@lab_app.command("calibrate")
def calibrate_command(
    url: Annotated[
        str,
        typer.Argument(
            callback=http_url, help="Base URL of a vLLM server that nobody else is using."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml"),
    adapters: Annotated[
        str,
        typer.Option(help="Adapters to measure with, separated by commas; by default all listed."),
    ] = "",
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="The server's --max-cpu-loras, which it does not report.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=2, help="Largest number of requests sent at once.")
    ] = 32,
    profile: Annotated[
        str, typer.Option(help="Profile that supplies what cannot be measured.")
    ] = "h100-8b",
    api_key: Annotated[
        str, typer.Option(envvar="VLLM_API_KEY", help="API key, if the server requires one.")
    ] = "",
) -> None:
    """Measure a running vLLM server, and write the profile of an engine that takes as long."""
    if profile not in PROFILES:
        raise failure(f"--profile {profile}: allowed: {', '.join(PROFILES)}")
    try:
        measured = asyncio.run(
            calibrate(
                url,
                PROFILES[profile],
                adapters=[name for name in adapters.split(",") if name],
                max_requests=max_requests,
                max_cpu_loras=max_cpu_loras,
                api_key=api_key,
                report=typer.echo,
            )
        )
        text = f"# extproc lab calibrate {url}\n{as_yaml(measured)}"
        typer.echo(text)
        out.write_text(text, encoding="utf-8")
    except (ExtprocError, ValueError, OSError, aiohttp.ClientError) as error:
        said = tls_failure(error, trust=SYSTEM_TRUST) or str(error) or type(error).__name__
        raise failure(said, FAILED) from error


lab_app.command("record")(record)
lab_app.command("whatif")(whatif)


@lab_app.command("loadtest", context_settings=PASSED_ON)
def loadtest_command(context: typer.Context) -> None:
    """Send real requests to fake or real pods (docs/loadtest.md): `run` a suite, or `compare`."""
    from extproc.commands.loadtest import loadtest_app

    loadtest_app(context.args or ["--help"], prog_name="extproc lab loadtest")


class Progress:
    """A line about the progress: at once, and then now and then."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._started_s = clock, clock()
        self._said_s = -_LINE_INTERVAL_S
        self._num_kept: int | None = None

    def __call__(self, num_done: int, num: int) -> None:
        """Take note of how many trials are done."""
        now = self._clock()
        if self._num_kept is None:
            self._num_kept = num_done  # of an earlier run
        if now - self._said_s >= _LINE_INTERVAL_S:
            self._said_s = now
            took_s, num_run = now - self._started_s, num_done - self._num_kept
            left = f", about {took_s / num_run * (num - num_done):.0f} s left" if num_run else ""
            typer.echo(f"{num_done} of {num} trials, {took_s:.0f} s{left}", err=True)


def print_tables(console: Console, text: str) -> None:
    """Print tables: in a terminal with the columns that matter most, elsewhere as the Markdown
    that they are.
    """
    if not console.is_terminal:
        typer.echo(text)
        return
    for markdown in text.split("\n\n"):
        heads, _, *rows = (each[2:-2].split(" | ") for each in markdown.split("\n"))
        shown = [at for at, head in enumerate(heads) if head in _SHOWN]
        if len(shown) == 1:
            shown = [*range(len(heads) - 1)][: _NUM_SHOWN - 1] + [len(heads) - 1]
        table = Table(box=SIMPLE_HEAD)
        for at in shown:
            table.add_column(heads[at], justify="left" if at < 2 else "right")
        for row in rows:
            table.add_row(*(row[at] for at in shown))
        console.print(table)


def report(path: Path) -> Path:
    """Write the HTML page of a suite's result beside its JSON file, and return its path.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The file is not such a result, or has no capacities.
    """
    page = path.with_suffix(".html")
    page.write_text(render(read_result(path)), encoding="utf-8")
    return page


def _tables(path: Path, over: str) -> str:
    content = read_json(path)
    if isinstance(content, dict) and content.get("format") == LOADTEST_FORMAT:
        return load_test_tables(load(path))
    result = read_result(path)
    return ratios(result, over) if over else tables(result)


def load_test_tables(result: LoadResult) -> str:
    """Return the runs of a load test by place, with their virtual twins' figures in brackets.

    Raises:
        ValueError: It has no suite.
    """
    if result.suite is None:
        raise ValueError(f"{result.name}: a load test without a suite")
    names = "scenario", "policy", "seed", "rate_rps"
    real, virtual = (
        {
            "suite": {"baseline": result.suite.baseline},
            "summary": {},
            "trials": [
                {"sweep": FIXED, "value": run.rate_rps, "runs": [measures], **measures}
                for run in result.runs
                if run.kind == kind
                for measures in [asdict(run.metrics) | {name: getattr(run, name) for name in names}]
            ],
        }
        for kind in ("real", "virtual")
    )
    return places(real, virtual)
