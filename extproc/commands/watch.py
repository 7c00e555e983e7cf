"""The command `extproc watch`."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failing, failure

Tls = Annotated[bool, typer.Option(help="Connect with TLS.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM file with the CAs of the router's certificate; the system's by default."
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM file with a client certificate, for mutual TLS.")
]
TlsKey = Annotated[
    Path | None, typer.Option(help="PEM file with the client certificate's private key.")
]


def client_tls(
    tls: bool, ca: Path | None, certificate: Path | None, key: Path | None
) -> ssl.SSLContext | None:
    """Return the context of the options for TLS; None for plain text.

    Raises:
        WatchError: A file cannot be used.
        typer.Exit: There is a key without its certificate.
    """
    from extproc.files.reading import describe_failure
    from extproc.files.tls import HTTP2, client_context
    from extproc.observe.watchclient import WatchError

    if key and not certificate:
        raise failure("--tls-key needs --tls-cert")
    if not (tls or ca or certificate):
        return None
    try:
        return client_context(ca, certificate=certificate, key=key, protocols=HTTP2)
    except OSError as error:
        given = " ".join(str(each) for each in (ca, certificate, key) if each)
        raise WatchError(f"{given}: {describe_failure(error)}") from error


def watch(
    target: Annotated[
        str, typer.Argument(help="host:port of the router's gRPC services.")
    ] = "127.0.0.1:9002",
    model: Annotated[
        list[str] | None, typer.Option(help="Show requests for this model only; may be repeated.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="Show requests sent to this pod (ip:port) only.")
    ] = "",
    only_rejections: Annotated[bool, typer.Option(help="Show refused requests only.")] = False,
    last: Annotated[int, typer.Option(min=0, help="Show the last N decisions first.")] = 0,
    explain: Annotated[
        bool, typer.Option(help="Explain each decision in words, on a line of its own.")
    ] = False,
    request: Annotated[
        str,
        typer.Option(
            help="Explain one request, by its x-request-id or the id of its pick: why this pod, "
            "how long it waited and for what, how it ended. The router must still remember its "
            "decision (admin.max_decisions)."
        ),
    ] = "",
    outcomes: Annotated[
        bool, typer.Option(help="Also show how requests end, each on a line of its own.")
    ] = True,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Follow the router's decisions live, or explain one request."""
    from rich.console import Console

    from extproc.observe import watchclient

    console = Console(highlight=False, soft_wrap=True)

    async def run() -> None:
        context = client_tls(tls, tls_ca, tls_cert, tls_key)
        decisions = watchclient.watch(
            target,
            tls=context,
            models=model or (),
            endpoint=endpoint,
            only_rejections=only_rejections,
            replay_last=last,
            explain=explain or bool(request),
            outcomes=outcomes,
            about=request,
        )
        async for decision in decisions:
            console.print(watchclient.render(decision))
            if request and watchclient.is_unfinished(decision):
                console.print("    It has not ended yet; its end will be shown here.")

    with suppress(KeyboardInterrupt), failing(watchclient.WatchError, OSError):
        asyncio.run(run())
