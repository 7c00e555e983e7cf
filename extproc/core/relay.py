"""Finished requests that another router picked: kept until that router has taken them.

Envoy sends its access log to one of several routers, whichever picked. That one passes each entry
on to the router whose pick it ends.

1. An entry waits in the queue of its router until a link to that router is idle. A link carries one
   batch at a time, and is idle again once the other side has acknowledged it.
2. What a link had not got acknowledged when it ended goes back to the head of its queue: an entry
   may arrive twice, which ends a pick once.
3. A router without a link may be about to open one (it has just started, or the network is back):
   its entries wait for `hold_s` and are then dropped as `unreachable`.
4. All queues together hold `max_queued_bytes`, and there are `MAX_QUEUES`; what comes beyond that
   is dropped as `full`, and an entry that no link would take as `too_large`.
5. What came from another router is never offered here, so nothing travels in circles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from extproc.core.pickids import router_of

Send = Callable[[Sequence[bytes]], None]

FULL = "full"
UNREACHABLE = "unreachable"
TOO_LARGE = "too_large"

MAX_BATCH_BYTES = 512 * 1024
"""Of entries in one message, unless one alone is larger. Receivers of ours take twice that."""
MAX_ENTRY_BYTES = 2 * MAX_BATCH_BYTES - 1024
"""Of one entry: with what a message has around it, the most that a receiver takes."""
MAX_QUEUES = 256
"""Routers that entries are kept for; far above the replicas of one router."""


def count_routers(own_id: str, listed: Iterable[str | None]) -> int:
    """How many routers there are, ourselves included.

    Args:
        own_id: Ours.
        listed: For each address that discovery lists, which router answers there; None as long as
            that is not known. Such an address counts as one router, which may be ourselves: until
            every address has answered we cannot know whether we are listed.
    """
    ids = list(listed)
    known = {each for each in ids if each is not None}
    num_unknown = ids.count(None)
    if not num_unknown:
        known.add(own_id)
    return max(1, len(known) + num_unknown)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits of a relay.

    Attributes:
        max_queued_bytes: Entries of all routers together, those on their way included.
        hold_s: How long entries wait for a router that has no link.
        heartbeat_s: After such a time without a word, an empty batch asks for a sign of life.
        ack_timeout_s: A link that has not acknowledged a batch after such a time is dead.
    """

    max_queued_bytes: int = 16 * 1024 * 1024
    hold_s: float = 10.0
    heartbeat_s: float = 2.0
    ack_timeout_s: float = 5.0


@dataclass(eq=False, slots=True)
class Link:
    """One way to another router.

    Attributes:
        router_id: The other router.
        send: Puts a batch on its way; must not call back.
        sent_at_s: When the last batch left.
        is_waiting: The last batch has not been acknowledged.
        has_relayed: The other side has sent entries over this link.
        batch: Entries on their way, with the time of their arrival here.
    """

    router_id: str
    send: Send
    sent_at_s: float = 0.0
    is_waiting: bool = False
    has_relayed: bool = False
    batch: list[tuple[float, bytes]] = field(default_factory=list)


class Relay:
    """All queues and links of one router.

    Attributes:
        num_sent: Entries that other routers have acknowledged.
        num_dropped: Entries dropped, by reason.
    """

    def __init__(self, settings: RelaySettings | None = None) -> None:
        self._settings = settings or RelaySettings()
        self._links: list[Link] = []
        self._queues: dict[str, deque[tuple[float, bytes]]] = {}
        self._num_bytes = 0
        self.num_sent = 0
        self.num_dropped: Counter[str] = Counter(dict.fromkeys((FULL, UNREACHABLE, TOO_LARGE), 0))

    # --- what there is to carry --------------------------------------------------------------

    def pass_on(self, pick_id: str, entry: bytes, *, now: float) -> None:
        """Queue an entry that is not about a pick of ours.

        One without a pick's id may be anybody's: a request whose metadata was lost is found by its
        request id. One with an id that names no router is nobody's.
        """
        named = router_of(pick_id)
        anybody = () if pick_id else self.linked_routers()
        for router_id in (named,) if named else anybody:
            self.offer(router_id, entry, now=now)

    def offer(self, router_id: str, entry: bytes, *, now: float) -> None:
        """Queue an entry about a pick of `router_id`; it leaves with the next `flush`."""
        reason = self._why_not(router_id, entry)
        if reason is not None:
            self.num_dropped[reason] += 1
            return
        self._num_bytes += len(entry)
        self._queues.setdefault(router_id, deque()).append((now, entry))

    def flush(self, *, now: float) -> None:
        """Send what waits for a link that is idle."""
        for link in self._links:
            if not link.is_waiting and self._queues.get(link.router_id):
                self._send(link, now)

    # --- links -------------------------------------------------------------------------------

    def open(self, router_id: str, send: Send, *, now: float) -> Link:
        """Open a link to a router, and send what has waited for it."""
        link = Link(router_id, send, sent_at_s=now)
        self._links.append(link)
        self.flush(now=now)
        return link

    def acknowledged(self, link: Link, *, now: float) -> None:
        """The other side has taken the last batch."""
        if not link.is_waiting:
            return
        link.is_waiting = False
        self.num_sent += len(link.batch)
        self._forget(entry for _, entry in link.batch)
        link.batch = []
        self.flush(now=now)

    def close(self, link: Link, *, now: float) -> None:
        """A way has ended. What was on it takes another one."""
        self._links.remove(link)
        if link.batch:
            self._queues.setdefault(link.router_id, deque()).extendleft(reversed(link.batch))
            link.batch = []
        link.is_waiting = False
        self.flush(now=now)

    def is_dead(self, link: Link, *, now: float) -> bool:
        """Whether an acknowledgement is overdue: close the link."""
        return link.is_waiting and now - link.sent_at_s > self._settings.ack_timeout_s

    # --- upkeep ------------------------------------------------------------------------------

    def tick(self, *, now: float) -> None:
        """Drop what waited too long for a link; ask silent links for a sign of life."""
        linked = self.linked_routers()
        for router_id, queue in list(self._queues.items()):
            if router_id not in linked:
                self._expire(queue, now - self._settings.hold_s)
            if not queue:
                del self._queues[router_id]
        for link in self._links:
            if not link.is_waiting and now - link.sent_at_s >= self._settings.heartbeat_s:
                self._send(link, now)

    # --- what may be read --------------------------------------------------------------------

    @property
    def num_queued_bytes(self) -> int:
        """Entries that wait or are on their way."""
        return self._num_bytes

    @property
    def has_work(self) -> bool:
        """Whether an entry waits for, or is on its way to, a router that has a link."""
        return any(link.batch or self._queues.get(link.router_id) for link in self._links)

    @property
    def is_fed(self) -> bool:
        """Whether some other router passes an access log on to us."""
        return any(link.has_relayed for link in self._links)

    def linked_routers(self) -> set[str]:
        """Routers to which there is a link."""
        return {link.router_id for link in self._links}

    def _why_not(self, router_id: str, entry: bytes) -> str | None:
        """The reason to drop an entry, if there is one."""
        if len(entry) > MAX_ENTRY_BYTES:
            return TOO_LARGE
        is_full = self._num_bytes + len(entry) > self._settings.max_queued_bytes
        is_new = router_id not in self._queues
        return FULL if is_full or (is_new and len(self._queues) >= MAX_QUEUES) else None

    def _send(self, link: Link, now: float) -> None:
        link.batch = self._take(link.router_id)
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
        self._num_bytes -= sum(map(len, entries))
