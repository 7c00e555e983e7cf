"""`extproc demo`: routing by adapter on a real Envoy, in a minute.

Pods are fake ones; they, Envoy and the router are real processes on free ports of the loopback
interface.
"""

from __future__ import annotations

from typing import Annotated

import typer

from extproc.commands.failure import FAILED, failure


def demo(
    seconds: Annotated[float, typer.Option(help="Length of each of the three runs.")] = 7.0,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 20.0,
    slots: Annotated[int, typer.Option(min=1, help="Adapter slots on the GPU of each pod.")] = 3,
) -> None:
    """Compare three policies, explain one request, register an adapter: with a real Envoy.

    Exit status: 0 if everything worked, 128 plus its number if a signal ended the demo.
    """
    import asyncio

    from aiohttp import ClientError
    from rich.console import Console

    from extproc.commands.demo.adapterlife import show_life
    from extproc.commands.demo.policies import compare, make_workload
    from extproc.stack.processes import SignalledError, StackError, until_signalled
    from extproc.stack.stack import find_envoy

    workload = make_workload(seconds, rate)
    if not workload.arrivals:
        raise failure("no requests in this time: raise --seconds or --rate")
    console = Console(highlight=False, markup=False, soft_wrap=True)

    async def run() -> int:
        runs = await compare(console, workload, slots)
        await show_life(console, slots)
        return FAILED if any(run.failures for run in runs) else 0

    try:
        find_envoy()
        status = asyncio.run(until_signalled(run()))
    except SignalledError as error:
        status = 128 + error.number
    except (StackError, ClientError) as error:
        raise failure(error, FAILED) from error
    raise typer.Exit(status)
