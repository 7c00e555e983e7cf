"""The other replicas of this router, and the relay to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from ssl import SSLContext
from typing import TYPE_CHECKING

from extproc.meters import Meters
from extproc.observe.observers import Observers
from extproc.peers.links import METHOD, OnEntries, PeersService
from extproc.peers.relay import Relay, count_routers
from extproc.peers.updates import UpdateReceiver
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


OnEndpoints = Callable[[Sequence[Endpoint]], None]


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How peers are found, and how they are known.

    Attributes:
        keys: Returns those that replicas share, as they are now, or None.
        believes_callers: TLS lets only clients call that have a certificate.
        tls: Returns the context of the links that we open, from its files as they are now.
        tls_name: That replicas' certificates must have; None for any.
        static: Addresses of peers.
        follow: Hands on where peers are, until it is cancelled; None where they are `static`.
        warnings: Returns what keeps it from that.
    """

    keys: Callable[[], Sequence[bytes] | None]
    believes_callers: bool
    tls: Callable[[], SSLContext | None]
    tls_name: str | None
    static: Sequence[str]
    follow: Callable[[OnEndpoints], Awaitable[None]] | None
    warnings: Callable[[], list[str]]


class ObservedRelay:
    """Takes access log entries of other routers' picks: no entry of ours depends on that."""

    def __init__(self, relay: Relay, observers: Observers, clock: Callable[[], float]) -> None:
        self._relay, self._observers, self._clock = relay, observers, clock

    def pass_on(self, pick_id: str, entry: bytes) -> None:
        """Queue an entry."""
        pass_on = partial(self._relay.pass_on, pick_id, entry, now=self._clock())
        self._observers.call("relay", pass_on)

    def flush(self) -> None:
        """Send what is queued."""
        self._observers.call("relay", partial(self._relay.flush, now=self._clock()))


class Peering:
    """The links to peers, while `run` runs; none without peers.

    Args:
        settings: None where there are no peers.
        relay: Takes what is for other routers.
        receiver: Takes what they say.
        router_id: First part of our picks' ids.
        on_entries: Called with access log entries that a peer passed on, and its link.
        on_lost: Called with a link that has closed, or whose peer may have missed entries.
        num_losses: Returns how often this router may have missed entries for others.
        on_num_routers: Called with the number of routers, including this one, when it changes.
        on_garbage: Called for each message of a peer that cannot be parsed.
        observers: Calls the relay: no request and no access log depends on peers.
        clock: Monotonic seconds.
        rng: For the pauses between connection attempts.
    """

    def __init__(
        self,
        settings: PeerSettings | None,
        relay: Relay,
        receiver: UpdateReceiver,
        *,
        router_id: str,
        on_entries: OnEntries,
        on_lost: Callable[[Hashable], None],
        num_losses: Callable[[], int],
        on_num_routers: Callable[[int], None],
        on_garbage: Callable[[], None],
        observers: Observers,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._settings = settings
        self._observers = observers
        self._router_id = router_id
        self._on_num_routers = on_num_routers
        self._rng = rng
        self._relay, self._receiver = relay, receiver
        self._service = PeersService(
            relay,
            router_id,
            links=receiver.links,
            listener=receiver,
            on_entries=on_entries,
            on_lost=on_lost,
            num_losses=num_losses,
            clock=clock,
            on_garbage=on_garbage,
            keys=(lambda: None) if settings is None else settings.keys,
            believes_callers=settings is not None and settings.believes_callers,
        )
        self._dialler: PeerDialler | None = None
        self.num_routers = 1

    def methods(self) -> tuple[Method, ...]:
        """Return the methods that peers call."""
        return () if self._settings is None else self._service.methods()

    async def run(self) -> None:
        """Follow the peers until cancelled."""
        settings = self._settings
        if settings is None:
            return
        # Imported here because most routers have no peers.
        from extproc.peers.dialler import PeerDialler

        self._dialler = PeerDialler(
            METHOD,
            self._router_id,
            self._service.dialled,
            rng=self._rng,
            tls=settings.tls,
            tls_name=settings.tls_name,
            on_change=self._recount,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            if settings.follow is not None:
                tasks.create_task(self._follow(settings.follow))
            self._dialler.set_addresses(settings.static)

    def warnings(self) -> list[str]:
        """Return what keeps us from peers, or from knowing them, that only people can change."""
        links = [] if self._dialler is None else self._dialler.warnings()
        return links if self._settings is None else [*links, *self._settings.warnings()]

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

    def add_metrics(self, meters: Meters) -> None:
        """Register the metrics of peers."""
        relay, service = self._relay, self._service
        meters.add_gauge(
            "routers",
            "Routers that discovery lists, including this one. 1 without peers.",
            lambda: self.num_routers,
        )
        meters.add_gauge(
            "peers_connected",
            "Other routers with a link over which this router accepts entries. Without "
            "a key, only links that this router dialled.",
            lambda: len(relay.linked_routers()),
        )
        meters.add_counters(
            "peer_entries",
            "Access log entries exchanged between routers. out: accepted by another. in: received.",
            "direction",
            lambda: {"in": service.num_received, "out": relay.num_sent},
        )
        meters.add_counters(
            "peer_entries_dropped",
            "Entries that no other router accepted. unreachable: no link for "
            "peers.hold_s. full: more than peers.max_queued_bytes, or entries for 256 "
            "routers wait. too_large: more than 1 MiB.",
            "reason",
            lambda: dict(relay.num_dropped),
        )
        self._receiver.add_metrics(meters)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._observers.call("relay", self._service.tick)

    async def _follow(self, follow: Callable[[OnEndpoints], Awaitable[None]]) -> None:
        await follow(self._on_endpoints)

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
