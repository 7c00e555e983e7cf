"""The command `extproc` and its subcommands, each from a file of its own.

Those files import what they need when they run, so that the router loads nothing of the laboratory
and `--help` loads little.
"""

from __future__ import annotations

from typing import Annotated

import typer

from extproc import __version__
from extproc.commands.adapters import adapters
from extproc.commands.checkgateway import check_gateway
from extproc.commands.checkpod import check_pod
from extproc.commands.demo import demo
from extproc.commands.envoy import envoy
from extproc.commands.epp import epp
from extproc.commands.failure import PASSED_ON
from extproc.commands.fakepod import fake_pod
from extproc.commands.panels import CHECK, MEASURE, OBSERVE, RUN, Commands
from extproc.commands.serve import check_config, serve
from extproc.commands.up import up
from extproc.commands.watch import watch
from extproc.commands.why import why
from extproc.observe.interpreter import interpreter

app = Commands(
    name="extproc",
    help="Route OpenAI-API requests to vLLM pods by LoRA adapter, as an Envoy external processor.",
)


def main() -> None:
    """Run the command line."""
    app(prog_name="extproc")  # also of `python -m extproc`, whose name no shell can complete


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        python = interpreter()
        typer.echo(
            f"extproc {__version__} (Python {python['python']}, compiler {python['compiler']})"
        )
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def lab(context: typer.Context) -> None:
    """Judge policies and size a fleet, in virtual time or with real requests (docs/lab.md)."""
    from extproc.commands.lab import lab_app

    lab_app(context.args or ["--help"], prog_name="extproc lab")


app.command(rich_help_panel=RUN)(up)
app.command(rich_help_panel=RUN)(demo)
app.command(rich_help_panel=RUN)(serve)
app.command(context_settings=PASSED_ON, rich_help_panel=RUN)(epp)
app.command(rich_help_panel=RUN)(envoy)
app.add_typer(adapters, rich_help_panel=RUN)
app.command(rich_help_panel=CHECK)(check_config)
app.command(rich_help_panel=CHECK)(check_pod)
app.command(rich_help_panel=CHECK)(check_gateway)
app.command(rich_help_panel=OBSERVE)(watch)
app.command(rich_help_panel=OBSERVE)(why)
app.command(context_settings=PASSED_ON, rich_help_panel=MEASURE)(lab)
app.command(rich_help_panel=MEASURE)(fake_pod)
