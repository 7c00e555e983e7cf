"""Two routers as far as they are peers: each has a pool, and they have a real link."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from extproc.config import Config
from extproc.gen import peers_pb2
from extproc.observe.observers import Observers
from extproc.peers.adapterpeers import AdapterPeers
from extproc.peers.keys import LinkEnd, new_nonce, prove, read_keys
from extproc.peers.links import Links
from extproc.peers.peering import Peering
from extproc.peers.relay import Relay
from extproc.peers.updates import UpdateReceiver, UpdateSender
from extproc.routing.catalog import Catalog
from extproc.service.clocks import Clocks
from extproc.service.peeraccess import peer_settings
from extproc.wire import server as wire
from extproc.wire.rpc import Method, Session
from tests.builders import fill, routing
from tests.waiting import beside, eventually
from tests.wire.fake_call import FakeCall, begin

KEY_FILE = Path(__file__).with_name("peers_key.txt")


def configured(peers: dict[str, Any] | None, server: dict[str, Any] | None = None) -> Config:
    """A configuration whose peers have a key, unless `peers` says otherwise."""
    if peers is not None:
        peers = {"key_file": KEY_FILE, **peers}
    sections: dict[str, Any] = {"discovery": {"static": []}, "peers": peers, "server": server or {}}
    return Config.model_validate(sections)


class Peered:
    """A router with two endpoints that list the adapter `a`; `peers` is its configuration.

    Attributes:
        taken: Entries that others passed on to it.
        sizes: How many routers there were, each time that it changed.
    """

    def __init__(self, router_id: str, peers: dict[str, Any] | None) -> None:
        clock, self.observers = time.monotonic, Observers()
        self.taken: list[bytes] = []
        self.sizes: list[int] = []
        self.sender = UpdateSender(
            Links(),
            call_later=asyncio.get_running_loop().call_later,
            clock=clock,
            observers=self.observers,
        )
        self.catalog = Catalog()
        self.router = routing(
            observer=None if peers is None else self.sender,
            on_change=None if peers is None else self.sender.waits,
            catalog=self.catalog,
        )
        self.pool = fill(self.router.pool, 1, 2)
        self.relay = Relay()
        self.adapters = AdapterPeers(
            router_id,
            self.catalog,
            poke=lambda _: None,
            wake=lambda: None,
            clock=lambda: 0.0,
            say=lambda word: self.observers.call("telling", self.sender.links.say, word),
        )
        clocks = Clocks(clock, time.time, random.Random(router_id))
        self.peering = Peering(
            peer_settings(configured(peers), clocks),
            self.relay,
            UpdateReceiver(
                self.router, self.adapters, self.sender, clock=clock, observers=self.observers
            ),
            router_id=router_id,
            on_entries=lambda entries, _link: self.taken.extend(entries),
            on_lost=lambda _: None,
            num_losses=lambda: 0,
            on_num_routers=self._count,
            on_garbage=lambda: None,
            observers=self.observers,
            clock=clock,
            rng=clocks.rng,
        )

    def _count(self, num_routers: int) -> None:
        self.sizes.append(num_routers)
        self.pool.flights.set_num_routers(num_routers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with beside(self.peering.run()):
                yield
        finally:
            await self.peering.aclose()


def begin_proven(methods: Iterable[Method], router_id: str) -> tuple[FakeCall, Session]:
    """A link that another router has dialled, which has the key of the tests."""
    call, session = begin(methods, "Link")
    theirs = peers_pb2.PeerMessage.FromString(call.sent[0]).hello
    dials, listens = LinkEnd(router_id, new_nonce()), LinkEnd(theirs.router_id, theirs.nonce)
    [key] = read_keys(KEY_FILE)
    mac = prove(key, dials=dials, listens=listens, by_dialler=True)
    hello = peers_pb2.Hello(router_id=router_id, nonce=dials.nonce)
    for message in (
        peers_pb2.PeerMessage(hello=hello),
        peers_pb2.PeerMessage(proof=peers_pb2.Proof(mac=mac)),
    ):
        session.receive(message.SerializeToString())
    return call, session


P = TypeVar("P", bound=Peered)


@asynccontextmanager
async def linking(
    far: P, dial: Callable[[str], P], before: Callable[[P, P], None] = lambda near, far: None
) -> AsyncIterator[tuple[P, P]]:
    """`far`, which listens, and what `dial` makes with its address; `before` they are linked."""
    server = await wire.serve(far.peering.methods())
    near = dial(server.address)
    before(near, far)
    async with near.running(), far.running():
        await eventually(
            lambda: near.pool.peer_picks.num_routers == far.pool.peer_picks.num_routers == 1
        )
        yield near, far
    await server.close()
