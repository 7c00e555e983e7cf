"""The transports of the gRPC services, chosen by `server.transport`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from extproc.address import Address
from extproc.wire import server as wire
from extproc.wire.budget import Budget
from extproc.wire.limits import Counters, Limits
from extproc.wire.rpc import Method
from extproc.wire.tls import Certificates


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Where the services listen, and how.

    Attributes:
        transport: `wire` for ours, `grpcio` for the library's.
        address: `host:port`, or `unix:PATH`.
        tls_files: The certificate, its key, and the authorities of clients if they are checked;
            None for plaintext.
        max_message_bytes: Of one message.
        max_streams: Of one connection.
    """

    transport: str
    address: str
    tls_files: tuple[Path, Path, Path | None] | None
    max_message_bytes: int
    max_streams: int


@dataclass(frozen=True, slots=True)
class Transport:
    """A listening server.

    Attributes:
        address: `host:port` with the port that was bound, or `unix:PATH`.
        drain: Stops accepting, redirects clients, lets running calls end within the given seconds,
            then cancels the rest.
    """

    address: str
    drain: Callable[[float], Awaitable[None]]


async def listen(
    settings: ListenerSettings, methods: Iterable[Method], counters: Counters, budget: Budget
) -> Transport:
    """Start the configured transport; ours counts in `counters` and keeps bodies within `budget`.

    Raises:
        OSError: The address cannot be bound, or a certificate file cannot be read.
    """
    if settings.transport == "grpcio":
        return await _listen_grpcio(settings, methods, budget)
    return await _listen_wire(settings, methods, counters, budget)


async def _listen_grpcio(
    settings: ListenerSettings, methods: Iterable[Method], budget: Budget
) -> Transport:
    # Imported here: grpc takes 9 MB that the other transport does not need.
    from extproc.wire.grpcio import GrpcioServer
    from extproc.wire.tls import server_credentials

    files = settings.tls_files
    credentials = None if files is None else server_credentials(*files)
    server = GrpcioServer(
        methods,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_streams=settings.max_streams,
        budget=budget,
    )

    async def drain(timeout_s: float) -> None:
        server.end_long_lived()
        await server.stop(timeout_s)

    return Transport(await server.start(settings.address, credentials), drain)


async def _listen_wire(
    settings: ListenerSettings, methods: Iterable[Method], counters: Counters, budget: Budget
) -> Transport:
    certificates = None if settings.tls_files is None else Certificates(*settings.tls_files)
    written = settings.address
    path = written.removeprefix("unix:") if written.startswith("unix:") else None
    address = Address.parse(written) if path is None else Address("127.0.0.1", 0)
    server = await wire.serve(
        methods,
        host=address.host,
        port=address.port,
        path=path,
        ssl_context=None if certificates is None else certificates.context,
        limits=Limits(
            max_message_bytes=settings.max_message_bytes,
            max_streams_per_connection=settings.max_streams,
        ),
        counters=counters,
        budget=budget,
        on_tick=(lambda: None) if certificates is None else certificates.reload_if_changed,
    )

    async def drain(timeout_s: float) -> None:
        await server.drain(timeout_s)
        await server.close()

    return Transport(server.address, drain)
