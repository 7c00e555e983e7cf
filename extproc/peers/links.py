"""The links between the replicas of this router, and the messages over them.

Sums of picks go to each router over one link, the oldest that it listens to. Nobody acknowledges
them. A link that is slow to acknowledge entries gets no more than `MAX_UNREAD_BYTES` of them. The
rest is dropped, and made good by the next whole update that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.link import OnHello, PeerLink, Service
from extproc.peers.peermessages import encode_adapters
from extproc.wire.rpc import NO_SESSION, Call, Code, Metadata, Method, Session


class Links:
    """All links of this process, whoever dialled.

    Attributes:
        num_sent: Picks sent, once for each router.
        num_unsent: Updates not sent because a link was slow.
    """

    def __init__(self) -> None:
        self._sessions: list[PeerLink] = []
        self._telling: dict[str, PeerLink] = {}
        self.num_sent = self.num_unsent = 0

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(list(self._sessions))

    @property
    def is_telling(self) -> bool:
        """Whether there is a router to tell."""
        return bool(self._telling)

    def say(self, update: AdapterUpdate) -> None:
        """Say to every router what is with adapters, over each link: one of them may be another's
        who only says that it is that router.
        """
        message = encode_adapters(update)
        for session in self:
            if session.is_heard:
                session.post(message)

    def tell(self, message: bytes, num_picks: int) -> None:
        """Send an update, of so many new picks, to every router with a link.

        Raises:
            ExceptionGroup: Links failed; the rest got the message.
        """
        failures: list[Exception] = []
        for session in [*self._telling.values()]:
            try:
                if session.post(message):
                    self.num_sent += num_picks
                else:
                    self.num_unsent += 1
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("links failed", failures)

    def add(self, session: PeerLink) -> None:
        """Add a link that is not open yet."""
        self._sessions.append(session)

    def remove(self, session: PeerLink) -> None:
        """Forget a link that has closed."""
        self._sessions.remove(session)

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Tell a router our picks over a link that it listens to, unless there is another one."""
        if session.is_heard:
            self._telling.setdefault(router_id, session)

    def lost(self, router_id: str, session: PeerLink) -> bool:
        """Tell the router over another link; return whether this was the last one from it."""
        links = [each for each in self._sessions if each.link and each.link.router_id == router_id]
        if self._telling.get(router_id) is session:
            del self._telling[router_id]
            for other in links:
                self.opened(router_id, other)
        return session.is_believed and not any(each.is_believed for each in links)


# --- `extproc.v1.Peers`: the link between two replicas of this router, from either end.
#
# Links carry access log entries (`peers.relay` decides which and when) and what routers tell each
# other of their picks (`Links`). The end that listens and the end that dials (`dialler`) run the
# same session, a `link`.
#
# A link is for both directions where each side knows who the other is: by a key that they share,
# or by TLS. Else the side that dials listens alone: it found the other at an address of its own
# discovery, and of itself it can prove nothing.

METHOD = "/extproc.v1.Peers/Link"

MAX_LINKS = 256
"""Links that other routers may open to us; far more than the replicas of one router."""
OPEN_S = 5.0
"""From the start of a link to the other side's hello, and its proof where there is a key."""

OnEntries = Callable[[Sequence[bytes], Hashable], None]


@dataclass(eq=False)
class PeersService(Service):
    """Opens and ends links, whoever dials.

    Attributes:
        links: The present links.
        on_entries: Called with the entries relayed by a peer, and its link.
        on_lost: Called with a link that has closed, or whose peer may have missed entries.
        num_received: Entries relayed by peers.
    """

    _: KW_ONLY
    links: Links
    on_entries: OnEntries
    on_lost: Callable[[Hashable], None] = lambda _: None
    num_received: int = 0

    def methods(self) -> tuple[Method, ...]:
        """Return Link."""
        return (Method(METHOD, self._accept, is_long_lived=True),)

    def dialled(self, call: Call, on_hello: OnHello) -> Session:
        """Begin a link that we opened; `on_hello` is called with the other router's id."""
        return self._begin(call, on_hello, is_inbound=False)

    def tick(self) -> None:
        """End links without answers, probe silent ones, and drop entries that waited too long."""
        now = self.clock()
        for session in self.links:
            if session.link is not None and self.relay.is_dead(session.link, now=now):
                session.end(Code.DEADLINE_EXCEEDED, "no acknowledgement")
            elif session.link is None and now - session.begun_at_s > OPEN_S:
                session.end(Code.DEADLINE_EXCEEDED, "no hello, or no proof")
        self.relay.tick(now=now)

    def record(self, entries: Sequence[bytes], link: PeerLink) -> None:
        """Record entries relayed by a peer."""
        self.num_received += len(entries)
        self.on_entries(entries, link)

    def missed(self, link: PeerLink) -> None:
        """Take note that a peer may have missed entries."""
        self.on_lost(link)

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Send a router's messages over a link, if it listens to that one first."""
        self.links.opened(router_id, session)
        self.listener.begin()

    def lost(self, router_id: str, session: PeerLink) -> None:
        """Send a router's messages over another link, or forget it."""
        self.on_lost(session)
        if self.links.lost(router_id, session):
            self.listener.forget(router_id)
        else:
            self.listener.begin()

    def closed(self, session: PeerLink) -> None:
        """Forget a closed session."""
        self.links.remove(session)

    def _accept(self, call: Call, metadata: Metadata) -> Session:
        num_inbound = sum(each.is_inbound for each in self.links)
        if num_inbound >= MAX_LINKS and not self._make_room():
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
        return session
