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
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, log
from typing import NamedTuple

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
MAX_LEFT = 1024
"""Slots that other routers' requests have left in the last `schedule.TOLD_WAIT_S`."""
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
        served: Returns what a flow of a priority has got.

    Attributes:
        elsewhere: Slots that other routers keep.
    """

    def __init__(self, settings: QueueSettings, served: Callable[[int, str], float]) -> None:
        self._settings = settings
        self.elsewhere: Sequence[Reservation] = ()
        self._served = served
        self._all: dict[str, Reservation] = {}
        # By other routers' requests: until when, by address and adapter; and the same in order.
        self._left: dict[str, dict[str, float]] = {}
        self._left_until = deque[tuple[float, str, str]]()
        self._fresh: set[str] = set()

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings, and let all go."""
        self._settings = settings
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
        self._all.pop(adapter or "", None)

    def freed_elsewhere(self, address: str, adapter: str, *, until_s: float) -> None:
        """Keep a slot for the router whose request for an adapter has ended there: else both would
        give it away, and one of the two requests would wait in the engine.
        """
        self._left.setdefault(address, {})[adapter] = until_s
        self._left_until.append((until_s, address, adapter))
        if len(self._left_until) > MAX_LEFT:
            self._forget_oldest()

    def hear(self, elsewhere: Sequence[Reservation]) -> None:
        """Take the slots that other routers keep."""
        self.elsewhere = elsewhere

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
        until_s = ticket.waits_since_s + self._settings.slot_hold_s
        if now >= until_s or adapter in self._fresh:
            return
        claim, known = ticket.request.claim, self._all.pop(adapter, None)
        # Requests that come after it leave it the slots reserved for them.
        first = [each for each in self if self._lead(each, claim) >= 0]
        told = [e for e in self.elsewhere if now < e.until_s and self._stays(e, claim, known)]
        if len(first) >= MAX_RESERVED or any(each.adapter == adapter for each in told):
            return
        taken = Counter((each.address, each.leaving) for each in [*first, *told])
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
        times = self._left_until
        while times and now >= times[0][0]:
            self._forget_oldest()
        if adapter is None or not (self._left or self._all or self.elsewhere):
            return {}
        own = self._all.get(adapter)
        kept, reserved = dict[str, float](), dict[str, dict[str, float]]()
        for each in chain(self, self.elsewhere):
            is_own = each.adapter == adapter or (own is not None and each[1:3] == own[1:3])
            if is_own or now >= each.until_s or self._lead(each, claim) < 0:
                continue
            if each.leaving == adapter:
                kept[each.address] = each.until_s
            reserved.setdefault(each.address, {})[each.leaving] = each.until_s
        slots, used = columns.num_slots, columns.num_used
        for address, left in self._left.items():
            row = columns.rows.get(address)
            if address in reserved or (row is not None and 0 < slots[row] - used[row] <= len(left)):
                reserved[address] = reserved.get(address, {}) | left
                if own is not None and own.address == address:
                    reserved[address].pop(own.leaving, None)
        for address, freed in reserved.items():
            row = columns.rows.get(address)
            if row is None:
                continue
            uses = columns.pending(row)
            freed_s = [until_s for name, until_s in freed.items() if name not in uses]
            if adapter not in uses and 0 < slots[row] - used[row] <= len(freed_s):
                kept[address] = min(freed_s)
        return kept

    def _forget_oldest(self) -> None:
        """Forget the slot that was left first."""
        until_s, address, adapter = self._left_until.popleft()
        left = self._left.get(address, {})
        if left.get(adapter) == until_s:
            del left[adapter]
            if not left:
                del self._left[address]

    def _lets_go(self, view: EndpointView, use: SlotUse, ticket: Ticket, now: float) -> bool:
        """Return whether an adapter lets its slot go for a request."""
        lead = self._lead(ticket.request.claim, use)
        if lead:
            return lead > 0
        own_s = self._settings.slot_turn_s
        wanted_s = turn_s(view) if own_s is None else own_s or inf
        return wanted_s <= min(now - ticket.arrived_at_s, now - use.since_s)

    def _stays(self, each: Reservation, claim: Claim, known: Reservation | None) -> bool:
        """Return whether what another router keeps is not to be had for a request.

        Of two that have the same right who has it already keeps it; of two who took it at once the
        same one on both sides.
        """
        lead = self._lead(each, claim)
        if lead or known is None:
            return lead >= 0
        return (*each[1:3], each.adapter) < (*known[1:3], known.adapter)

    def _lead(self, one: Claim | Reservation, other: Claim | SlotUse) -> float:
        """Return by how much one goes before another; 0 where they are equal."""
        flow, other_flow = _flow(one), _flow(other)
        if one.priority != other.priority:
            return one.priority - other.priority
        if flow == other_flow or not self._settings.fair:
            return 0
        return self._served(one.priority, other_flow) - self._served(one.priority, flow)


def _flow(each: Claim | Reservation | SlotUse) -> str:
    return each._flow if isinstance(each, Claim) else each.flow


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
    is_full = slots is None or len(view.pending_by_adapter) >= slots
    return is_full and num_reserved < max(1, RESERVED_RATIO * (slots or 0))
