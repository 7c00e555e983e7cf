"""The command `extproc loadtest` (docs/loadtest.md).

Exit status: 0 for success, 1 for a failure, 2 for invalid arguments, 3 if the machine was too busy
to measure, and 128 + N after signal N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console

from extproc.commands.failure import FAILED, failure
from extproc.commands.ramp import ramp_command
from extproc.commands.session import (
    FleetOption,
    KeyOption,
    ProfileOption,
    TpotOption,
    TtftOption,
    key_headers,
    measured,
    refusing,
    status_of,
)
from extproc.commands.twins import twins_of
from extproc.lab.loadtest.blocks import Block, sliced
from extproc.lab.loadtest.compare import counted
from extproc.lab.loadtest.loads import (
    Overrides,
    is_suite,
    plan_suite,
    read_suite,
    workload_load,
)
from extproc.lab.loadtest.results import LoadResult, describe_machine, save
from extproc.lab.loadtest.screen import print_comparison, remarks
from extproc.lab.loadtest.targets import TargetSpec, parse_targets, suite_targets
from extproc.lab.trials.plan import with_alone
from extproc.lab.trials.specs import SloSpec
from extproc.lab.trials.suites import scenarios_of

DEFAULT_OUT = Path("loadtest/out/real")

loadtest_app = typer.Typer(
    name="loadtest",
    help="Load tests with real requests (docs/loadtest.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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
    with refusing():
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
        try:
            save(replace(result, runs=runs, machine=machine, note=note), path)
        except OSError as error:
            raise failure(error, FAILED) from error
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
            help="policy:NAME[?ARG=N], envoy:round_robin, envoy:least_request or "
            "url:http://HOST:PORT[=LABEL]; may be repeated.",
        ),
    ],
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    scenarios: ScenariosOption = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests to send, of a workload.")
    ] = None,
    slices: Annotated[int, typer.Option(min=1, help="Blocks into which a workload is cut.")] = 4,
    fleet: FleetOption = None,
    profile: ProfileOption = "",
    ttft_s: TtftOption = None,
    tpot_s: TpotOption = None,
    api_key: KeyOption = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Send the same requests to several targets, block by block in turn, and compare them."""
    overrides = Overrides(fleet or (), profile, (ttft_s, tpot_s, None))
    with refusing():
        specs = parse_targets(targets)
        if is_suite(load):
            suite = read_suite(load, overrides)
            chosen = scenarios_of(suite, scenarios or ())
            blocks = plan_suite(suite, chosen, rates_rps=rates or (), seeds=seeds or ())
        else:
            blocks = _slices(load, overrides, rates, seeds or (1,), requests, slices)
    result = LoadResult(name=load, date=_now(), slo=SloSpec(**asdict(blocks[0].slo)))
    _measure(specs, blocks, result, out, key_headers(api_key))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _slices(
    name: str,
    overrides: Overrides,
    rates: Sequence[float] | None,
    seeds: Sequence[int],
    num_requests: int | None,
    num_slices: int,
) -> list[Block]:
    load = workload_load(name, overrides)
    wholes = (
        load.block(rate_rps=rate_rps, num_requests=num_requests, seed=seed)
        for seed in seeds
        for rate_rps in rates or (None,)
    )
    return [part for whole in wholes for part in sliced(whole, num_slices)]


loadtest_app.command("ramp")(ramp_command)
