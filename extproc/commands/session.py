"""The shared options, exit statuses and error handling of `extproc loadtest`."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console

from extproc.commands.failure import FAILED, failure
from extproc.lab.loadtest.blocks import Block
from extproc.lab.loadtest.compare import Round, counted, fitted, run_rounds
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.screen import print_comparison, watching
from extproc.lab.loadtest.targets import TargetSpec
from extproc.lab.trials.suites import PlanError
from extproc.stack.processes import SignalledError, until_signalled

NOT_MEASURED = 3
"""Exit status: the machine was too busy."""
_T = TypeVar("_T")

FleetOption = Annotated[
    list[str] | None,
    typer.Option("--fleet", help="Property of the fleet, as KEY=VALUE; may be repeated."),
]
ProfileOption = Annotated[str, typer.Option(help="Engine profile of the fake pods.")]
TtftOption = Annotated[float | None, typer.Option(help="Objective: seconds to the first token.")]
TpotOption = Annotated[float | None, typer.Option(help="Objective: seconds per further token.")]
KeyOption = Annotated[
    str,
    typer.Option(
        envvar="LOADTEST_API_KEY", help="API key sent to `url:` targets.", show_default=False
    ),
]


def key_headers(api_key: str) -> Mapping[str, str]:
    """Return the headers that carry an API key."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


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
            fit = await fitted(blocks, specs, headers)
            await run_rounds(specs, fit, rounds, headers=headers, watch=watch)

    try:
        with refusing():
            run_until_signalled(measure())
    except SignalledError as error:
        if counted(rounds):
            print_comparison(console, [spec.label for spec in specs], rounds)
        console.print(f"{error}: {len(rounds)} of {len(blocks)} blocks were measured")
        raise typer.Exit(128 + error.number) from error
    return rounds


def run_until_signalled(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end or until a signal.

    Raises:
        SignalledError: There was a signal.
        typer.Exit: A target did not start, or has died.
    """
    try:
        return uvloop.run(until_signalled(work))
    except TargetError as error:
        raise failure(error, FAILED) from error


def status_of(rounds: Sequence[Round]) -> int:
    """Return the exit status after these rounds."""
    if any(run.is_gone for round_ in rounds for run in round_):
        return FAILED
    return 0 if counted(rounds) else NOT_MEASURED


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors in the arguments into an exit with a one-line message.

    Raises:
        typer.Exit: There was such an error.
    """
    try:
        yield
    except (PlanError, TargetError) as error:
        raise failure(error) from error
