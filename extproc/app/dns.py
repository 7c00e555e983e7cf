"""Endpoints by DNS. Part of `app`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from extproc.config.dns import DnsConfig
from extproc.core.types import Endpoint
from extproc.shell.telemetry import Telemetry

if TYPE_CHECKING:
    from extproc.shell.discovery.dns import DnsDiscovery

log = logging.getLogger(__name__)


class DnsEndpoints:
    """The source of endpoints that `discovery.dns` names; none where that is not given."""

    def __init__(
        self,
        config: DnsConfig | None,
        *,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        scheme: str,
        clock: Callable[[], float],
    ) -> None:
        self._discovery: DnsDiscovery | None = None
        if config is None:
            return
        # Imported where it is used: most routers find their pods otherwise.
        from extproc.shell.discovery.dns import DnsDiscovery

        self._discovery = DnsDiscovery(
            config.name,
            port=config.port,
            on_endpoints=on_endpoints,
            on_failure=lambda trouble: log.error("endpoints: %s", trouble),
            clock=clock,
            family=config.family,
            interval_s=config.interval_s,
            timeout_s=config.timeout_s,
            empty_after_s=config.empty_after_s,
            nameservers=config.nameservers,
            scheme=scheme,
        )

    async def run(self) -> None:
        """Hand endpoints on until cancelled. At once over where there is nothing to ask."""
        if self._discovery is not None:
            await self._discovery.run()

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Have the count of failures read at each scrape of the metrics."""
        found = self._discovery
        telemetry.add_counters(
            "dns_failures",
            "Lookups of the endpoints' name that failed, wholly or in part",
            "name",
            lambda: {found.name: found.num_failures} if found is not None else {},
        )
