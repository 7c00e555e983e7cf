"""The command `extproc check-gateway`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failure, http_url


def check_gateway(
    url: Annotated[str, typer.Argument(callback=http_url, help="Base URL of the gateway.")],
    admin: Annotated[
        list[str],
        typer.Option(help="Base URL of a router's admin port; once for each router."),
    ],
    model: Annotated[
        str, typer.Option(help="Model to ask for; by default the first one listed.")
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(help="`Name: value`, sent with each request; may be repeated."),
    ] = None,
    private_model: Annotated[
        str, typer.Option(help="A model that only one tenant may use, for the check of forgery.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="That tenant.")] = "",
    ca_file: Annotated[
        Path | None, typer.Option(help="PEM file with the CAs of the gateway's certificate.")
    ] = None,
) -> None:
    """Check that a gateway does for routers what they need (docs/gateways.md)."""
    from extproc.commands.checks import render
    from extproc.commands.gatewaycheck import check_gateway
    from extproc.files.reading import describe_failure
    from extproc.files.tls import client_context

    if bool(private_model) is not bool(tenant):
        raise failure("--private-model and --tenant belong together")
    try:
        context = client_context(ca_file)
    except OSError as error:
        raise failure(f"--ca-file {ca_file}: {describe_failure(error)}") from error
    checks = asyncio.run(
        check_gateway(
            url,
            [http_url(each) for each in admin],
            model=model,
            headers=_headers(header or []),
            private=(private_model, tenant),
            ssl=context,
        )
    )
    for check in checks:
        typer.echo(render(check))
    if any(check.fails for check in checks):
        raise typer.Exit(1)


def _headers(lines: list[str]) -> Mapping[str, str]:
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise failure(f"--header {line}: must be `Name: value`")
        found[name.strip().lower()] = value.strip()
    return found
