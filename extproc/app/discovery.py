"""Where endpoints come from: the one source that `discovery` names. Part of `app`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from extproc.app import settings
from extproc.app.dns import DnsEndpoints
from extproc.app.kubernetes import KubernetesDiscovery
from extproc.app.world import World
from extproc.config import Config
from extproc.core.types import Endpoint
from extproc.shell.discovery.file import make_endpoints, parse_endpoints
from extproc.shell.filewatch import FileWatch
from extproc.shell.telemetry import Telemetry

log = logging.getLogger(__name__)


class Discovery:
    """Hands on the list of endpoints, at first and whenever it changes.

    Args:
        config: The whole configuration.
        on_endpoints: Gets all of them.
        world: Clocks and randomness.

    Raises:
        ConfigError: An extra is needed and not installed.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        world: World,
    ) -> None:
        self._config = config.discovery
        self._on_endpoints = on_endpoints
        self._scheme = scheme = settings.scheme(config)
        self._kubernetes = KubernetesDiscovery(
            config.discovery.kubernetes,
            on_endpoints=on_endpoints,
            scheme=scheme,
            clock=world.clock,
            rng=world.rng,
        )
        self._dns = DnsEndpoints(
            config.discovery.dns, on_endpoints=on_endpoints, scheme=scheme, clock=world.clock
        )

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Have the sources' own counts read at each scrape of the metrics."""
        self._kubernetes.add_metrics(telemetry)
        self._dns.add_metrics(telemetry)

    def why_not_ready(self) -> list[str]:
        """Reasons, for people, why no endpoints have been handed on."""
        return self._kubernetes.why_not_ready()

    async def run(self) -> None:
        """Hand endpoints on until cancelled, or once where the configuration lists them."""
        config = self._config
        if config.kubernetes is not None:
            await self._kubernetes.run()
        elif config.dns is not None:
            await self._dns.run()
        elif config.file is not None:
            await FileWatch(
                config.file,
                interval_s=config.file_interval_s,
                on_change=self._on_file,
                on_failure=lambda trouble: log.error("endpoints: %s", trouble),
            ).run()
        else:
            entries = [each.model_dump() for each in config.static or ()]
            self._on_endpoints(make_endpoints(entries, scheme=self._scheme))

    def _on_file(self, text: str) -> None:
        self._on_endpoints(parse_endpoints(text, scheme=self._scheme))
