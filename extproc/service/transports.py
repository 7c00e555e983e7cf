"""The transports of the gRPC services, chosen by `server.transport`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from extproc.address import Address
from extproc.config import Config
from extproc.service.configured import max_message_bytes, tls_files
from extproc.wire import server as wire
from extproc.wire.budget import Budget
from extproc.wire.limits import Counters, Limits
from extproc.wire.rpc import Method
from extproc.wire.tls import Certificates


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
    config: Config, methods: Iterable[Method], counters: Counters, budget: Budget
) -> Transport:
    """Start the configured transport; ours counts in `counters` and keeps bodies within `budget`.

    Raises:
        OSError: The address cannot be bound, or a certificate file cannot be read.
    """
    if config.server.transport == "grpcio":
        return await _listen_grpcio(config, methods, budget)
    return await _listen_wire(config, methods, counters, budget)


async def _listen_grpcio(config: Config, methods: Iterable[Method], budget: Budget) -> Transport:
    # Imported here: grpc takes 9 MB that the other transport does not need.
    from extproc.wire.grpcio import GrpcioServer
    from extproc.wire.tls import server_credentials

    credentials = None if config.server.tls is None else server_credentials(*tls_files(config))
    server = GrpcioServer(
        methods,
        max_message_bytes=max_message_bytes(config),
        max_concurrent_streams=config.server.max_concurrent_streams,
        budget=budget,
    )

    async def drain(timeout_s: float) -> None:
        server.end_long_lived()
        await server.stop(timeout_s)

    return Transport(await server.start(config.server.address, credentials), drain)


async def _listen_wire(
    config: Config, methods: Iterable[Method], counters: Counters, budget: Budget
) -> Transport:
    certificates = None
    if config.server.tls is not None:
        certificates = Certificates(*tls_files(config))
    written = config.server.address
    path = written.removeprefix("unix:") if written.startswith("unix:") else None
    address = Address.parse(written) if path is None else Address("127.0.0.1", 0)
    server = await wire.serve(
        methods,
        host=address.host,
        port=address.port,
        path=path,
        ssl_context=None if certificates is None else certificates.context,
        limits=Limits(
            max_message_bytes=max_message_bytes(config),
            max_streams_per_connection=config.server.max_concurrent_streams,
        ),
        counters=counters,
        budget=budget,
        on_tick=(lambda: None) if certificates is None else certificates.reload_if_changed,
    )

    async def drain(timeout_s: float) -> None:
        await server.drain(timeout_s)
        await server.close()

    return Transport(server.address, drain)
