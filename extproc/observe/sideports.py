"""Ports for health alone and for metrics alone.

Health without TLS for the kubelet, whose gRPC probes do not support TLS; metrics for Prometheus,
which needs nothing else of the admin port.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

from prometheus_client import CollectorRegistry

from extproc.address import Address
from extproc.observe.admin import MetricsServer
from extproc.wire import server as wire
from extproc.wire.budget import Budget
from extproc.wire.httpserver import HttpLimit
from extproc.wire.limits import Limits
from extproc.wire.rpc import Method

log = logging.getLogger(__name__)

HEALTH_LIMITS = Limits(
    max_connections=256,
    max_streams_per_connection=128,
    max_message_bytes=4096,
    max_queued_bytes=256 * 1024,
    max_write_buffer_bytes=256 * 1024,
)
"""Of the health port: a request is the name of a service, and a kubelet sends one per second."""
HEALTH_BYTES = 1024 * 1024
"""Of requests and responses in memory."""


class SidePorts:
    """The configured ports; none by default.

    Attributes:
        health_address: `host:port` that was bound, or "".
        metrics_address: Likewise.
    """

    def __init__(
        self,
        health_at: str | None,
        metrics_at: str | None,
        *,
        health: Iterable[Method],
        registry: CollectorRegistry,
        dropped: Counter[HttpLimit] | None = None,
    ) -> None:
        self._dropped = dropped
        self.health_address = self.metrics_address = ""
        self._health_at, self._metrics_at = health_at, metrics_at
        self._methods = health
        self._registry = registry
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: An address cannot be bound; nothing is left open.
        """
        async with AsyncExitStack() as ports:
            if self._health_at is not None:
                at = Address.parse(self._health_at)
                server = await wire.serve(
                    self._methods,
                    host=at.host,
                    port=at.port,
                    limits=HEALTH_LIMITS,
                    budget=Budget(HEALTH_BYTES, max_upload_bytes=HEALTH_LIMITS.max_message_bytes),
                )
                ports.push_async_callback(server.close)
                self.health_address = server.address
                log.info("health on %s", self.health_address)
            if self._metrics_at is not None:
                at = Address.parse(self._metrics_at)
                metrics = MetricsServer(at.host, at.port, self._registry, dropped=self._dropped)
                ports.push_async_callback(metrics.stop)
                await metrics.start()
                self.metrics_address = str(replace(at, port=metrics.port))
                log.info("metrics on %s", self.metrics_address)
            self._open = ports.pop_all()

    async def aclose(self) -> None:
        """Close the open ports."""
        await self._open.aclose()
