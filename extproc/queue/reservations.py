"""Slots that are kept for requests that wait for one.

An engine frees an adapter's slot when the last of its requests there has ended. Where an adapter
runs, one more request for it needs no slot of its own, so popular ones would keep theirs for ever.
A request that is asked for in vain for want of a slot therefore *reserves* one, on one endpoint.
The adapter that lets it go gets no more requests there. Room that becomes free there is only for
the waiting request and those that go before it. An adapter lets its slot go

- for a request of a higher priority;
- for one of the same priority, whose tenant was served less (`fairness`);
- for one of the same priority that has waited for a turn (`turn_s`), once it has had the slot for
  as long. A turn follows what a change of adapters costs: with shorter ones slots would go round.

Of several the one that will be done soonest is taken: it has had no new request for long, or has
few. Capacity is lost by no more than what that adapter could have had there until then.

A slot that became free as another router's request ended belongs to that router for a moment.
Otherwise both would give it away, and one of the two requests would wait in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, log
from typing import NamedTuple

from msgspec.structs import replace

from extproc.fleet.columns import Columns
from extproc.queue.tickets import QueueSettings, Ticket
from extproc.tenancy import Claim, SlotUse
from extproc.types import EndpointView, RequestInfo

MAX_RESERVED = 64
"""Slots that are reserved at a time: each newcomer is compared with all of them."""
COSTS_PER_TURN = 3
"""So a change of adapters takes a quarter of the time at most. On two small pods beyond their
capacity (the laboratory, 24 requests a second, loads of 49 and 111 ms) 13.9 % miss half a second
with turns of one cost, 10.5 % with two, 9.9 % with four, as without turns."""
_LEFT = ""
"""No adapter's name: whoever has a slot that a request's own adapter left."""
RESERVED_RATIO = 0.5
"""Part of an endpoint's slots that may be reserved at a time, but for one."""


class Reservation(NamedTuple):
    """One slot.

    Attributes:
        adapter: For which it is kept, by the name that endpoints know.
        leaving: The adapter that lets it go.
    """

    adapter: str
    address: str
    leaving: str
    priority: int
    flow: str
    until_s: float


class _LeftElsewhere(NamedTuple):
    """A slot that is another router's to give until then, once `leaving` runs there no more."""

    address: str
    leaving: str
    until_s: float


class Reservations:
    """The reservations in force, one for an adapter.

    Args:
        served: Returns what a flow of a priority has got.

    Attributes:
        elsewhere: Slots that other routers keep.
    """

    def __init__(self, settings: QueueSettings, served: Callable[[int, str], float]) -> None:
        self._settings = settings
        self.elsewhere: Sequence[Reservation] = ()
        self._served = served
        self._all: dict[str, Reservation] = {}
        self._others = deque[_LeftElsewhere](maxlen=MAX_RESERVED)
        self._fresh: set[str] = set()

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings."""
        self._settings = settings

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._all.values())

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._all

    @property
    def are_left(self) -> bool:
        """Whether other routers' requests have left a slot of late."""
        return bool(self._others)

    def begin(self) -> None:
        """Begin to go through those that wait."""
        self._fresh.clear()

    def end(self) -> None:
        """Let go what was reserved for those that do not wait any more."""
        self._all = {name: each for name, each in self._all.items() if name in self._fresh}

    def drop(self, adapter: str | None = None) -> None:
        """Let go what is reserved for an adapter, or for all."""
        if adapter is None:
            self._all.clear()
        else:
            self._all.pop(adapter, None)

    def freed_elsewhere(self, address: str, adapter: str, *, until_s: float) -> None:
        """Leave a slot to the router whose request for an adapter has ended there."""
        self._others.append(_LeftElsewhere(address, adapter, until_s))

    def is_free(self, adapter: str | None, uses: Callable[[str], Mapping[str, SlotUse]]) -> bool:
        """Return whether what was reserved for an adapter has become free.

        Args:
            uses: Returns the adapters that run on an endpoint.
        """
        each = None if adapter is None else self._all.get(adapter)
        return each is not None and each.leaving not in uses(each.address)

    def add(
        self,
        ticket: Ticket,
        adapter: str,
        slots: Iterable[tuple[EndpointView, Mapping[str, SlotUse]]],
        *,
        now: float,
    ) -> None:
        """Reserve a slot for a request on one of the endpoints that may serve it, if one can be.

        Args:
            adapter: The request's, by the name that endpoints know.
            slots: Those endpoints, each with the adapters that run there.
        """
        until_s = ticket.vain_s + self._settings.slot_hold_s
        if now >= until_s or adapter in self._fresh:
            return
        claim, known = ticket.request.claim, self._all.pop(adapter, None)
        # Requests that come after it leave it the slots reserved for them.
        first = [each for each in self if self._goes_first(each, claim)]
        if len(first) >= MAX_RESERVED:
            return
        for each in self.elsewhere:
            if now < each.until_s and self._stays(each, adapter, claim, known):
                if each.adapter == adapter:
                    return
                first.append(each)
        found, best = None, -inf
        for view, uses in slots:
            if known is not None and known.address == view.address and known.leaving not in uses:
                found = view.address, known.leaving  # it is free, and of use in a moment
                break
            taken = {each.leaving for each in first if each.address == view.address}
            if not _may_reserve(view, len(taken)):
                continue
            for name, use in uses.items():
                if name == adapter or name in taken or not self._lets_go(view, use, ticket, now):
                    continue
                score = (now - use.last_s) / (1 + log(max(1, view.pending(name))))
                if known is not None and (known.address, known.leaving) == (view.address, name):
                    score = inf
                if score > best:
                    found, best = (view.address, name), score
        if found is not None:
            others = self._all.items()
            self._all = {
                name: each for name, each in others if (each.address, each.leaving) != found
            }
            self._all[adapter] = Reservation(adapter, *found, claim.priority, claim._flow, until_s)
            self._fresh.add(adapter)

    def kept_from(
        self, request: RequestInfo, columns: Columns, *, now: float
    ) -> Mapping[str, float]:
        """Return the endpoints that have no slot for a request, and until when.

        Args:
            request: With its adapter's name as endpoints know it.
        """
        adapter, claim = request.adapter, request.claim
        if adapter is None or not (self._all or self.elsewhere):
            return {}
        kept, reserved = dict[str, float](), dict[str, list[Reservation]]()
        for each in chain(self, self.elsewhere):
            if now >= each.until_s or each.adapter == adapter:
                continue
            if not self._goes_first(each, claim):
                continue
            if each.leaving == adapter:
                kept[each.address] = each.until_s
            reserved.setdefault(each.address, []).append(each)
        for address, own in reserved.items():
            row = columns.rows.get(address)
            if row is not None:
                running = columns.pending(row)
                freed_s = [each.until_s for each in own if each.leaving not in running]
                num_free = columns.num_slots[row] - len(running)
                if adapter not in running and 0 < num_free <= len(freed_s):
                    kept[address] = min(freed_s)
        return kept

    def still_taken(
        self, request: RequestInfo, views: tuple[EndpointView, ...], *, now: float
    ) -> tuple[EndpointView, ...]:
        """Return the endpoints with the slots still taken that other routers give away first.

        The adapter that left a slot does not run there any more: one more request for it needs the
        slot, too.

        Args:
            request: With its adapter's name as endpoints know it; what is reserved for it is free.
        """
        while self._others and now >= self._others[0].until_s:
            self._others.popleft()
        if not self._others or request.adapter is None:
            return views
        own = self._all.get(request.adapter)
        taken = dict[str, dict[str, int]]()
        for each in self._others:
            if own is None or (own.address, own.leaving) != each[:2]:
                name = _LEFT if each.leaving == request.adapter else each.leaving
                taken.setdefault(each.address, {})[name] = 1
        return tuple(
            [
                replace(view, pending_by_adapter=taken[view.address] | {**view.pending_by_adapter})
                if view.address in taken
                else view
                for view in views
            ]
        )

    def _lets_go(self, view: EndpointView, use: SlotUse, ticket: Ticket, now: float) -> bool:
        """Return whether an adapter lets its slot go for a request."""
        claim = ticket.request.claim
        if use.priority != claim.priority:
            return use.priority < claim.priority
        turn = self._turn(claim.priority, claim._flow, use.flow)
        if turn:
            return turn > 0
        waited_s = now - ticket.request.arrived_at_s
        own_s = self._settings.slot_turn_s
        wanted_s = turn_s(view) if own_s is None else own_s or inf
        return wanted_s <= min(waited_s, now - use.since_s)

    def _goes_first(self, each: Reservation, claim: Claim) -> bool:
        """Return whether one that waits goes before a request."""
        if claim.priority != each.priority:
            return claim.priority < each.priority
        return self._turn(claim.priority, each.flow, claim._flow) >= 0

    def _stays(
        self, each: Reservation, adapter: str, claim: Claim, known: Reservation | None
    ) -> bool:
        """Return whether what another router keeps is not to be had for an adapter.

        Of two that have the same right who has it already keeps it; of two who took it at once the
        same one on both sides.
        """
        if claim.priority != each.priority:
            return claim.priority < each.priority
        turn = self._turn(claim.priority, each.flow, claim._flow)
        if turn or known is None:
            return turn >= 0
        return (each.address, each.leaving, each.adapter) < (known.address, known.leaving, adapter)

    def _turn(self, priority: int, flow: str, other: str) -> float:
        """Return by how much one flow was served less than another; 0 where they have no turns."""
        if flow == other or not self._settings.fair:
            return 0
        return self._served(priority, other) - self._served(priority, flow)


def turn_s(view: EndpointView) -> float:
    """Return for how long an adapter keeps its slot on an endpoint while others wait; infinite
    until a response has ended there.

    A change costs a load, for which all wait, and the places that are empty until the adapter's
    last response has ended.
    """
    response_s = view._response_s
    return inf if response_s is None else COSTS_PER_TURN * (response_s + view.costs.cold_load_s)


def _may_reserve(view: EndpointView, num_reserved: int) -> bool:
    """Return whether an endpoint is full of adapters, and may have one more slot reserved."""
    slots = view.max_loras
    if slots is not None and len(view.pending_by_adapter) < slots:
        return False
    return num_reserved < max(1, RESERVED_RATIO * (slots or 0))
