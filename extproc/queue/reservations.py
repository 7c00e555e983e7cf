"""Slots that are kept for requests that wait for one.

An engine frees an adapter's slot when the last of its requests there has ended. Where an adapter
runs, one more request for it needs no slot of its own, so popular ones would keep theirs for ever.
A request that is asked for in vain for want of a slot therefore *reserves* one, on one endpoint.
The adapter that lets it go gets no more requests there. Room that becomes free there is only for
the waiting request and those that go before it. An adapter lets its slot go

- for a request of a higher priority;
- for one of the same priority, whose tenant was served less (`fairness`);
- for one of the same priority that has waited for a turn (`slot_turn_s`), once it has had the slot
  for as long. A turn follows what a change of adapters costs: with shorter ones slots would go
  round.

Of several the one that will be done soonest is taken: it has had no new request for long, or has
few. Capacity is lost by no more than what that adapter could have had there until then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import inf, log
from typing import NamedTuple

from extproc.pods.columns import Columns
from extproc.queue.plan import QueuePlan
from extproc.queue.tickets import Ticket
from extproc.tenancy import Claim, SlotUse
from extproc.types import EndpointView, RequestInfo

MAX_RESERVED = 64
"""Slots that are reserved at a time: each newcomer is compared with all of them."""
COSTS_PER_SLOT_CHANGE = 3
"""So a change of adapters takes a quarter of the time at most. On two small pods beyond their
capacity (the laboratory, 24 requests a second, loads of 49 and 111 ms) 13.9 % miss half a second
with turns of one cost, 10.5 % with two, 9.9 % with four, as without turns."""
MAX_LEFT = 256
"""Slots that other routers' requests have left in the last `schedule.PEER_OFFERS_FIRST_S`."""
_NONE_KEPT: Mapping[str, float] = {}
_Slot = tuple[str, str, float]  # of an endpoint, the adapter that leaves it, and until when
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


class Reservations:
    """The reservations in force, one for an adapter.

    Args:
        plan: Knows what each flow has got, and the settings.
    """

    def __init__(self, plan: QueuePlan) -> None:
        self._plan = plan
        self._all: dict[str | None, Reservation] = {}
        self._left = deque[_Slot](maxlen=MAX_LEFT)  # in order of their times
        self._fresh: set[str] = set()

    def clear(self) -> None:
        """Let all go."""
        self._all.clear()

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._all.values())

    def begin(self) -> None:
        """Begin to go through those that wait."""
        self._fresh.clear()

    def end(self) -> None:
        """Let go what was reserved for those that do not wait any more."""
        self._all = {name: each for name, each in self._all.items() if name in self._fresh}

    def drop(self, adapter: str | None) -> None:
        """Let go what is reserved for an adapter."""
        self._all.pop(adapter, None)

    def freed_elsewhere(self, address: str, adapter: str, *, until_s: float) -> None:
        """Keep a slot for the router whose request for an adapter has ended there: else both would
        give it away, and one of the two requests would wait in the engine.
        """
        self._left.append((address, adapter, until_s))

    def is_free(self, adapter: str | None, uses: Callable[[str], Mapping[str, SlotUse]]) -> bool:
        """Return whether what was reserved for an adapter has become free.

        Args:
            uses: Returns the adapters that run on an endpoint.
        """
        each = self._all.get(adapter)
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
        until_s = ticket.held_at_s + self._plan.settings.slot_hold_s
        if now >= until_s or adapter in self._fresh:
            return
        claim, known = ticket.request.claim, self._all.pop(adapter, None)
        # Requests that come after it leave it the slots reserved for them.
        first = [each for each in self if self._lead(each, claim) >= 0]
        if len(first) >= MAX_RESERVED:
            return
        taken = Counter((each.address, each.leaving) for each in first)
        num_taken = Counter(address for address, _ in taken)
        found, best = None, -inf
        for view, uses in slots:
            address = view.address
            if known is not None and known.address == address and known.leaving not in uses:
                found = address, known.leaving  # it is free, and of use in a moment
                break
            if not _may_reserve(view, num_taken[address]):
                continue
            for name, use in uses.items():
                slot = address, name
                if name == adapter or slot in taken or not self._lets_go(view, use, ticket, now):
                    continue
                score = (now - use.last_s) / (1 + log(max(1, view.pending(name))))
                if known is not None and slot == (known.address, known.leaving):
                    score = inf
                if score > best:
                    found, best = slot, score
        if found is not None:
            self._all = {e.adapter: e for e in self if (e.address, e.leaving) != found}
            self._all[adapter] = Reservation(adapter, *found, claim.priority, claim.flow, until_s)
            self._fresh.add(adapter)

    def kept_from(
        self, request: RequestInfo, columns: Columns, *, now: float
    ) -> Mapping[str, float]:
        """Return the endpoints that have no slot for a request, and until when.

        Args:
            request: With its adapter's name as endpoints know it.
        """
        left = self._left
        while left and now >= left[0][2]:
            left.popleft()
        adapter, claim = request.adapter, request.claim
        if adapter is None or not (left or self._all):
            return _NONE_KEPT
        own = self._all.get(adapter)
        own_slot = None if own is None else own[1:3]
        kept, freed_s = dict[str, float](), dict[int, dict[str, float]]()
        slots = list[_Slot]()
        for each in self:
            slot = each[1:3]
            if slot != own_slot and now < each.until_s and self._lead(each, claim) >= 0:
                slots.append((*slot, each.until_s))
                if each.leaving == adapter:
                    kept[each.address] = each.until_s
        num_slots, num_used = columns.num_slots, columns.num_used
        for address, leaving, until_s in chain(slots, left):
            row = columns.rows.get(address)
            if row is None or num_slots[row] <= num_used[row]:
                continue  # nothing is free there
            uses = columns.pending(row)
            if adapter not in uses and leaving not in uses and (address, leaving) != own_slot:
                freed_s.setdefault(row, {}).setdefault(leaving, until_s)
        for row, times_s in freed_s.items():
            if num_slots[row] - num_used[row] <= len(times_s):
                kept[columns.addresses[row]] = min(times_s.values())
        return kept

    def _lets_go(self, view: EndpointView, use: SlotUse, ticket: Ticket, now: float) -> bool:
        """Return whether an adapter lets its slot go for a request."""
        lead = self._lead(ticket.request.claim, use)
        if lead:
            return lead > 0
        own_s = self._plan.settings.slot_turn_s
        wanted_s = slot_turn_s(view) if own_s is None else own_s or inf
        return wanted_s <= min(now - ticket.arrived_at_s, now - use.since_s)

    def _lead(self, one: Claim | Reservation, other: Claim | SlotUse) -> float:
        """Return by how much one goes before another; 0 where they are equal."""
        if one.priority != other.priority or not self._plan.settings.fair:
            return one.priority - other.priority
        served = self._plan.served
        return served(other.priority, other.flow) - served(other.priority, one.flow)


def slot_turn_s(view: EndpointView) -> float:
    """Return for how long an adapter keeps its slot on an endpoint while others wait; infinite
    until a response has ended there.

    A change costs a load, for which all wait, and the places that are empty until the adapter's
    last response has ended.
    """
    response_s = view.response_s
    return (
        inf if response_s is None else COSTS_PER_SLOT_CHANGE * (response_s + view.costs.cold_load_s)
    )


def _may_reserve(view: EndpointView, num_reserved: int) -> bool:
    """Return whether an endpoint is full of adapters, and may have one more slot reserved."""
    slots = view.max_loras
    is_full = slots is None or len(view.pending_by_adapter) >= slots
    return is_full and num_reserved < max(1, RESERVED_RATIO * (slots or 0))
