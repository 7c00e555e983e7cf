"""`extproc demo`: routing by adapter on a real Envoy, in a minute.

Three runs with the same requests: `round_robin`, the founding policy and `least_harm`, each on four
new fake pods behind Envoy and the router, all of them real processes on free ports of the loopback
interface.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from extproc.commands.failure import failure


def demo(
    keep: Annotated[
        bool, typer.Option(help="Keep it running afterwards, and print commands to try.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Length of each of the three runs.")] = 7.0,
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 20.0,
    slots: Annotated[int, typer.Option(min=1, help="Adapter slots on the GPU of each pod.")] = 3,
) -> None:
    """Compare adapter-aware routing with round robin: a real Envoy, four fake pods, 16 adapters.

    Exit status: 0 if no request failed, 128 plus its number if a signal ended the demo.
    """
    if importlib.util.find_spec("openai") is None:
        from extproc.core.errors import needs_extra

        raise failure(needs_extra("the demo", "demo"))
    from extproc.commands.demo.story import run

    raise typer.Exit(run(keep=keep, seconds=seconds, rate=rate, slots=slots))
