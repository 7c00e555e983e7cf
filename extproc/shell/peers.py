"""`extproc.v1.Peers`: the link between two replicas of this router, from either end.

Links carry access log entries (`core.relay` decides which and when); this file encodes and decodes
them. The end that listens and the end that dials (`peerdial`) run the same session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from google.protobuf.message import DecodeError

from extproc.core.relay import Link, Relay
from extproc.shell.gen import peers_pb2
from extproc.shell.rpc import NO_SESSION, Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Peers/Link"

MAX_LINKS = 256
"""Links that others may open to us; far more than the replicas of one router."""
MAX_ROUTER_ID_CHARS = 64
"""Length of a peer's id; ours have 8."""

OnEntries = Callable[[Sequence[bytes]], None]
OnHello = Callable[[str], None]

_ACKNOWLEDGEMENT = peers_pb2.PeerMessage(
    acknowledgement=peers_pb2.Acknowledgement()
).SerializeToString()


@dataclass(eq=False)
class PeersService:
    """All links of this process, whoever dialled.

    Attributes:
        relay: Holds the entries to send.
        on_entries: Called with the entries relayed by a peer.
        clock: Monotonic seconds.
        on_garbage: Called once per malformed message.
        num_received: Entries relayed by peers.
    """

    relay: Relay
    router_id: str
    _: KW_ONLY
    on_entries: OnEntries
    clock: Callable[[], float]
    on_garbage: Callable[[], None] = lambda: None
    num_received: int = 0
    _sessions: list[_Session] = field(default_factory=list)
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
        self.relay.tick(now=now)

    def record(self, entries: Sequence[bytes]) -> None:
        """Record entries relayed by a peer."""
        self.num_received += len(entries)
        self.on_entries(entries)

    def closed(self, session: _Session, *, is_inbound: bool) -> None:
        """Forget a closed session."""
        self._sessions.remove(session)
        self._num_inbound -= is_inbound

    def _accept(self, call: Call, metadata: Metadata) -> Session:
        if self._num_inbound >= MAX_LINKS:
            call.end(Code.RESOURCE_EXHAUSTED, "too many links")
            return NO_SESSION
        return self._begin(call, lambda _: None, is_inbound=True)

    def _begin(self, call: Call, on_hello: OnHello, *, is_inbound: bool) -> _Session:
        session = _Session(self, call, on_hello, is_inbound=is_inbound)
        self._sessions.append(session)
        self._num_inbound += is_inbound
        return session


class _Session:
    """One end of one link."""

    def __init__(
        self, service: PeersService, call: Call, on_hello: OnHello, *, is_inbound: bool
    ) -> None:
        self.link: Link | None = None
        self._service = service
        self._call = call
        self._on_hello = on_hello
        self._is_inbound = is_inbound
        self._has_hello = False
        self._is_over = False
        hello = peers_pb2.Hello(router_id=service.router_id)
        call.send(peers_pb2.PeerMessage(hello=hello).SerializeToString())

    def receive(self, message: bytes) -> None:
        if self._is_over:
            return
        try:
            content = peers_pb2.PeerMessage.FromString(message)
        except DecodeError:
            self._service.on_garbage()
            self.end(Code.INVALID_ARGUMENT, "not a peer's message")
            return
        kind = content.WhichOneof("content")
        if kind == "hello":
            self._handle_hello(content.hello.router_id)
        elif not self._has_hello:
            self.end(Code.FAILED_PRECONDITION, "no hello")
        elif self.link is not None:
            self._handle(self.link, content)

    def half_close(self) -> None:
        self.end()

    def closed(self) -> None:
        self._service.closed(self, is_inbound=self._is_inbound)
        self._drop_link()

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """End the link."""
        self._is_over = True
        self._drop_link()
        self._call.end(code, details)

    def _handle_hello(self, router_id: str) -> None:
        if self._has_hello or not 0 < len(router_id) <= MAX_ROUTER_ID_CHARS:
            self.end(Code.INVALID_ARGUMENT, "a second hello, or an id not of 1 to 64 chars")
            return
        self._has_hello = True
        self._on_hello(router_id)
        if router_id == self._service.router_id:
            self.end()  # we dialled ourselves
            return
        service = self._service
        self.link = service.relay.open(router_id, self._send, now=service.clock())

    def _handle(self, link: Link, content: peers_pb2.PeerMessage) -> None:
        if content.HasField("entries"):
            entries = list(content.entries.log_entries)
            if entries:
                link.has_relayed = True
                self._service.record(entries)
            self._call.send(_ACKNOWLEDGEMENT)
        elif content.HasField("acknowledgement"):
            self._service.relay.acknowledged(link, now=self._service.clock())

    def _send(self, batch: Sequence[bytes]) -> None:
        entries = peers_pb2.Entries(log_entries=batch)
        self._call.send(peers_pb2.PeerMessage(entries=entries).SerializeToString())

    def _drop_link(self) -> None:
        if self.link is not None:
            self._service.relay.close(self.link, now=self._service.clock())
            self.link = None
