"""The command `extproc lab loadtest` (docs/loadtest.md).

Exit status: 0 for success, 1 for a failure, 2 for invalid arguments, 3 if the machine was too busy
to measure, and 128 + N after signal N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
import uvloop
from msgspec.structs import replace
from rich.console import Console

from extproc.commands.failure import FAILED, failing
from extproc.commands.panels import Commands
from extproc.lab.loadtest.compare import Round, counted, fitted, run_rounds
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.loads import (
    Block,
    is_suite,
    overridden,
    plan_suite,
    sliced,
    workload_block,
)
from extproc.lab.loadtest.results import LoadResult, describe_machine, save
from extproc.lab.loadtest.runs import twins_of
from extproc.lab.loadtest.screen import print_comparison, remarks, watching
from extproc.lab.loadtest.targets import TargetSpec, parse_targets, suite_targets
from extproc.lab.loadtest.workloads import NAMED
from extproc.lab.trials.runplan import read_values, with_alone
from extproc.lab.trials.suites import PlanError, read_suite, scenarios_of
from extproc.stack.processes import SignalledError, until_signalled

DEFAULT_OUT = Path("loadtest/out/real")
NOT_MEASURED = 3
"""Exit status: the machine was too busy."""

loadtest_app = Commands(
    name="loadtest",
    help="Load tests with real requests (docs/loadtest.md).",
    add_completion=False,
)

RatesOption = Annotated[
    list[float] | None, typer.Option("--rate", help="Requests per second; may be repeated.")
]
SeedsOption = Annotated[
    list[int] | None, typer.Option("--seed", help="Seed of the workload; may be repeated.")
]
ScenariosOption = Annotated[
    list[str] | None, typer.Option("--scenario", help="Run this scenario only; may be repeated.")
]


@loadtest_app.command("run")
def run_command(
    suite: Annotated[
        str, typer.Argument(help="Suite to run: a name in loadtest/scenarios, or a file.")
    ],
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Policy or variant's label to run, not all the suite's; may be repeated.",
        ),
    ] = None,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    scenarios: ScenariosOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = DEFAULT_OUT,
) -> None:
    """Run a whole suite with real requests and in virtual time; print and write the results."""
    with failing(PlanError, TargetError):
        found = with_alone(read_suite(suite))
        specs = suite_targets(found, policies or ())
        chosen = scenarios_of(found, scenarios or ())
        blocks = plan_suite(found, chosen, rates_rps=rates or (), seeds=seeds or ())
    result = LoadResult(name=found.name, about=found.about, date=_now(), slo=found.slo, suite=found)
    _measure(specs, blocks, result, out / f"{found.name}.json")


def _measure(
    specs: Sequence[TargetSpec],
    blocks: Sequence[Block],
    result: LoadResult,
    path: Path | None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Send the blocks, print the comparison, and write it, with a suite's virtual twins.

    Raises:
        typer.Exit: Always: the end of the command.
    """
    console, labels = Console(), [spec.label for spec in specs]
    rounds = measured(specs, blocks, console, headers=headers)
    real = [run.result for round_ in counted(rounds) for run in round_ if run.result]
    twins = twins_of(result.suite, real) if result.suite is not None else []
    print_comparison(console, labels, rounds, twins)
    if real and path is not None:
        note = "; ".join(remarks(labels, rounds))
        runs, machine = [*real, *twins], describe_machine()
        with failing(OSError, status=FAILED):
            save(replace(result, runs=runs, machine=machine, note=note), path)
        console.print(f"results: {path}", soft_wrap=True)
    raise typer.Exit(status_of(rounds))


@loadtest_app.command("compare")
def compare_command(
    load: Annotated[
        str, typer.Argument(help="Load to send: a suite, a workload's name, or its file.")
    ],
    targets: Annotated[
        list[str],
        typer.Option(
            "--target",
            help="policy:NAME[?ARG=N], envoy:round_robin, envoy:least_request, "
            "picker:FILE[=LABEL] or url:http://HOST:PORT[=LABEL]; may be repeated.",
        ),
    ],
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    scenarios: ScenariosOption = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests to send, of a workload.")
    ] = None,
    slices: Annotated[
        int, typer.Option(min=1, help="Number of blocks that a workload is split into.")
    ] = 4,
    fleet: Annotated[
        list[str] | None,
        typer.Option(help="Property of the fleet, as KEY=VALUE; may be repeated."),
    ] = None,
    profile: Annotated[str, typer.Option(help="Engine profile of the fake pods.")] = "",
    pods: Annotated[
        str, typer.Option(metavar="FILE", help="Model server in place of the fake pods.")
    ] = "",
    ttft_s: Annotated[
        float | None, typer.Option(help="Objective: seconds to the first token.")
    ] = None,
    tpot_s: Annotated[
        float | None, typer.Option(help="Objective: seconds per further token.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="LOADTEST_API_KEY", help="API key sent to `url:` targets.", show_default=False
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Send the same requests to several targets, block by block in turn, and compare them."""
    with failing(PlanError, TargetError):
        specs = parse_targets(targets, pods)
        suite = read_suite(load if is_suite(load) else NAMED)
        slo = {"ttft_s": ttft_s, "tpot_s": tpot_s}
        suite = overridden(suite, read_values(fleet or ()), profile, slo)
        if is_suite(load):
            chosen = scenarios_of(suite, scenarios or ())
            blocks = plan_suite(suite, chosen, rates_rps=rates or (), seeds=seeds or ())
        else:
            wholes = [
                workload_block(suite, load, rate_rps=rate_rps, num_requests=requests, seed=seed)
                for seed in seeds or (1,)
                for rate_rps in rates or (None,)
            ]
            blocks = [part for whole in wholes for part in sliced(whole, slices)]
    result = LoadResult(name=load, date=_now(), slo=blocks[0].slo)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    _measure(specs, blocks, result, out, headers)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def measured(
    specs: Sequence[TargetSpec],
    blocks: Sequence[Block],
    console: Console,
    *,
    headers: Mapping[str, str],
) -> list[Round]:
    """Run and return all rounds; if a signal ends the run, print those so far.

    Raises:
        typer.Exit: A signal ended the run, or a target cannot be used.
    """
    rounds: list[Round] = []

    async def measure() -> None:
        with watching(console, len(specs) * len(blocks)) as watch:
            await run_rounds(
                specs,
                await fitted(blocks, specs, headers),
                rounds,
                headers=headers,
                watch=watch,
            )

    try:
        with failing(PlanError), failing(TargetError, status=FAILED):
            uvloop.run(until_signalled(measure()))
    except SignalledError as error:
        if counted(rounds):
            print_comparison(console, [spec.label for spec in specs], rounds)
        console.print(f"{error}: {len(rounds)} of {len(blocks)} blocks were measured")
        raise typer.Exit(128 + error.number) from error
    return rounds


def status_of(rounds: Sequence[Round]) -> int:
    """Return the exit status after these rounds."""
    if any(run.is_gone for round_ in rounds for run in round_):
        return FAILED
    return 0 if counted(rounds) else NOT_MEASURED
