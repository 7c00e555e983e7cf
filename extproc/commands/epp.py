"""The command `extproc epp`: the router as a gateway's endpoint picker, with Go-style flags."""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Sequence

import typer

from extproc.commands.failure import failing

HELP = ("-h", "--help")


def epp(context: typer.Context) -> None:
    """Serve a gateway as its endpoint picker, with the flags of its charts (docs/epp.md)."""
    from extproc.commands.eppflags import FlagError
    from extproc.config.configfile import ConfigError

    with failing(ConfigError, FlagError, OSError, ImportError):
        run(context.args or HELP)


def run(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM.

    Raises:
        FlagError, ConfigError, OSError, ImportError: As `plan`, and as `startup.serve`.
    """
    from extproc.commands.eppflags import help_text
    from extproc.commands.eppplan import plan
    from extproc.service import startup
    from extproc.wire.listenertls import make_certificate

    if any(argument in HELP for argument in arguments):
        sys.stdout.write(f"{help_text()}\n")
        return
    made = plan(
        arguments,
        environment=os.environ,
        make_certificate=lambda: make_certificate(now=dt.datetime.now(dt.UTC)),
    )
    startup.serve(
        made.config, path=made.path, text=made.text, parse=made.parse, warnings=made.warnings()
    )
