"""Other routers, as one sees them that has links to them: they tell, and take note of nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from time import process_time

from extproc.observe.observers import Observers
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.peers.links import Links, PeersService
from extproc.peers.peermessages import PickUpdate
from extproc.peers.relay import Relay
from extproc.peers.updates import FLUSH_S, UpdateReceiver, UpdateSender
from extproc.pods.endpointstate import EndpointState
from extproc.pods.peerpicks import pick_ids
from extproc.pods.pool import InFlight
from extproc.routing.router import Router
from extproc.types import Endpoint, Pick, RequestInfo
from extproc.wire.rpc import Call, Code, Method, Session

CallLater = Callable[[float, Callable[[], None]], object]
_BODY_BYTES = 2_000


class Traffic:
    """The messages of all links of some peers, without what HTTP/2 adds.

    Attributes:
        num_told_bytes: Sent by the peers.
        num_heard_bytes: Sent to them.
    """

    def __init__(self) -> None:
        self.num_told_bytes = self.num_heard_bytes = 0


@cache
def _pod(address: str) -> EndpointState:
    """Return a pod, once: one of a thousand for each pick would be most of the collector's work."""
    return EndpointState(Endpoint(address), {})


class Peer:
    """A router that sends requests to pods as it is told to, and tells the others of that.

    Args:
        call_later: As an event loop's.
        clock: Monotonic seconds.
        keys: That the routers share; none where they trust each other.

    Attributes:
        service: Its links.
    """

    def __init__(
        self,
        router_id: str,
        *,
        call_later: CallLater,
        clock: Callable[[], float],
        keys: Sequence[bytes] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._clock, self._next_id = clock, pick_ids(router_id)
        self._in_flight: deque[InFlight] = deque()
        self._traffic = traffic or Traffic()
        self._sender = UpdateSender(
            Links(), call_later=call_later, clock=clock, observers=Observers()
        )
        self.service = PeersService(
            Relay(),
            router_id,
            links=self._sender.links,
            listener=self,
            on_entries=lambda *_: None,
            clock=clock,
            keys=lambda: keys,
        )

    def start(self, address: str, adapter: str) -> None:
        """Pick a pod for a request."""
        request = RequestInfo(adapter, adapter, body_bytes=_BODY_BYTES)
        pick = Pick(self._next_id(), request, (address,), "bench", "told")
        flight = InFlight(pick, self._clock(), pod=_pod(address))
        self._sender.started(flight, is_new=True)
        self._in_flight.append(flight)

    def end(self) -> tuple[str, str]:
        """Have its oldest request end; return the address of its pod, and its adapter."""
        flight = self._in_flight.popleft()
        self._sender.ended(flight, has_run=True)
        return flight.pick.address, flight.pick.request.model

    def methods(self) -> Sequence[Method]:
        """Return what others may call, metered."""
        [method] = self.service.methods()

        def opened(call: Call, metadata: object) -> Session:
            return _Metered(call, lambda each: method.open(each, {}), self._traffic)

        return [Method(method.path, opened, is_long_lived=True)]

    def dialled(self, call: Call, on_hello: Callable[[str], None]) -> Session:
        """Begin a link that the peer has opened, metered."""
        return _Metered(call, lambda each: self.service.dialled(each, on_hello), self._traffic)

    def begin(self) -> None:
        """Tell all that is in flight."""
        self._sender.begin(self._in_flight)

    def hear(self, router_id: str, update: PickUpdate) -> None:
        """Nothing."""

    def hear_adapters(self, router_id: str, update: AdapterUpdate) -> None:
        """Nothing."""

    def forget(self, router_id: str) -> None:
        """Nothing."""


class _Metered(Call):
    """Both sides of one end of a link: what passes is counted."""

    def __init__(self, call: Call, begin: Callable[[Call], Session], traffic: Traffic) -> None:
        self._call, self._traffic = call, traffic
        self._session = begin(self)

    def send(self, message: bytes) -> None:
        self._traffic.num_told_bytes += len(message)
        self._call.send(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        self._call.end(code, details)

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        self._call.hold(num_bytes, is_whole=is_whole)

    def receive(self, message: bytes) -> None:
        """Handle a message."""
        self._traffic.num_heard_bytes += len(message)
        self._session.receive(message)

    def half_close(self) -> None:
        """Handle the end of the messages."""
        self._session.half_close()

    def closed(self) -> None:
        """Handle the end of the link."""
        self._session.closed()


class Heard:
    """A router's links to peers without a network.

    Args:
        clock: Monotonic seconds.
        num_peers: That it has dialled, and so believes.

    Attributes:
        peers: They tell what they did with `deliver`.
    """

    def __init__(self, router: Router, clock: Callable[[], float], num_peers: int) -> None:
        self._clock, self._due = clock, list[tuple[float, Callable[[], None]]]()
        observers = Observers()
        sender = UpdateSender(Links(), call_later=self._later, clock=clock, observers=observers)
        adapters = AdapterPeers(
            "own",
            router.catalog,
            poke=lambda _: None,
            wake=lambda: None,
            clock=clock,
            say=None,
        )
        service = PeersService(
            Relay(),
            "own",
            links=sender.links,
            listener=UpdateReceiver(router, adapters, sender, clock=clock, observers=observers),
            on_entries=lambda *_: None,
            clock=clock,
        )
        self.peers = [
            Peer(f"peer{number}", call_later=self._later, clock=clock)
            for number in range(num_peers)
        ]
        self._links = [_Link(service, peer) for peer in self.peers]
        self.deliver()  # who is there
        self.deliver()  # that each begins

    def deliver(self) -> list[float]:
        """Return the CPU seconds in which the router read and applied each peer's news."""
        until_s = self._clock() + FLUSH_S
        due, self._due = self._due, [each for each in self._due if each[0] > until_s]
        for at_s, flush in due:
            if at_s <= until_s:
                flush()
        return [link.deliver() for link in self._links]

    def close(self) -> None:
        """End the links: what was told is void."""
        for link in self._links:
            link.close()

    def _later(self, seconds: float, flush: Callable[[], None]) -> None:
        self._due.append((self._clock() + seconds, flush))


class _Way(Call):
    """One direction of a link: what was sent waits."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        raise AssertionError(f"a link has ended: {code.name} {details}")

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        raise AssertionError("keeps no messages")


class _Link:
    def __init__(self, service: PeersService, peer: Peer) -> None:
        self._to_peer, self._to_router = _Way(), _Way()
        self._router = service.dialled(self._to_peer, lambda _: None)
        [method] = peer.service.methods()
        self._peer = method.open(self._to_router, {})

    def close(self) -> None:
        """End it, as the router sees it."""
        self._router.closed()

    def deliver(self) -> float:
        """Deliver both ways until nothing waits; return what the router took, CPU seconds."""
        took_s = 0.0
        while self._to_peer.messages or self._to_router.messages:
            while self._to_peer.messages:
                self._peer.receive(self._to_peer.messages.popleft())
            began_s = process_time()
            while self._to_router.messages:
                self._router.receive(self._to_router.messages.popleft())
            took_s += process_time() - began_s
        return took_s
