"""The port of the gRPC services, as it is configured."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.address import Address
from extproc.config import Config
from extproc.service.configured import max_message_bytes, tls_files
from extproc.wire import server as wire
from extproc.wire.budget import Budget
from extproc.wire.limits import Counters, Limits
from extproc.wire.rpc import Method
from extproc.wire.tls import Certificates


async def listen(
    config: Config, methods: Iterable[Method], counters: Counters, budget: Budget
) -> wire.WireServer:
    """Serve at `server.address`, count in `counters` and keep bodies within `budget`.

    Raises:
        OSError: The address cannot be bound, or a certificate file cannot be read.
    """
    certificates = None
    if config.server.tls is not None:
        certificates = Certificates(*tls_files(config))
    written = config.server.address
    path = written.removeprefix("unix:") if written.startswith("unix:") else None
    address = Address.parse(written) if path is None else Address("127.0.0.1", 0)
    return await wire.serve(
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
