"""`extproc.v1.Peers`: the link between two replicas of this router, from either end.

Links carry access log entries (`peers.relay` decides which and when) and the picks that routers
tell each other (`links`). The end that listens and the end that dials (`dialler`) run the same
session, a `link`.

A link is for both directions where each side knows who the other is: by a key that they share, or
by TLS. Else the side that dials listens alone: it found the other at an address of its own
discovery, and of itself it can prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from extproc.peers.link import OnHello, PeerLink, PeerListener
from extproc.peers.links import Links
from extproc.peers.relay import Relay
from extproc.wire.rpc import NO_SESSION, Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Peers/Link"

MAX_LINKS = 256
"""Links that others may open to us; far more than the replicas of one router."""
OPEN_S = 5.0
"""From the beginning of a link to the other side's hello, and its proof where there is a key."""

OnEntries = Callable[[Sequence[bytes]], None]


@dataclass(eq=False)
class PeersService:
    """Opens and ends links, whoever dials.

    Attributes:
        relay: Holds the entries to send.
        links: Those that are there.
        listener: Takes what routers say.
        on_entries: Called with the entries relayed by a peer.
        clock: Monotonic seconds.
        on_garbage: Called once per malformed message.
        keys: Returns the keys that prove who is a peer, ours first; called for each link. None
            where there are none.
        believes_callers: Whether whoever calls is believed without a key: TLS knows who that is.
        num_received: Entries relayed by peers.
    """

    relay: Relay
    router_id: str
    _: KW_ONLY
    links: Links
    listener: PeerListener
    on_entries: OnEntries
    clock: Callable[[], float]
    on_garbage: Callable[[], None] = lambda: None
    keys: Callable[[], Sequence[bytes] | None] = lambda: None
    believes_callers: bool = False
    num_received: int = 0
    _num_inbound: int = 0

    def methods(self) -> tuple[Method, ...]:
        """Return Link."""
        return (Method(METHOD, self._accept, is_long_lived=True),)

    def dialled(self, call: Call, on_hello: OnHello) -> Session:
        """Begin a link that we opened; `on_hello` is called with the other router's id."""
        return self._begin(call, on_hello, is_inbound=False)

    def tick(self) -> None:
        """End dead links, probe silent ones, and drop entries that waited too long."""
        now = self.clock()
        for session in self.links:
            if session.link is not None and self.relay.is_dead(session.link, now=now):
                session.end(Code.DEADLINE_EXCEEDED, "no acknowledgement")
            elif session.link is None and now - session.begun_at_s > OPEN_S:
                session.end(Code.DEADLINE_EXCEEDED, "no hello, or no proof")
        self.relay.tick(now=now)

    def record(self, entries: Sequence[bytes]) -> None:
        """Record entries relayed by a peer."""
        self.num_received += len(entries)
        self.on_entries(entries)

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Have a router told over a link, if it listens to that one first."""
        self.links.opened(router_id, session)
        self._begin_those_that_owe()

    def lost(self, router_id: str, session: PeerLink) -> None:
        """Have a router told over another link, or forget it."""
        is_gone = self.links.lost(router_id, session)
        self._begin_those_that_owe()
        if is_gone:
            self.listener.forget(router_id)

    def closed(self, session: PeerLink, *, is_inbound: bool) -> None:
        """Forget a closed session."""
        self.links.remove(session)
        self._num_inbound -= is_inbound

    def _begin_those_that_owe(self) -> None:
        if self.links.is_owing:
            self.listener.begin()

    def _accept(self, call: Call, metadata: Metadata) -> Session:
        if self._num_inbound >= MAX_LINKS and not self._make_room():
            call.end(Code.RESOURCE_EXHAUSTED, "too many links")
            return NO_SESSION
        return self._begin(call, lambda _: None, is_inbound=True)

    def _make_room(self) -> bool:
        """End the oldest link to us that is not open; return whether there is one."""
        unopened = (each for each in self.links if each.is_inbound and not each.is_open)
        oldest = next(unopened, None)
        if oldest is not None:
            oldest.end(Code.RESOURCE_EXHAUSTED, "too many links, and this one is not open")
        return oldest is not None

    def _begin(self, call: Call, on_hello: OnHello, *, is_inbound: bool) -> PeerLink:
        session = PeerLink(self, call, on_hello, is_inbound=is_inbound)
        self.links.add(session)
        self._num_inbound += is_inbound
        return session
