"""Several routers, of which one has pods load adapters: their messages about that.

1. A router may load if it has the lease of the store, or if nothing leases. Of those that may,
   and hear each other, the one with the smallest id does.
2. A router that hears the loading one, with the same declarations, makes no calls. It reports the
   adapters that its requests want. It hears which adapters cannot be loaded, and which pods have
   changed.
3. A router that hears none loads as far as it may: everything, or else the adapters that its own
   requests wait for.
4. A router's update counts until its next one, for `BELIEVED_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import msgspec

from extproc.adapters.adapterstates import Action, AdapterState, CallKind
from extproc.adapters.declared import Declaration
from extproc.routing.catalog import Catalog

BELIEVED_S = 5.0
SAY_S = 1.0
"""From one update to the next where nothing is new."""
LEAVING_S = 2.0
"""Time for which no request goes to an adapter that is being unloaded, after the last update about
it. By then the pod's list of models says whether it still has it.
"""

MAX_LEAVING = 4096
"""Of these, and as many again as an update has."""


class LoadTrouble(NamedTuple):
    """Why an adapter cannot be loaded: its name, a slug, and a sentence for operators."""

    name: str
    reason: str
    message: str


class AdapterUpdate(NamedTuple):
    """A router's update about adapters.

    Attributes:
        loads: It makes all calls.
        declared: `digest` of its declarations.
        wanted: Names that its requests wait for, the next first.
        failed: Adapters that other routers want and that it cannot load.
        changed: Addresses of pods, on which its calls have ended since its last update.
        leaving: Addresses of pods that it has unload an adapter now, each with the served name.
    """

    loads: bool
    declared: int
    wanted: tuple[str, ...] = ()
    failed: tuple[LoadTrouble, ...] = ()
    changed: tuple[str, ...] = ()
    leaving: tuple[tuple[str, str], ...] = ()


def digest(declarations: Iterable[Declaration]) -> int:
    """Return 64 bits that are the same in each router that has the same declared."""
    each = sorted(declarations, key=lambda declaration: declaration.name)
    data = msgspec.json.encode(each, order="deterministic")
    return int.from_bytes(blake2b(data, digest_size=8).digest())


HEARD_S = 0.1
"""By then other routers have heard an update, and their last requests before it have reached the
pods.
"""


class AdapterPeers:
    """The updates of the other routers, and this router's own; none where there is no other router.

    Args:
        router_id: Of this one.
        catalog: Learns which adapters cannot be loaded; its planner knows the state of adapters.
        poke: Has a pod's models listed soon.
        wake: Called when there is something to be done.
        clock: Monotonic seconds.
        say: Sends an update to all other routers; None where there are none. Their updates come by
            `hear`, and `forget` reports that one is gone.
    """

    def __init__(
        self,
        router_id: str,
        catalog: Catalog,
        *,
        poke: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
        say: Callable[[AdapterUpdate], None] | None,
    ) -> None:
        self._router_id = router_id
        self._updates: dict[str, tuple[float, AdapterUpdate]] = {}
        self._leaving: dict[tuple[str, str], float] = {}
        self._catalog = catalog
        self._poke, self._wake, self._clock = poke, wake, clock
        self._declared = 0
        self._changed: dict[str, None] = {}
        self._said: AdapterUpdate | None = None
        self._said_at_s = -inf
        self._say = say

    def declare(self, declarations: Iterable[Declaration]) -> None:
        """Replace what is declared."""
        if self._say is not None:
            self._declared = digest(declarations)

    def hear(self, router_id: str, update: AdapterUpdate) -> None:
        """Take another router's update."""
        for address in update.changed:
            self._poke(address)
        now, before = self._clock(), self._updates.get(router_id)
        self._updates[router_id] = now, update
        if len(self._leaving) < MAX_LEAVING:
            self._leaving.update(dict.fromkeys(update.leaving, now + LEAVING_S))
        if before is None or before[1] != update:
            self._wake()

    def forget(self, router_id: str) -> None:
        """Forget a router that is gone."""
        self._updates.pop(router_id, None)
        self._wake()

    async def wait(self, action: Action) -> None:
        """Give the other routers time to send no more requests for adapters that are to be
        unloaded.
        """
        if self._say is not None and action.kind is CallKind.UNLOAD:
            await asyncio.sleep(HEARD_S)

    def ended(self, address: str) -> None:
        """A call to a pod has ended: other routers should list its models."""
        self._changed[address] = None

    def is_led(self, *, may_load: bool, now: float) -> bool:
        """Return whether another router makes this one's calls. Note the adapters that other
        routers unload, and those that the leader cannot load.
        """
        leader = self._leader(may_load=may_load, now=now)
        failed = () if leader is None else leader.failed
        self._leaving = {each: until_s for each, until_s in self._leaving.items() if now < until_s}
        self._catalog.planner.set_leaving(frozenset(self._leaving))
        self._catalog.set_failed({each.name: (each.reason, each.message) for each in failed})
        return leader is not None

    def wanted(self, now: float) -> list[str]:
        """Return the names that the other routers' requests wait for, each once."""
        return list(dict.fromkeys(name for _, update in self._heard(now) for name in update.wanted))

    def tell(
        self, held: Sequence[str], rates: Mapping[str, float], *, loads: bool, now: float
    ) -> None:
        """Send an update, if it is new or the last one is old.

        Args:
            held: The adapters that this router's requests wait for, the next first.
            rates: Of demand. Adapters among them that no pod has are wanted as well: not all
                requests may wait.
        """
        if self._say is None:
            return
        planner = self._catalog.planner
        wanted = dict.fromkeys([*held, *(name for name in rates if not planner.holders(name))])
        failed = self._failed(now) if loads else ()
        changed, self._changed = tuple(self._changed), {}
        leaving = tuple(planner.unloading())
        update = AdapterUpdate(loads, self._declared, tuple(wanted), failed, changed, leaving)
        if update != self._said or now - self._said_at_s >= SAY_S:
            self._said, self._said_at_s = update, now
            self._say(update)

    def _leader(self, *, may_load: bool, now: float) -> AdapterUpdate | None:
        """Return the update of the router that makes this one's calls; None where none does."""
        for router_id, update in self._heard(now):
            is_first = not may_load or router_id < self._router_id
            if update.loads and update.declared == self._declared and is_first:
                return update
        return None

    def _heard(self, now: float) -> Iterator[tuple[str, AdapterUpdate]]:
        for router_id, (said_s, update) in self._updates.items():
            if now - said_s <= BELIEVED_S:
                yield router_id, update

    def _failed(self, now: float) -> tuple[LoadTrouble, ...]:
        """Return the adapters that other routers want and cannot have."""
        planner, found = self._catalog.planner, []
        for name in self.wanted(now):
            status = planner.status(name) if planner.state(name) is AdapterState.FAILED else None
            if status is not None:
                found.append(LoadTrouble(name, status.reason or "", status.message))
        return tuple(found)
