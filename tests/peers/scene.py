"""Routers as far as their links go, the way between two, without a network, and time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from extproc.gen import peers_pb2
from extproc.observe.observers import Observers
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.peers.links import Links, PeersService
from extproc.peers.peermessages import PickUpdate, encode
from extproc.peers.relay import Relay, RelaySettings
from extproc.peers.updates import UpdateReceiver, UpdateSender
from extproc.pods.picksums import BEGAN, PlaceSum, Sums
from extproc.routing.router import Router as RoutingRouter
from extproc.wire.rpc import Call, Code, Session
from tests.builders import Clock
from tests.wire.fake_call import FakeCall, begin

WHOLE = PickUpdate(Sums(True, 0, (), []))


class Router:
    """A router as far as its links go; by its TLS it knows who calls, unless said otherwise."""

    def __init__(
        self,
        router_id: str,
        clock: Clock | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        believes_callers: bool = True,
    ) -> None:
        self.clock = clock or Clock()
        self.relay = Relay(RelaySettings())
        self.taken: list[bytes] = []
        self.lost: list[Any] = []
        self.num_losses = 0
        self.updates: list[tuple[str, AdapterUpdate]] = []
        self.num_garbage = self.num_begun = 0
        self.links = Links()
        self.heard: list[tuple[str, PickUpdate]] = []
        self.gone: list[str] = []
        self.service = PeersService(
            self.relay,
            router_id,
            on_entries=lambda entries, _link: self.taken.extend(entries),
            on_lost=self.lost.append,
            num_losses=lambda: self.num_losses,
            clock=self.clock,
            on_garbage=self._count,
            links=self.links,
            listener=self,
            keys=lambda: keys,
            believes_callers=believes_callers,
        )

    def _count(self) -> None:
        self.num_garbage += 1

    def offer(self, router_id: str, *entries: bytes) -> None:
        for entry in entries:
            self.relay.offer(router_id, entry, now=self.clock())
        self.relay.flush(now=self.clock())

    def tell(self, update: PickUpdate = WHOLE) -> None:
        self.links.tell(encode(update), update.sums.num_begun)

    def begin(self) -> None:
        self.num_begun += 1

    def hear(self, router_id: str, update: PickUpdate) -> None:
        self.heard.append((router_id, update))

    def hear_adapters(self, router_id: str, update: AdapterUpdate) -> None:
        self.updates.append((router_id, update))

    def forget(self, router_id: str) -> None:
        self.gone.append(router_id)

    def accept(self) -> tuple[FakeCall, Session]:
        return begin(self.service.methods(), "Link")


def greeted(by: str) -> tuple[Router, FakeCall, Session]:
    """The router `a`, to which another one has said who it is, and their link."""
    router = Router("a")
    call, session = router.accept()
    session.receive(hello(by))
    return router, call, session


class Later:
    """A loop that runs what is due by its clock when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, run: Callable[[], None]) -> None:
        self.due.append((self.clock.now + seconds, run))

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, and run what is due by then."""
        until_s = self.clock.now + seconds
        while ready := [each for each in self.due if each[0] <= until_s]:
            first = min(ready, key=lambda each: each[0])
            self.due.remove(first)
            self.clock.now = max(self.clock.now, first[0])
            first[1]()
        self.clock.now = until_s

    def rests(self) -> list[float]:
        """Return how long it is to each that is due."""
        return sorted(at_s - self.clock.now for at_s, _ in self.due)


def served(
    router: RoutingRouter,
    sender: UpdateSender,
    router_id: str,
    observers: Observers,
    clock: Callable[[], float] = lambda: 0.0,
) -> PeersService:
    """The links of a router, which believes who calls."""
    adapters = AdapterPeers(
        router_id, router.catalog, poke=lambda _: None, wake=lambda: None, clock=clock, say=None
    )
    return PeersService(
        Relay(),
        router_id,
        links=sender.links,
        listener=UpdateReceiver(router, adapters, sender, clock=clock, observers=observers),
        on_entries=lambda *_: None,
        clock=clock,
        believes_callers=True,
    )


class Linked(Protocol):
    """Who has links."""

    service: PeersService


class Wire:
    """A link from `near`, which dials, to `far`; messages wait until `pump`."""

    def __init__(self, near: Linked, far: Linked) -> None:
        self.heard: list[str] = []
        self._ways: list[tuple[Way, Session]] = []
        to_far, to_near = Way(), Way()
        near_end = near.service.dialled(to_far, self.heard.append)
        [method] = far.service.methods()
        far_end = method.open(to_near, {})
        self._ways = [(to_far, far_end), (to_near, near_end)]
        self.near, self.far = near_end, far_end

    def pump(self, is_lost: Callable[[bytes], bool] = lambda _message: False) -> list[bytes]:
        """Deliver until nothing is under way, but what is lost; return what was, in order."""
        crossed = []
        while any(way.messages for way, _ in self._ways):
            for way, end in self._ways:
                while way.messages:
                    crossed.append(way.messages.popleft())
                    if not is_lost(crossed[-1]):
                        end.receive(crossed[-1])
        return crossed

    def ends(self) -> list[Code | None]:
        """How either end has ended the link."""
        return [way.ended for way, _ in self._ways]

    def waiting(self) -> list[bytes]:
        """What is under way."""
        return [message for way, _ in self._ways for message in way.messages]

    def cut(self) -> None:
        for way, end in self._ways:
            way.messages.clear()
            end.closed()


class Way(Call):
    """One direction of a link."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.ended: Code | None = None

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        raise AssertionError("keeps no messages")

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        self.ended = code


def hello(router_id: str) -> bytes:
    return message(hello=peers_pb2.Hello(router_id=router_id, believes_callers=True))


def entries(*each: bytes) -> bytes:
    return message(entries=peers_pb2.Entries(log_entries=each))


def message(**content: Any) -> bytes:
    encoded: bytes = peers_pb2.PeerMessage(**content).SerializeToString()
    return encoded


def kinds(messages: Sequence[bytes]) -> list[str | None]:
    return [peers_pb2.PeerMessage.FromString(each).WhichOneof("content") for each in messages]


def told(
    *changes: int, address: str = "10.0.0.1:80", adapter: str = "sql", flow: str = " t"
) -> PickUpdate:
    """Some changes at a place; that a request began there if none are named."""
    place = PlaceSum((address, adapter, flow, 0 if not flow else 3))
    return PickUpdate(Sums(False, 0, [place], list(changes or (BEGAN, 1, 1, 7, 0))))
