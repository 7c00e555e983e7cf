"""The command `extproc check-pod`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failure, http_url


def check_pod(
    url: Annotated[str, typer.Argument(callback=http_url, help="Base URL of the model server.")],
    engine: Annotated[
        str, typer.Option(help="Engine of the server, as in `pods.engine`.")
    ] = "vllm",
    adapter: Annotated[
        str, typer.Option(help="Adapter to test; by default the first one listed.")
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key that the server requires.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="PEM file with the CAs of the server's certificate.")
    ] = None,
) -> None:
    """Check that a model server provides what the router needs (docs/model-server.md)."""
    from extproc.commands import podcheck
    from extproc.commands.checks import render
    from extproc.files.reading import describe_failure, read_key
    from extproc.files.tls import client_context
    from extproc.reports.engines import PROFILES

    if engine not in PROFILES:
        raise failure(f"--engine {engine}: allowed: {', '.join(sorted(PROFILES))}")
    try:
        key = read_key(api_key_file) if api_key_file else ""
    except OSError as error:
        raise failure(f"--api-key-file {api_key_file}: {describe_failure(error)}") from error
    try:
        context = client_context(ca_file) if url.startswith("https:") else None
    except OSError as error:
        raise failure(f"--ca-file {ca_file}: {describe_failure(error)}") from error
    checks = asyncio.run(
        podcheck.check_pod(
            url,
            profile=PROFILES[engine],
            headers={"authorization": f"Bearer {key}"} if key else None,
            ssl=context,
            adapter=adapter or None,
        )
    )
    for check in checks:
        typer.echo(render(check))
    for line in podcheck.blind_spots(PROFILES[engine]):
        typer.echo(line)
    if any(check.fails for check in checks):
        raise typer.Exit(1)
