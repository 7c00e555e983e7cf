"""The port of the gRPC services, as it is configured."""

from __future__ import annotations

from collections.abc import Iterable
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
        address: `host:port`, or `unix:PATH`.
        tls_files: The certificate, its key, and the authorities of clients if they are checked;
            None for plaintext.
        max_message_bytes: Of one message.
        max_streams: Of one connection.
    """

    address: str
    tls_files: tuple[Path, Path, Path | None] | None
    max_message_bytes: int
    max_streams: int


async def listen(
    settings: ListenerSettings, methods: Iterable[Method], counters: Counters, budget: Budget
) -> wire.WireServer:
    """Serve at the address, count in `counters` and keep bodies within `budget`.

    Raises:
        OSError: The address cannot be bound, or a certificate file cannot be read.
    """
    certificates = None if settings.tls_files is None else Certificates(*settings.tls_files)
    written = settings.address
    path = written.removeprefix("unix:") if written.startswith("unix:") else None
    address = Address.parse(written) if path is None else Address("127.0.0.1", 0)
    return await wire.serve(
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
