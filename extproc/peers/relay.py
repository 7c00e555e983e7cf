"""Access log entries about the picks of other routers: kept until those have acknowledged them.

Envoy sends its access log to one of several routers, no matter which of them picked. The receiver
passes each entry on to the router whose pick it ends.

1. An entry waits in the queue of its router until a link to that router is idle. A link carries one
   batch at a time, and is idle again once the other side has acknowledged it.
2. A batch that was not acknowledged when its link closed goes back to the head of the queue: an
   entry may arrive twice, which ends a pick once.
3. A router without a link may be about to open one, as it has just started or the network is back.
   Its entries wait for `hold_s` and are then dropped as `unreachable`.
4. All queues together hold `max_queued_bytes`, and there are `MAX_QUEUES`. Entries beyond that are
   dropped as `full`, and an entry too large for any link as `too_large`.
5. Entries from another router are never offered here, so nothing travels in circles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from extproc.pods.peerpicks import router_of

Send = Callable[[Sequence[bytes]], None]

FULL = "full"
UNREACHABLE = "unreachable"
TOO_LARGE = "too_large"

MAX_BATCH_BYTES = 512 * 1024
"""Of entries in one message, unless one alone is larger. Our receivers accept twice that."""
MAX_ENTRY_BYTES = 2 * MAX_BATCH_BYTES - 1024
"""Of one entry: with a message's framing around it, the most that a receiver accepts."""
MAX_QUEUES = 256
"""Routers that entries are kept for; far above the replicas of one router."""


def count_routers(own_id: str, listed: Iterable[str | None]) -> int:
    """Return how many routers there are, this one included.

    Args:
        own_id: This router's id.
        listed: The router's id behind each address that discovery lists, None where unknown. Such
            an address counts as one router, which may be this one: until every address has
            responded we cannot know whether we are listed.
    """
    ids = list(listed)
    known = {each for each in ids if each is not None}
    num_unknown = ids.count(None)
    if not num_unknown:
        known.add(own_id)
    return max(1, len(known) + num_unknown)


class RelaySettings(Struct, frozen=True):
    """Limits of a relay."""

    max_queued_bytes: int = 16 * 1024 * 1024  # for all routers together, those in transit included
    hold_s: float = 10.0  # how long entries wait for a router without a link
    heartbeat_s: float = 2.0  # silence after which an empty batch is sent
    ack_timeout_s: float = 5.0  # a link whose batch is not acknowledged for so long is dead


@dataclass(eq=False, slots=True)
class Link:
    """A connection to another router."""

    router_id: str
    send: Send  # sends a batch; must not call back
    sent_at_s: float = 0.0  # when the last batch was sent
    is_waiting: bool = False  # the last batch has not been acknowledged
    has_relayed: bool = False  # the other side has sent entries over this link
    is_heard: bool = True  # the other side takes entries from us; else it gets signs of life alone
    batch: list[tuple[float, bytes]] = field(default_factory=list)  # in transit: (arrival, entry)


class Relay:
    """All queues and links of one router.

    Attributes:
        num_queued_bytes: Of entries that wait or are in transit.
        num_sent: Entries that other routers have acknowledged.
        num_dropped: Entries dropped, by reason.
    """

    def __init__(self, settings: RelaySettings | None = None) -> None:
        self._settings = settings or RelaySettings()
        self._links: list[Link] = []
        self._queues: dict[str, deque[tuple[float, bytes]]] = {}
        self.num_queued_bytes = 0
        self.num_sent = 0
        self.num_dropped: Counter[str] = Counter(dict.fromkeys((FULL, UNREACHABLE, TOO_LARGE), 0))

    # --- entries -----------------------------------------------------------------------------

    def pass_on(self, pick_id: str, entry: bytes, *, now: float) -> None:
        """Queue an entry that is not about a pick of this router.

        One without a pick id may belong to any router: a request whose metadata was lost is found
        by its request id. One whose id names no router belongs to none.
        """
        named = router_of(pick_id)
        all_routers = () if pick_id else self.linked_routers()
        for router_id in (named,) if named else all_routers:
            self.offer(router_id, entry, now=now)

    def offer(self, router_id: str, entry: bytes, *, now: float) -> None:
        """Queue an entry about a pick of `router_id`; it leaves with the next `flush`."""
        reason = self._drop_reason(router_id, entry)
        if reason is not None:
            self.num_dropped[reason] += 1
            return
        self.num_queued_bytes += len(entry)
        self._queues.setdefault(router_id, deque()).append((now, entry))

    def flush(self, *, now: float) -> None:
        """Send the entries that wait for a link that is idle."""
        for link in self._links:
            if link.is_heard and not link.is_waiting and self._queues.get(link.router_id):
                self._send(link, now)

    # --- links -------------------------------------------------------------------------------

    def open(self, router_id: str, send: Send, *, now: float, is_heard: bool = True) -> Link:
        """Open a link to a router, and send the entries that wait for it."""
        link = Link(router_id, send, sent_at_s=now, is_heard=is_heard)
        self._links.append(link)
        self.flush(now=now)
        return link

    def acknowledged(self, link: Link, *, now: float) -> None:
        """Record that the other side has acknowledged the last batch."""
        if not link.is_waiting:
            return
        link.is_waiting = False
        self.num_sent += len(link.batch)
        self._forget(entry for _, entry in link.batch)
        link.batch = []
        self.flush(now=now)

    def close(self, link: Link, *, now: float) -> None:
        """Close a link; the entries in transit go back to their queue."""
        self._links.remove(link)
        if link.batch:
            self._queues.setdefault(link.router_id, deque()).extendleft(reversed(link.batch))
            link.batch = []
        link.is_waiting = False
        self.flush(now=now)

    def is_dead(self, link: Link, *, now: float) -> bool:
        """Return whether an acknowledgement is overdue: close the link."""
        return link.is_waiting and now - link.sent_at_s > self._settings.ack_timeout_s

    def probe(self, link: Link, *, now: float) -> None:
        """Ask the other side for an acknowledgement, unless one is on its way."""
        if not link.is_waiting:
            self._send(link, now)

    # --- upkeep ------------------------------------------------------------------------------

    def tick(self, *, now: float) -> None:
        """Drop entries that waited too long for a link; send heartbeats on silent links."""
        linked = self.linked_routers()
        for router_id, queue in list(self._queues.items()):
            if router_id not in linked:
                self._expire(queue, now - self._settings.hold_s)
            if not queue:
                del self._queues[router_id]
        for link in self._links:
            if not link.is_waiting and now - link.sent_at_s >= self._settings.heartbeat_s:
                self._send(link, now)

    # --- state -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether an entry waits for, or is in transit to, a router that has a link."""
        links = [link for link in self._links if link.is_heard]
        return any(link.batch or self._queues.get(link.router_id) for link in links)

    @property
    def is_fed(self) -> bool:
        """Whether another router passes an access log on to this one."""
        return any(link.has_relayed for link in self._links)

    def linked_routers(self) -> set[str]:
        """Return the routers to which there is a link that they take entries from."""
        return {link.router_id for link in self._links if link.is_heard}

    def _drop_reason(self, router_id: str, entry: bytes) -> str | None:
        """Return the reason to drop an entry, if there is one."""
        if len(entry) > MAX_ENTRY_BYTES:
            return TOO_LARGE
        is_full = self.num_queued_bytes + len(entry) > self._settings.max_queued_bytes
        is_new = router_id not in self._queues
        return FULL if is_full or (is_new and len(self._queues) >= MAX_QUEUES) else None

    def _send(self, link: Link, now: float) -> None:
        link.batch = self._take(link.router_id) if link.is_heard else []
        link.is_waiting, link.sent_at_s = True, now
        link.send([entry for _, entry in link.batch])

    def _take(self, router_id: str) -> list[tuple[float, bytes]]:
        queue = self._queues.get(router_id)
        batch: list[tuple[float, bytes]] = []
        num_bytes = 0
        while queue and (not batch or num_bytes + len(queue[0][1]) <= MAX_BATCH_BYTES):
            batch.append(queue.popleft())
            num_bytes += len(batch[-1][1])
        return batch

    def _expire(self, queue: deque[tuple[float, bytes]], before_s: float) -> None:
        while queue and queue[0][0] < before_s:
            _, entry = queue.popleft()
            self._forget((entry,))
            self.num_dropped[UNREACHABLE] += 1

    def _forget(self, entries: Iterable[bytes]) -> None:
        self.num_queued_bytes -= sum(map(len, entries))
