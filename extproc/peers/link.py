"""One link between two replicas of this router, from either end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.keys import NONCE_BYTES, LinkEnd, Seal, new_nonce, prove, proven_by
from extproc.peers.peermessages import PickUpdate, decode, decode_adapters
from extproc.peers.relay import Link, Relay
from extproc.wire.rpc import Call, Code

log = logging.getLogger(__name__)

MAX_ROUTER_ID_CHARS = 64
"""Length of a peer's id; ours have 8."""
MAX_MESSAGE_BYTES = 1024 * 1024
"""One message of a peer; ours stay below (`relay.MAX_ENTRY_BYTES`). A byte takes up to 50 of
memory."""
MAX_UNREAD_BYTES = 512 * 1024
"""Of sums that a link carries without a sign that the other side has read them."""

OnHello = Callable[[str], None]

_MAX_LOSSES = 2**32 - 1
_ACKNOWLEDGEMENT = peers_pb2.PeerMessage(
    acknowledgement=peers_pb2.Acknowledgement()
).SerializeToString()


class PeerListener(Protocol):
    """Takes what other routers say; must not raise."""

    def begin(self) -> None:
        """A link is to be told all."""

    def hear(self, router_id: str, update: PickUpdate, /) -> None:
        """Take what a router tells."""

    def hear_adapters(self, router_id: str, update: AdapterUpdate, /) -> None:
        """Take what a router says of adapters."""

    def forget(self, router_id: str, /) -> None:
        """The last link to a router has closed."""


@dataclass(eq=False)
class Service:
    """The owner of the links of this process, as one of them sees it.

    Attributes:
        relay: Holds the entries to send.
        listener: Takes the messages of routers.
        clock: Monotonic seconds.
        on_garbage: Called once per malformed message.
        keys: Returns the keys by which peers prove themselves, ours first; called for each link.
            None where there are none.
        believes_callers: Whether callers are trusted without a key: TLS knows who they are.
        num_losses: Returns how often entries may have been missed here.
    """

    relay: Relay
    router_id: str
    _: KW_ONLY
    listener: PeerListener
    clock: Callable[[], float]
    on_garbage: Callable[[], None] = lambda: None
    keys: Callable[[], Sequence[bytes] | None] = lambda: None
    believes_callers: bool = False
    num_losses: Callable[[], int] = lambda: 0

    def record(self, entries: Sequence[bytes], link: PeerLink) -> None:
        """Take entries that a peer relayed."""

    def missed(self, link: PeerLink) -> None:
        """Take note that the other side may have missed entries of an access log."""

    def opened(self, router_id: str, session: PeerLink) -> None:
        """Take note of the other side's hello."""

    def lost(self, router_id: str, session: PeerLink) -> None:
        """Take note that the link has closed."""

    def closed(self, session: PeerLink) -> None:
        """Forget the link."""


class PeerLink:
    """One end of one link.

    Attributes:
        begun_at_s: When it began.
        is_inbound: The other side dialled.
        link: Its place in the relay, from the other side's hello, and proof, to the end.
        is_believed: The other side's messages count.
        is_heard: Our messages count there.
    """

    def __init__(
        self, service: Service, call: Call, on_hello: OnHello, *, is_inbound: bool
    ) -> None:
        self.link: Link | None = None
        self.begun_at_s = service.clock()
        self.is_inbound = is_inbound
        self.is_believed = self.is_heard = False
        self._service = service
        self._call = call
        self._on_hello = on_hello
        self._keys = service.keys()
        self._own = LinkEnd(service.router_id, b"" if self._keys is None else new_nonce())
        self._other: LinkEnd | None = None
        self._sends: Seal | None = None  # the codes of our messages, where there is a key
        self._hears: Seal | None = None  # those of the other side's
        self._is_over = False
        self._num_unread_bytes = 0
        self._num_losses: int | None = None  # of the other side
        self._is_behind = False  # has dropped messages, and has not read since
        hello = peers_pb2.Hello(
            router_id=service.router_id,
            nonce=self._own.nonce,
            believes_callers=service.believes_callers,
        )
        call.send(peers_pb2.PeerMessage(hello=hello).SerializeToString())

    def receive(self, message: bytes) -> None:
        """Handle a message of the other side."""
        if self._is_over:
            return
        if len(message) > MAX_MESSAGE_BYTES:
            self._service.on_garbage()
            self.end(Code.RESOURCE_EXHAUSTED, f"more than {MAX_MESSAGE_BYTES} bytes")
            return
        if self.link is not None and self._hears is not None:
            opened = self._hears.opened(message)
            if opened is None:
                self._refuse("a message that it did not send, or not then")
                return
            message = opened
        try:
            content = peers_pb2.PeerMessage.FromString(message)
        except DecodeError:
            self._service.on_garbage()
            self.end(Code.INVALID_ARGUMENT, "not a peer's message")
            return
        kind, link = content.WhichOneof("content"), self.link
        if kind == "sums" and link is not None:  # as nearly all are
            if self.is_believed:  # a caller may send anything
                self._service.listener.hear(link.router_id, decode(content.sums))
        elif kind == "hello":
            self._handle_hello(content.hello)
        elif self._other is None:
            self.end(Code.FAILED_PRECONDITION, "no hello")
        elif link is not None:
            self._handle(link, kind, content)
        elif kind == "proof" and self._keys:
            self._handle_proof(self._keys, self._other, content.proof.mac)
        else:
            self._refuse("a message before its proof")

    @property
    def is_open(self) -> bool:
        """Whether the link is open or over: it holds no place that another should have."""
        return self.link is not None or self._is_over

    def half_close(self) -> None:
        """End the link: the other side does."""
        self.end()

    def closed(self) -> None:
        """Forget the link, which has ended."""
        self._service.closed(self)
        self._drop_link()

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """End the link."""
        self._is_over = True
        self._drop_link()
        self._call.end(code, details)

    def post(self, message: bytes) -> bool:
        """Send a message that nobody acknowledges; return False if it is dropped."""
        num_bytes = self._num_unread_bytes + len(message)
        if self.link is None or self._is_behind or num_bytes > MAX_UNREAD_BYTES:
            self._is_behind = True
            return False
        self._num_unread_bytes = num_bytes
        self._say(message)
        if num_bytes > MAX_UNREAD_BYTES // 2:
            self._service.relay.probe(self.link, now=self._service.clock())
        return True

    def _handle_hello(self, hello: peers_pb2.Hello) -> None:
        router_id = hello.router_id
        if self._other is not None or not 0 < len(router_id) <= MAX_ROUTER_ID_CHARS:
            self.end(Code.INVALID_ARGUMENT, "a second hello, or an id not of 1 to 64 chars")
            return
        self._other = LinkEnd(router_id, hello.nonce)
        if router_id == self._service.router_id:
            self._on_hello(router_id)
            self.end()  # we dialled ourselves
        elif self._keys is None:
            self.is_believed = not self.is_inbound or self._service.believes_callers
            self.is_heard = self.is_inbound or hello.believes_callers
            self._open(router_id)
        elif not self._keys:
            self._refuse("the file of keys could never be read")
        elif len(hello.nonce) != NONCE_BYTES:
            self._refuse("it has no key")
        elif not self.is_inbound:
            self._prove(self._keys, self._other)

    def _handle_proof(self, keys: Sequence[bytes], other: LinkEnd, mac: bytes) -> None:
        dials, listens = self._ends(other)
        by_dialler = self.is_inbound
        key = proven_by(mac, keys, dials=dials, listens=listens, by_dialler=by_dialler)
        if key is None:
            self._refuse("it has another key")
            return
        self._hears = Seal(key, mac)
        if self.is_inbound:
            self._prove(keys, other)
        self.is_believed = self.is_heard = True
        self._open(other.router_id)

    def _prove(self, keys: Sequence[bytes], other: LinkEnd) -> None:
        dials, listens = self._ends(other)
        mac = prove(keys[0], dials=dials, listens=listens, by_dialler=not self.is_inbound)
        self._call.send(peers_pb2.PeerMessage(proof=peers_pb2.Proof(mac=mac)).SerializeToString())
        self._sends = Seal(keys[0], mac)

    def _say(self, message: bytes) -> None:
        self._call.send(message if self._sends is None else self._sends.sealed(message))

    def _ends(self, other: LinkEnd) -> tuple[LinkEnd, LinkEnd]:
        return (other, self._own) if self.is_inbound else (self._own, other)

    def _refuse(self, why: str) -> None:
        log.warning("refused a peer that did not prove itself: %s", why)
        self.end(Code.UNAUTHENTICATED, why)

    def _open(self, router_id: str) -> None:
        self._on_hello(router_id)
        service = self._service
        self.link = service.relay.open(
            router_id, self._send, now=service.clock(), is_heard=self.is_heard
        )
        service.opened(router_id, self)

    def _handle(self, link: Link, kind: str | None, content: peers_pb2.PeerMessage) -> None:
        if kind == "entries":
            self._note_losses(content.entries.num_losses)
            entries = list(content.entries.log_entries)
            if entries and self.is_believed:
                link.has_relayed = True
                self._service.record(entries, self)
            self._say(_ACKNOWLEDGEMENT)
        elif kind == "acknowledgement":
            self._handle_acknowledgement(link)
        elif kind == "adapters" and self.is_believed:
            self._service.listener.hear_adapters(link.router_id, decode_adapters(content.adapters))

    def _note_losses(self, num_losses: int) -> None:
        before, self._num_losses = self._num_losses, num_losses
        if self.is_believed and before not in (None, num_losses):
            self._service.missed(self)

    def _handle_acknowledgement(self, link: Link) -> None:
        if not link.is_waiting:
            return  # nobody asked: no sign that the other side has read anything
        self._num_unread_bytes = 0
        self._service.relay.acknowledged(link, now=self._service.clock())
        self._is_behind = False  # the next whole update makes good what was dropped

    def _send(self, batch: Sequence[bytes]) -> None:
        losses = self._service.num_losses() & _MAX_LOSSES
        entries = peers_pb2.Entries(log_entries=batch, num_losses=losses)
        self._say(peers_pb2.PeerMessage(entries=entries).SerializeToString())

    def _drop_link(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            self._service.relay.close(link, now=self._service.clock())
            self._service.lost(link.router_id, self)
