"""The command `extproc loadtest` (docs/loadtest.md).

It exits with 0 if all went well, 1 if something did not, 2 if it was asked for something that
cannot be, 3 if the machine was too busy to measure, and 128 and its number if a signal ended it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console

from extproc.demo.processes import SignalledError, until_signalled
from extproc.loadtest.blocks import (
    Block,
    Overrides,
    PlanError,
    is_suite,
    plan_suite,
    read_suite,
    scenarios_of,
    sliced,
    workload_load,
)
from extproc.loadtest.compare import Round, counted, fitted, run_rounds
from extproc.loadtest.screen import print_comparison, watching
from extproc.loadtest.targets import TargetError, TargetSpec, parse_targets

FAILED, UNUSABLE, NOT_MEASURED = 1, 2, 3
"""Exit statuses."""
_T = TypeVar("_T")

loadtest_app = typer.Typer(
    name="loadtest",
    help="Real requests against rules, balancers and endpoints (docs/loadtest.md).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

TargetsOption = Annotated[
    list[str],
    typer.Option(
        "--target", help="rule:NAME[?ARG=N], envoy:round_robin, url:http://HOST:PORT; repeat."
    ),
]
RatesOption = Annotated[
    list[float] | None, typer.Option("--rate", help="Requests a second; may repeat.")
]
SeedsOption = Annotated[list[int] | None, typer.Option("--seed", help="May repeat.")]
FleetOption = Annotated[
    list[str] | None, typer.Option("--fleet", help="KEY=VALUE of the fleet; may repeat.")
]
ProfileOption = Annotated[str, typer.Option(help="Engine profile of fake pods.")]
TtftOption = Annotated[float | None, typer.Option(help="Objective: first token, seconds.")]
TpotOption = Annotated[float | None, typer.Option(help="Objective: each further token, seconds.")]
KeyOption = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", help="Sent to `url:` targets.", show_default=False)
]


@loadtest_app.command("compare")
def compare_command(
    load: Annotated[str, typer.Argument(help="A suite, a workload's name, or its file.")],
    targets: TargetsOption,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", help="Only this one of the suite's; repeat.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of a workload.")] = None,
    slices: Annotated[int, typer.Option(min=1, help="Blocks that a workload is cut into.")] = 4,
    fleet: FleetOption = None,
    profile: ProfileOption = "",
    ttft_s: TtftOption = None,
    tpot_s: TpotOption = None,
    api_key: KeyOption = "",
) -> None:
    """The same requests through every target, interleaved; ratios, paired block by block."""
    overrides = Overrides(fleet or (), profile, (ttft_s, tpot_s, None))
    with _usage():
        specs = parse_targets(targets)
        blocks = (
            _suite_blocks(load, overrides, scenarios, rates, seeds)
            if is_suite(load)
            else _workload_blocks(load, overrides, rates, seeds, requests, slices)
        )
    console = Console()
    rounds = _measured(specs, blocks, api_key, console)
    print_comparison(console, [spec.label for spec in specs], rounds)
    raise typer.Exit(_status(rounds))


def _suite_blocks(
    name: str,
    overrides: Overrides,
    scenarios: Sequence[str] | None,
    rates: Sequence[float] | None,
    seeds: Sequence[int] | None,
) -> list[Block]:
    suite = read_suite(name, overrides)
    chosen = scenarios_of(suite, scenarios or ())
    return plan_suite(suite, chosen, rates_rps=rates or (), seeds=seeds or ())


def _workload_blocks(
    name: str,
    overrides: Overrides,
    rates: Sequence[float] | None,
    seeds: Sequence[int] | None,
    num_requests: int | None,
    num_slices: int,
) -> list[Block]:
    load = workload_load(name, overrides)
    return [
        part
        for seed in seeds or (1,)
        for rate_rps in rates or (None,)
        for part in sliced(
            load.block(rate_rps=rate_rps, num_requests=num_requests, seed=seed), num_slices
        )
    ]


def _measured(
    specs: Sequence[TargetSpec],
    blocks: Sequence[Block],
    api_key: str,
    console: Console,
    num_repeats: int = 0,
) -> list[Round]:
    """All rounds; if a signal ends it, those so far are shown first."""
    rounds: list[Round] = []
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def measure() -> None:
        with watching(console, len(specs) * len(blocks)) as watch:
            fit = await fitted(blocks, specs, headers)
            await run_rounds(
                specs, fit, rounds, headers=headers, watch=watch, num_repeats=num_repeats
            )

    try:
        _run(measure())
    except SignalledError as error:
        if counted(rounds):
            print_comparison(console, [spec.label for spec in specs], rounds)
        console.print(f"{error}: {len(rounds)} of {len(blocks)} blocks were measured")
        raise typer.Exit(128 + error.number) from error
    return rounds


def _status(rounds: Sequence[Round]) -> int:
    if any(run.is_gone for round_ in rounds for run in round_):
        return FAILED
    return 0 if counted(rounds) else NOT_MEASURED


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it to its end or to a signal; what cannot be used ends the command with one line."""
    try:
        return uvloop.run(until_signalled(work))
    except PlanError as error:
        raise _exit(error, UNUSABLE) from error
    except TargetError as error:
        raise _exit(error, FAILED) from error


@contextmanager
def _usage() -> Iterator[None]:
    """What is wrong with what was asked for, in one line."""
    try:
        yield
    except (PlanError, TargetError) as error:
        raise _exit(error, UNUSABLE) from error


def _exit(error: Exception, status: int) -> typer.Exit:
    Console(stderr=True).print(f"extproc: {error}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)
