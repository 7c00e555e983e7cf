"""The commands `extproc serve` and `extproc check-config`, with the same checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failing, failure

# Not `readable`: reading the file gives a better error message.
ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", readable=False, help="Configuration file (docs/configuration.md)."
    ),
]


def serve(config: ConfigOption) -> None:
    """Route Envoy's requests until SIGTERM."""
    from extproc.config.configfile import ConfigError, parse_config, read_config
    from extproc.service import startup

    with failing(ConfigError, OSError):
        text = read_config(config)
        startup.serve(parse_config(text, source=str(config)), path=config, text=text)


def check_config(config: ConfigOption) -> None:
    """Check a configuration file as `serve` does at its start, without serving.

    An address in use is an error for `serve` but only a warning here: it may be used by a running
    router with this configuration.
    """
    from extproc.config.configfile import ConfigError, load_config
    from extproc.service.startup import check_start

    with failing(ConfigError):
        checked = load_config(config)
    found = check_start(checked)
    found.close()
    for warning in (*found.in_use, *found.warnings):
        typer.echo(f"extproc: warning: {warning}", err=True)
    if found.errors:
        raise failure("\n".join(found.errors))
    typer.echo(f"{config}: ok (policy {checked.policy.name})")
