"""The transports of the gRPC services, chosen by `server.transport`. Part of `app`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from extproc.app.settings import max_message_bytes, tls_files
from extproc.config import Config
from extproc.core.address import Address
from extproc.core.budget import Budget
from extproc.core.wire.limits import Counters, Limits
from extproc.shell import wire
from extproc.shell.certificates import Certificates
from extproc.shell.rpc import Method

if TYPE_CHECKING:
    from extproc.shell.grpcio import GrpcioServer


class Transport(Protocol):
    """A listening server."""

    @property
    def address(self) -> str:
        """`host:port` with the port that was bound, or `unix:PATH`."""

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing new, redirect clients, let running calls end; then cancel the rest."""


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


class _Grpcio:
    def __init__(self, server: GrpcioServer, address: str) -> None:
        self._server = server
        self.address = address

    async def drain(self, timeout_s: float) -> None:
        self._server.end_long_lived()
        await self._server.stop(timeout_s)


async def _listen_grpcio(config: Config, methods: Iterable[Method], budget: Budget) -> _Grpcio:
    # Imported here: grpc takes 9 MB that the other transport does not need.
    from extproc.shell.grpcio import GrpcioServer
    from extproc.shell.tls import server_credentials

    credentials = None if config.server.tls is None else server_credentials(*tls_files(config))
    server = GrpcioServer(
        methods,
        max_message_bytes=max_message_bytes(config),
        max_concurrent_streams=config.server.max_concurrent_streams,
        budget=budget,
    )
    return _Grpcio(server, await server.start(config.server.address, credentials))


class _Wire:
    def __init__(self, server: wire.WireServer) -> None:
        self._server = server
        self.address = server.address

    async def drain(self, timeout_s: float) -> None:
        await self._server.drain(timeout_s)
        await self._server.close()


async def _listen_wire(
    config: Config, methods: Iterable[Method], counters: Counters, budget: Budget
) -> _Wire:
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
    return _Wire(server)
