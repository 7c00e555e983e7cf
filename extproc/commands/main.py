"""The command `extproc` and its subcommands, each from a file of its own.

Those files import what they need when they run, so that the router loads nothing of the laboratory
and `--help` loads little.
"""

from __future__ import annotations

from typing import Annotated

import typer

from extproc import __version__
from extproc.commands.adapters import adapters
from extproc.commands.checkpod import check_pod
from extproc.commands.demo import demo
from extproc.commands.envoy import envoy
from extproc.commands.epp import epp
from extproc.commands.failure import PASSED_ON
from extproc.commands.fakepod import fake_pod
from extproc.commands.serve import check_config, serve
from extproc.commands.up import up
from extproc.commands.watch import watch

app = typer.Typer(
    name="extproc",
    help="Route OpenAI-API requests to vLLM pods by LoRA adapter, as an Envoy external processor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    app(prog_name="extproc")  # also of `python -m extproc`, whose name no shell can complete


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"extproc {__version__}")
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
    """Judge policies in virtual time (docs/lab.md): `lab run SUITE`, `lab report`."""
    from extproc.commands.lab import lab_app

    lab_app(context.args or ["--help"], prog_name="extproc lab")


def loadtest(context: typer.Context) -> None:
    """Load tests with real requests (docs/loadtest.md): `loadtest run`, `loadtest compare`."""
    from extproc.commands.loadtest import loadtest_app

    loadtest_app(context.args or ["--help"], prog_name="extproc loadtest")


app.command()(serve)
app.command(context_settings=PASSED_ON)(epp)
app.command()(check_config)
app.command()(envoy)
app.command()(check_pod)
app.command()(watch)
app.command(context_settings=PASSED_ON)(lab)
app.command(context_settings=PASSED_ON)(loadtest)
app.command()(up)
app.command()(demo)
app.command()(fake_pod)
app.add_typer(adapters)
