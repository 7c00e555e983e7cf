"""What routers tell each other of adapters, so that one loads for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from extproc.adapters.declared import Declaration
from extproc.adapters.peers import SAY_S, AdapterUpdate, Peers, Trouble, digest
from extproc.adapters.states import Action, Kind, State
from extproc.routing.catalog import Catalog

HEARD_S = 0.1
"""By then others have heard a word, and their last requests before it have reached their pods."""


class AdapterPeers:
    """This router's part of the conversation; none where there are no others.

    Args:
        catalog: Learns what cannot be loaded; its planner knows how adapters are.
        poke: Has a pod's models listed soon.
        look: Called when there is something to be done.
        clock: Monotonic seconds.
        say: Says a word to all other routers; None where there are none. What they say comes by
            `hear`, and `forget` says that one is gone.
    """

    def __init__(
        self,
        router_id: str,
        catalog: Catalog,
        *,
        poke: Callable[[str], None],
        look: Callable[[], None],
        clock: Callable[[], float],
        say: Callable[[AdapterUpdate], None] | None,
    ) -> None:
        self._peers = Peers(router_id)
        self._catalog = catalog
        self._poke, self._look, self._clock = poke, look, clock
        self._declared = 0
        self._changed: dict[str, None] = {}
        self._said: AdapterUpdate | None = None
        self._said_at_s = -inf
        self._say = say

    def declare(self, declarations: Iterable[Declaration]) -> None:
        """Replace what is declared."""
        if self._say is not None:
            self._declared = digest(declarations)

    def hear(self, router_id: str, word: AdapterUpdate) -> None:
        """Take another router's word."""
        for address in word.changed:
            self._poke(address)
        if self._peers.hear(router_id, word, now=self._clock()):
            self._look()

    def forget(self, router_id: str) -> None:
        """Forget a router that is gone."""
        self._peers.forget(router_id)
        self._look()

    async def wait(self, action: Action) -> None:
        """Give the others time to send no more requests for what is to be unloaded."""
        if self._say is not None and action.kind is Kind.UNLOAD:
            await asyncio.sleep(HEARD_S)

    def ended(self, address: str) -> None:
        """A call to a pod has ended: others are to list its models."""
        self._changed[address] = None

    def is_led(self, *, may_load: bool, now: float) -> bool:
        """Return whether another router makes this one's calls; note what others unload, and what
        that one cannot load.
        """
        leader = self._peers.leader(self._declared, may_load=may_load, now=now)
        failed = () if leader is None else leader.failed
        self._catalog.planner.set_leaving(self._peers.leaving(now))
        self._catalog.set_failed({each.name: (each.reason, each.message) for each in failed})
        return leader is not None

    def wanted(self, now: float) -> list[str]:
        """Return what the other routers' requests wait for."""
        return self._peers.wanted(now)

    def tell(
        self, held: Sequence[str], rates: Mapping[str, float], *, loads: bool, now: float
    ) -> None:
        """Say how things are, if that is new or was said long ago.

        Args:
            held: What this router's requests wait for, the next first.
            rates: Of demand. What nobody has of that is wanted as well: not all requests may wait.
        """
        if self._say is None:
            return
        planner = self._catalog.planner
        wanted = dict.fromkeys([*held, *(name for name in rates if not planner.holders(name))])
        failed = self._failed(now) if loads else ()
        changed, self._changed = tuple(self._changed), {}
        leaving = tuple(planner.unloading())
        word = AdapterUpdate(loads, self._declared, tuple(wanted), failed, changed, leaving)
        if word != self._said or now - self._said_at_s >= SAY_S:
            self._said, self._said_at_s = word, now
            self._say(word)

    def _failed(self, now: float) -> tuple[Trouble, ...]:
        """Return what the others want and cannot have."""
        planner, found = self._catalog.planner, []
        for name in self._peers.wanted(now):
            status = planner.status(name) if planner.state(name) is State.FAILED else None
            if status is not None:
                found.append(Trouble(name, status.reason or "", status.message))
        return tuple(found)
