"""The command `extproc lab record`."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer

from extproc.commands.failure import FAILED, failing
from extproc.commands.watch import Tls, TlsCa, TlsCert, TlsInsecure, TlsKey, client_tls
from extproc.files.reading import read_key
from extproc.observe.envoylog import decisions_of
from extproc.observe.recording import MAX_KEY_BYTES, MIN_KEY_BYTES, Recording, RecordNames
from extproc.observe.watchclient import WatchError, watch

_AGAIN_S = 1.0
"""From a lost connection to the next one."""
_CANDIDATES_INTERVAL_S = 1
"""The record has the pods that there are: a router need not say that of each request."""


def record(
    router: Annotated[
        list[str] | None,
        typer.Argument(help="host:port of a router's gRPC services; all of a fleet's."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Length of the record.")] = 60.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Write the names of adapters and pods as they are.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of the hashes, for records whose names can be compared; by "
            "default a random one that is not kept."
        ),
    ] = None,
    envoy_log: Annotated[
        Path | None,
        typer.Option(
            help="Access log in JSON of an Envoy without a router, to make a record of it instead "
            "(docs/what-if.md)."
        ),
    ] = None,
    base_model: Annotated[
        str, typer.Option(help="Its model name for requests without an adapter.")
    ] = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_insecure: TlsInsecure = False,
) -> None:
    """Record the traffic of running routers, or of an Envoy, as CSV without prompts or answers.

    The record is written to standard output, and what it lacks is said on standard error.
    """
    targets = router or ["127.0.0.1:9002"]
    with failing(WatchError, OSError, status=FAILED):
        names = RecordNames(
            os.urandom(MIN_KEY_BYTES) if key_file is None else _key(key_file), plain
        )
        context = client_tls(tls, tls_ca, tls_cert, tls_key, tls_insecure)
        recording = Recording(names, 1 if envoy_log else len(targets))
        if envoy_log:
            with envoy_log.open(encoding="utf-8", errors="replace") as log:
                sys.stdout.write(recording.head())
                for decision in decisions_of(log, base_model):
                    sys.stdout.writelines(recording.lines(0, decision))
        else:
            _record_routers(targets, recording, minutes, context)
        sys.stdout.writelines(recording.rest())
        sys.stdout.flush()
    typer.echo(recording.says(), err=True)


def _record_routers(
    targets: list[str], recording: Recording, minutes: float, context: ssl.SSLContext | None
) -> None:
    typer.echo(f"recording {', '.join(targets)} for {minutes:g} minutes", err=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # also in a shell's background
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # what was recorded until then is a record
        asyncio.run(record_all(targets, recording, sys.stdout, seconds=60 * minutes, tls=context))


def _key(path: Path) -> bytes:
    key = read_key(path).encode()
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise OSError(f"{path}: {len(key)} bytes; a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
    return key


async def record_all(
    targets: list[str],
    recording: Recording,
    out: TextIO,
    *,
    seconds: float,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Write the lines of requests of some routers, until so many seconds have passed.

    Raises:
        WatchError: A router cannot be reached at first; later it is called again.
        OSError: `out` cannot be written.
    """
    out.write(recording.head())
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as follows:
            for number, target in enumerate(targets):
                follows.create_task(_follow(number, target, recording, out, tls))
    except TimeoutError:
        return
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _follow(
    number: int, target: str, recording: Recording, out: TextIO, tls: ssl.SSLContext | None
) -> None:
    """Write what a router decides; call again where the connection is lost, and count that."""
    is_known = False
    while True:
        try:
            decisions = watch(
                target, tls=tls, outcomes=True, candidates_interval_s=_CANDIDATES_INTERVAL_S
            )
            async for decision in decisions:
                is_known = True
                out.writelines(recording.lines(number, decision))
        except WatchError:
            if not is_known:
                raise
            recording.broke_off(number)
            await asyncio.sleep(_AGAIN_S)
