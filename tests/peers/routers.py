"""A router as far as its peers see it."""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.dialler import PeerDialler
from extproc.peers.links import METHOD, Links, PeersService
from extproc.peers.peermessages import PickUpdate
from extproc.peers.relay import Relay
from extproc.wire import server as wire
from tests.waiting import eventually


class Deaf:
    """Takes nothing of what other routers say."""

    def begin(self) -> None:
        pass

    def hear(self, router_id: str, update: PickUpdate) -> None:
        pass

    def hear_adapters(self, router_id: str, update: AdapterUpdate) -> None:
        pass

    def forget(self, router_id: str) -> None:
        pass


class Router:
    """A router as far as its peers see it; listens only while `listening`."""

    def __init__(
        self,
        router_id: str,
        *,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        tls_name: str | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> None:
        self.id = router_id
        self.taken: list[bytes] = []
        self.relay = Relay()
        self.service = PeersService(
            self.relay,
            router_id,
            links=Links(),
            listener=Deaf(),
            on_entries=lambda entries, _link: self.taken.extend(entries),
            clock=monotonic,
            keys=lambda: keys,
            believes_callers=True,
        )
        self.dialler = PeerDialler(
            METHOD,
            router_id,
            self.service.dialled,
            rng=random.Random(1),
            tls=tls,
            tls_name=tls_name,
        )

    async def links_to(self, far: Router, address: str) -> None:
        """Dial the other router, and wait until it knows."""
        self.dialler.set_addresses([address])
        await eventually(lambda: far.relay.linked_routers() == {self.id})

    @asynccontextmanager
    async def listening(
        self, port: int = 0, context: ssl.SSLContext | None = None
    ) -> AsyncIterator[str]:
        server = await wire.serve(self.service.methods(), port=port, ssl_context=context)
        try:
            yield server.address
        finally:
            await server.close()

    def offer(self, router_id: str, entry: bytes) -> None:
        self.relay.offer(router_id, entry, now=monotonic())
        self.relay.flush(now=monotonic())
