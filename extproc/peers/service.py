"""`extproc.v1.Peers`: the link between two replicas of this router, from either end.

Links carry access log entries (`peers.relay` decides which and when) and the picks that routers
tell each other. The end that listens and the end that dials (`dialler`) run the same session, a
`link`.

A link is for both directions where each side knows who the other is: by a key that they share, or
by TLS. Else the side that dials listens alone: it found the other at an address of its own
discovery, and of itself it can prove nothing.

Picks go to each router over one link, the oldest that it listens to, which begins with those in
flight. Nobody acknowledges them: a link that is slow to acknowledge entries gets no more than
`MAX_UNREAD_BYTES` of them, the rest is dropped, ends too, and once the link has read it begins
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import inf

from extproc.adapters.peers import Word
from extproc.fleet.peerpicks import ToldEnd, ToldPick
from extproc.peers.encoding import MAX_TOLD, Tidings, encode, encode_word, split
from extproc.peers.link import MAX_UNREAD_BYTES, OnHello, PeerLink
from extproc.peers.relay import Relay
from extproc.queue import Waiting
from extproc.wire.rpc import NO_SESSION, Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Peers/Link"

MAX_LINKS = 256
"""Links that others may open to us; far more than the replicas of one router."""
MAX_FIRST_BYTES = MAX_UNREAD_BYTES // 2
"""Of the picks that a link begins with, some 5,000; the oldest beyond that are not told."""
OPEN_S = 5.0
"""From the beginning of a link to the other side's hello, and its proof where there is a key."""
BEGIN_INTERVAL_S = 1.0
"""Links that open within this begin together: to tell 20,000 picks takes some 30 ms."""

OnTidings = Callable[[str, Tidings], None]
OnEntries = Callable[[Sequence[bytes]], None]
OnWord = Callable[[str, Word], None]


@dataclass(eq=False)
class PeersService:
    """All links of this process, whoever dialled.

    Attributes:
        relay: Holds the entries to send.
        on_entries: Called with the entries relayed by a peer.
        clock: Monotonic seconds.
        on_garbage: Called once per malformed message.
        on_tidings: Called with the id of a router and what it tells.
        on_word: Called with the id of a router and what it says of adapters.
        on_gone: Called with the id of a router to which the last link has closed.
        on_owing: Called when a link is to begin: call `tell` soon, while `is_owing`.
        in_flight: Returns the picks that a new link is to begin with, the oldest first; None to
            tell nothing.
        keys: Returns the keys that prove who is a peer, ours first; called for each link. None
            where there are none.
        believes_callers: Whether whoever calls is believed without a key: TLS knows who that is.
        num_received: Entries relayed by peers.
        num_told: Picks told, once for each router.
        num_untold: Picks and ends not told because a link was slow.
    """

    relay: Relay
    router_id: str
    _: KW_ONLY
    on_entries: OnEntries
    clock: Callable[[], float]
    on_garbage: Callable[[], None] = lambda: None
    on_tidings: OnTidings = lambda _router_id, _tidings: None
    on_word: OnWord = lambda _router_id, _word: None
    on_gone: Callable[[str], None] = lambda _router_id: None
    on_owing: Callable[[], None] = lambda: None
    in_flight: Callable[[], Sequence[ToldPick]] | None = None
    keys: Callable[[], Sequence[bytes] | None] = lambda: None
    believes_callers: bool = False
    num_received: int = 0
    num_told: int = 0
    num_untold: int = 0
    _sessions: list[PeerLink] = field(default_factory=list)
    _telling: dict[str, PeerLink] = field(default_factory=dict)
    _begun_at_s: float = -inf
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
        for session in list(self._sessions):
            if session.link is not None and self.relay.is_dead(session.link, now=now):
                session.end(Code.DEADLINE_EXCEEDED, "no acknowledgement")
            elif session.link is None and now - session.begun_at_s > OPEN_S:
                session.end(Code.DEADLINE_EXCEEDED, "no hello, or no proof")
        self.relay.tick(now=now)

    def record(self, entries: Sequence[bytes]) -> None:
        """Record entries relayed by a peer."""
        self.num_received += len(entries)
        self.on_entries(entries)

    @property
    def is_telling(self) -> bool:
        """Whether there is a router to tell."""
        return bool(self._telling)

    @property
    def is_owing(self) -> bool:
        """Whether a link is to begin."""
        return not all(session.has_begun for session in self._telling.values())

    def say(self, word: Word) -> None:
        """Say to every router what is with adapters, over each link: one of them may be another's
        who only says that it is that router.
        """
        message = encode_word(word)
        for session in list(self._sessions):
            if session.is_heard:
                session.post(message)

    def tell(
        self,
        picks: Iterable[ToldPick],
        ends: Iterable[ToldEnd],
        waiting: Waiting | None = None,
    ) -> None:
        """Tell every router with a link, and begin the links that have not begun.

        Args:
            waiting: Who waits here, if that has changed or links are to begin.

        Raises:
            ExceptionGroup: Links failed; the others have been told.
        """
        sessions = list(self._telling.values())
        begun = [session for session in sessions if session.has_begun]
        told = list(split(picks, ends))
        if waiting is not None:
            told.append(Tidings(waiting=waiting))
        failures = _tell(begun, ((each, encode(each)) for each in told))
        now = self.clock()
        if len(begun) < len(sessions) and now - self._begun_at_s >= BEGIN_INTERVAL_S:
            self._begun_at_s = now
            new = [session for session in sessions if not session.has_begun]
            for session in new:
                session.has_begun = True
            failures += _tell(new, self._first(len(new), waiting))
        if failures:
            raise ExceptionGroup("links failed", failures)

    def begin_again(self) -> None:
        """Begin every link again with the next `tell`s: something could not be told."""
        for session in self._telling.values():
            session.has_begun = False

    def _first(self, num_links: int, waiting: Waiting | None) -> list[tuple[Tidings, bytes]]:
        """Return the messages that so many links begin with, the oldest pick first."""
        assert self.in_flight is not None
        picks, told, num_bytes = list(self.in_flight()), [], 0
        while picks:
            tidings = Tidings(picks[-MAX_TOLD:])
            message = encode(tidings)
            num_bytes += len(message)
            if num_bytes > MAX_FIRST_BYTES:
                break
            told.append((tidings, message))
            del picks[-MAX_TOLD:]
        self.num_untold += len(picks) * num_links
        first = Tidings(is_first=True, waiting=waiting)
        return [(first, encode(first)), *reversed(told)]

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Tell a router our picks over a link that it listens to, unless there is another one."""
        if self.in_flight is None or not session.is_heard:
            return
        if router_id not in self._telling:
            self._telling[router_id] = session
            self.on_owing()

    def lost(self, router_id: str, session: PeerLink) -> None:
        """Tell the router over another link, or forget it."""
        links = [each for each in self._sessions if each.link and each.link.router_id == router_id]
        if self._telling.get(router_id) is session:
            del self._telling[router_id]
            for other in links:
                self.opened(router_id, other)
        if session.is_believed and not any(each.is_believed for each in links):
            self.on_gone(router_id)

    def closed(self, session: PeerLink, *, is_inbound: bool) -> None:
        """Forget a closed session."""
        self._sessions.remove(session)
        self._num_inbound -= is_inbound

    def _accept(self, call: Call, metadata: Metadata) -> Session:
        if self._num_inbound >= MAX_LINKS and not self._make_room():
            call.end(Code.RESOURCE_EXHAUSTED, "too many links")
            return NO_SESSION
        return self._begin(call, lambda _: None, is_inbound=True)

    def _make_room(self) -> bool:
        """End the oldest link to us that is not open; return whether there is one."""
        unopened = (each for each in self._sessions if each.is_inbound and not each.is_open)
        oldest = next(unopened, None)
        if oldest is not None:
            oldest.end(Code.RESOURCE_EXHAUSTED, "too many links, and this one is not open")
        return oldest is not None

    def _begin(self, call: Call, on_hello: OnHello, *, is_inbound: bool) -> PeerLink:
        session = PeerLink(self, call, on_hello, is_inbound=is_inbound)
        self._sessions.append(session)
        self._num_inbound += is_inbound
        return session


def _tell(
    sessions: Collection[PeerLink], messages: Iterable[tuple[Tidings, bytes]]
) -> list[Exception]:
    """Tell links, each until it fails; return the failures."""
    failed: dict[PeerLink, Exception] = {}
    for tidings, message in messages:
        for session in sessions:
            try:
                if session not in failed:
                    session.tell(tidings, message)
            except Exception as error:
                failed[session] = error
    return list(failed.values())
