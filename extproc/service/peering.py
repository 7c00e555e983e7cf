"""The other replicas of this router, and the relay to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from extproc.config import Config
from extproc.config.peers import PeersConfig
from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.peers.links import METHOD, OnEntries, PeersService
from extproc.peers.relay import Relay, count_routers
from extproc.peers.telling import Hearing
from extproc.service.clocks import Clocks
from extproc.service.peeraccess import checks_clients, keys_of, link_tls, peer_port
from extproc.types import Endpoint
from extproc.wire.rpc import Method

if TYPE_CHECKING:
    from extproc.peers.dialler import PeerDialler

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Between two checks for silent links and for entries that were not delivered."""
FLUSH_S = 1.0
"""Longest wait, when draining, for peers to accept the remaining entries."""
FLUSH_INTERVAL_S = 0.01
"""Between two checks during that wait."""


class Peering:
    """The links to peers, while `run` runs; none without peers.

    Args:
        config: The whole configuration.
        relay: Takes what is for other routers.
        hearing: Takes what they say.
        router_id: First part of our picks' ids.
        on_entries: Called with access log entries that a peer passed on, and its link.
        on_lost: Called with a link that has closed, or whose peer may have missed entries.
        num_losses: Returns how often this router may have missed entries for others.
        on_num_routers: Called with the number of routers, including this one, when it changes.
        on_garbage: Called for each message of a peer that cannot be parsed.
        observers: Calls the relay: no request and no access log depends on peers.
        clocks: Clocks, and randomness for the pauses between connection attempts.
    """

    def __init__(
        self,
        config: Config,
        relay: Relay,
        hearing: Hearing,
        *,
        router_id: str,
        on_entries: OnEntries,
        on_lost: Callable[[Hashable], None],
        num_losses: Callable[[], int],
        on_num_routers: Callable[[int], None],
        on_garbage: Callable[[], None],
        observers: Observers,
        clocks: Clocks,
    ) -> None:
        self._config = config
        self._observers = observers
        self._peers = config.peers
        self._router_id = router_id
        self._on_num_routers = on_num_routers
        self._clock, self._rng = clocks.clock, clocks.rng
        self._relay, self._hearing = relay, hearing
        self._service = PeersService(
            relay,
            router_id,
            links=hearing.links,
            listener=hearing,
            on_entries=on_entries,
            on_lost=on_lost,
            num_losses=num_losses,
            clock=clocks.clock,
            on_garbage=on_garbage,
            keys=keys_of(config),
            believes_callers=checks_clients(config),
        )
        self._dialler: PeerDialler | None = None
        self._kubernetes: Kubernetes | None = None
        self.num_routers = 1

    def methods(self) -> tuple[Method, ...]:
        """Return the methods that peers call."""
        return () if self._peers is None else self._service.methods()

    async def run(self) -> None:
        """Follow the peers until cancelled."""
        if self._peers is None:
            return
        # Imported here because most routers have no peers.
        from extproc.peers.dialler import PeerDialler

        self._dialler = PeerDialler(
            METHOD,
            self._router_id,
            self._service.dialled,
            rng=self._rng,
            tls=lambda: link_tls(self._config),
            tls_name=self._peers.tls_name,
            on_change=self._recount,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            if self._peers.service is not None:
                tasks.create_task(self._follow_service(self._peers.service, self._peers))
            elif self._peers.dns is not None:
                tasks.create_task(self._follow_dns(self._peers.dns, self._peers))
            self._dialler.set_addresses(self._peers.static or ())

    def warnings(self) -> list[str]:
        """Return what keeps us from peers, or from knowing them, that only people can change."""
        links = [] if self._dialler is None else self._dialler.warnings()
        return links if self._kubernetes is None else [*links, *self._kubernetes.warnings()]

    async def drain(self) -> None:
        """Wait, for `FLUSH_S` at most, until peers have accepted the queued entries."""
        for _ in range(round(FLUSH_S / FLUSH_INTERVAL_S)):
            if not self._relay.has_work:
                return
            await asyncio.sleep(FLUSH_INTERVAL_S)
        log.warning("peers have not accepted all access log entries")

    async def aclose(self) -> None:
        """Close the links that we opened."""
        if self._dialler is not None:
            await self._dialler.aclose()

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register the metrics of peers."""
        relay, service = self._relay, self._service
        telemetry.add_gauge(
            "routers",
            "Routers that discovery lists, including this one. 1 without peers.",
            lambda: self.num_routers,
        )
        telemetry.add_gauge(
            "peers_connected",
            "Other routers with a link over which this router accepts entries. Without "
            "a key, only links that this router dialled.",
            lambda: len(relay.linked_routers()),
        )
        telemetry.add_counters(
            "peer_entries",
            "Access log entries exchanged between routers. out: accepted by another. in: received.",
            "direction",
            lambda: {"in": service.num_received, "out": relay.num_sent},
        )
        telemetry.add_counters(
            "peer_entries_dropped",
            "Entries that no other router accepted. unreachable: no link for "
            "peers.hold_s. full: more than peers.max_queued_bytes, or entries for 256 "
            "routers wait. too_large: more than 1 MiB.",
            "reason",
            lambda: dict(relay.num_dropped),
        )
        self._hearing.add_metrics(telemetry)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._observers.call("relay", self._service.tick)

    async def _follow_service(self, service: str, peers: PeersConfig) -> None:
        self._kubernetes = kubernetes = Kubernetes(
            peers.kubeconfig, clock=self._clock, rng=self._rng, namespace=peers.namespace
        )
        try:
            port = peer_port(self._config)
            await kubernetes.follow_service(service, self._on_endpoints, port=port)
        finally:
            await kubernetes.aclose()

    async def _follow_dns(self, name: str, peers: PeersConfig) -> None:
        from extproc.discovery.dns import DnsDiscovery

        await DnsDiscovery(
            name,
            port=peer_port(self._config),
            on_endpoints=self._on_endpoints,
            on_failure=lambda trouble: log.error("peers: %s", trouble),
            on_recovery=lambda: log.info("peers: discovery works again"),
            clock=self._clock,
            interval_s=peers.interval_s,
            nameservers=peers.nameservers,
        ).run()

    def _on_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        assert self._dialler is not None
        self._dialler.set_addresses(each.address for each in endpoints if each.is_ready)

    def _recount(self) -> None:
        assert self._dialler is not None
        num_routers = count_routers(self._router_id, self._dialler.routers)
        if num_routers != self.num_routers:
            self.num_routers = num_routers
            log.info("routers: %d", num_routers)
            self._on_num_routers(num_routers)
