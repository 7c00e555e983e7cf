"""The commands `extproc serve` and `extproc check-config`: the same checks, with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failure

# Not `readable`: reading it says more of why it cannot be read.
ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", readable=False, help="Configuration file (docs/configuration.md)."
    ),
]


def serve(config: ConfigOption) -> None:
    """Route Envoy's requests until SIGTERM."""
    import uvloop

    from extproc.app.app import App
    from extproc.app.startup import refuse_start
    from extproc.config.file import ConfigError, parse_config, read_config
    from extproc.shell.logs import configure_logging

    async def run() -> None:
        await App(checked, path=config, text=text).run()

    try:
        text = read_config(config)
        checked = parse_config(text, source=str(config))
        refuse_start(checked)
        configure_logging(checked.log.level, is_json=checked.log.json_lines)
        uvloop.run(run())
    except (ConfigError, OSError) as error:
        raise failure(error) from error


def check_config(config: ConfigOption) -> None:
    """Check a configuration file on this machine as `serve` does, without serving.

    What `serve` refuses is refused here. An address that is in use is only a warning: it may be
    used by the very router whose configuration this is.
    """
    from extproc.app.startup import check_start
    from extproc.config.file import ConfigError, load_config

    try:
        checked = load_config(config)
    except ConfigError as error:
        raise failure(error) from error
    found = check_start(checked)
    for warning in (*found.in_use, *found.warnings):
        typer.echo(f"extproc: warning: {warning}", err=True)
    if found.errors:
        raise failure("\n".join(found.errors))
    typer.echo(f"{config}: ok (policy {checked.policy.name})")
