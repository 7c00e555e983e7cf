"""The estimates of `LeastHarm`: what a request costs at each row of columns."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import exp, inf, sqrt

from msgspec import Struct

from extproc.adapters.placement.orders import order
from extproc.pods.columns import Columns
from extproc.types import RequestInfo

PROMPT_STALL_RATIO = 0.1
LOAD_STALL_RATIO = 0.05
"""Part of a prompt's and of a load's time that counts as harm to each pending request: it decodes
a step later, but has most of its steps without that."""
LATE_RATIO = 0.8
"""Part of the objective from which an estimated first token counts as late. The estimate leaves out
the step that runs already, and the share of requests that decode.
"""
SHARED_SLOT = 10
"""Requests that an adapter may have in each of its slots before a further one becomes cheaper."""
ROOM_RATIO = 0.5
"""Part of the objective that prompts ahead may take at an endpoint that has room."""
LAST_SLOT_RATIO = 0.2
"""Part of a slot's price that comes on top where it is the endpoint's last free one, half of it
where it is one of two, and so on. In the laboratory 0.2 and 0.5 let routers that do not tell each
other miss a quarter fewer objectives, and 0.2 also those that do."""
NUM_FIRST_HOMES, MAX_ADAPTERS_WITH_FIRST_HOMES = 64, 16_384
"""Whose first homes are remembered, which most decisions need no more than: to compute them takes
about a microsecond for each endpoint."""


class Weights(Struct, frozen=True):
    """The parameters of `LeastHarm`, in seconds."""

    ttft_s: float
    late_s: float
    slot_s: float
    full_s: float
    pending_s: float
    home_s: float


class FirstHomes:
    """The rows of addresses in adapters' orders, from the first home on."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        self._first: dict[str, dict[int, int]] = {}

    def of(self, adapter: str, addresses: tuple[str, ...]) -> dict[int, int]:
        """Return an adapter's first homes, in order, and the place of each.

        Args:
            addresses: All, sorted; found sooner if they are the same object as long as they stay.
        """
        is_same = addresses is self._addresses or addresses == self._addresses
        if not is_same or len(self._first) >= MAX_ADAPTERS_WITH_FIRST_HOMES:
            self._addresses, self._first = addresses, {}
            self._rows = {address: row for row, address in enumerate(addresses)}
        first = self._first.get(adapter)
        if first is None:
            homes = self._order(adapter)[:NUM_FIRST_HOMES]
            first = self._first[adapter] = {row: place for place, row in enumerate(homes)}
        return first

    def all(self, adapter: str, addresses: tuple[str, ...]) -> Iterator[int]:
        """Yield the rows of all addresses in an adapter's order."""
        first = self.of(adapter, addresses)
        # Of an iterator: CPython's compiler fails at a sequence (docs/performance.md).
        yield from iter(first)
        yield from iter(self._order(adapter)[len(first) :])

    def _order(self, adapter: str) -> list[int]:
        return [self._rows[address] for address in order(adapter, self._addresses)]


class Price(Struct, frozen=True, gc=False):
    """The terms of a price, in seconds; all of them are 0 or more."""

    prompts_ahead: float
    own_prompt: float
    batch: float
    load: float
    slot: float
    slot_wait: float
    home: float
    late_first_token: float


_Visit = tuple[int | None, int]
"""A row that is looked at, after its place among the adapter's homes. That is None where the
adapter runs or no home is asked for, and inverted where it does not say which rows are left."""
_Way = tuple[Iterable[_Visit], Iterable[int], Container[int], float, bool]
"""The visits before all homes; the homes in their order, and those of them that were visited; the
price of a slot; and whether the adapter is loaded at none but those."""


class Prices:
    """The prices of rows for a request, and which are the lowest.

    An endpoint where the adapter does not run costs at least a slot and its place among the
    adapter's homes, and a load where it is not loaded. So the endpoints where it runs come first,
    then those where it is loaded if they are few, then its homes in their order. The search ends
    when the next home cannot be cheaper than the best: all other terms are 0 or more, and sums of
    floats are monotonic.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._first_homes = weights, FirstHomes()

    def of(
        self, columns: Columns, rows: Iterable[int], request: RequestInfo, now: float
    ) -> list[Price]:
        """Return the prices of some rows, with room or without, in a search of all."""
        every = range(len(columns.addresses))
        running = columns.running(request.adapter or "")
        way = self._way(columns, every, request.adapter, running)
        places, always = {row: place for place, row in enumerate(way[1])}, [True] * len(every)
        found = []
        for row in rows:
            place = None if row in running else places.get(row)
            visits = ((None if place is None else ~place, row),)
            found.append(self._walk(columns, request, now, always, inf, way, visits)[row])
        return found

    def lowest(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        has_room: Sequence[bool],
        latest_s: float,
        running: Mapping[int, int],
    ) -> Mapping[int, Price]:
        """Return the rows that have the lowest price of those that have room and whose prompts are
        computed by then, and that price; none where no row has.

        Args:
            running: Unfinished requests for the adapter, by those of the rows that have some.
        """
        way = self._way(columns, rows, request.adapter, running)
        visits = chain(way[0], enumerate(way[1]))
        return self._walk(columns, request, now, has_room, latest_s, way, visits)

    def _way(
        self,
        columns: Columns,
        rows: Sequence[int],
        adapter: str | None,
        running: Mapping[int, int],
    ) -> _Way:
        """Return where the search goes."""
        if adapter is None:
            return zip(repeat(None), rows), (), (), 0.0, False
        before: list[_Visit] = [*zip(repeat(None), running)] if running else []
        homes: Iterable[int]
        seen: Container[int] = running
        slot_s, has_all_seen = 0.0, False
        addresses = columns.addresses
        if len(rows) == len(addresses):
            num_slots, num_free = columns.all_slots, columns.all_free
            homes = first = self._first_homes.of(adapter, addresses)
            if len(first) < len(addresses):
                homes = self._first_homes.all(adapter, addresses)
            elif (holders := columns.few_holders(adapter)) is not None:  # before all rows in order
                seen, has_all_seen = holders, True
                few = [(~first[row], row) for row in holders if row not in running]
                before += sorted(few, reverse=True)  # the next to home is mostly the best
        else:
            num_slots, num_free = slots_of(columns, rows)
            every = self._first_homes.all(adapter, addresses)
            homes = filter(set(rows).__contains__, every)
        if num_slots:
            slot_s = self._weights.slot_s * exp(-num_free / sqrt(num_slots))
        if running:
            num_alike = (sum(running.values()) + 1) / (1 + len(running))
            slot_s /= max(1.0, num_alike / SHARED_SLOT)
        return before, homes, seen, slot_s, has_all_seen

    def _walk(
        self,
        columns: Columns,
        request: RequestInfo,
        now: float,
        has_room: Sequence[bool],
        latest_s: float,
        way: _Way,
        visits: Iterable[_Visit],
    ) -> Mapping[int, Price]:
        """Look at rows until no further one can be cheaper than the best so far; return as
        `lowest`."""
        # Written out: a call for each endpoint is what this loop would cost.
        _, _, seen, slot_s, has_all_seen = way
        weights, adapter = self._weights, request.adapter or ""
        pending_s, home_s = weights.pending_s, weights.home_s
        done_at, busy_at = columns.done_s, columns.num_pending
        num_bytes, cached = request.body_bytes, request.cached_bytes
        wanted_s = request.claim.ttft_s
        late_from_s = LATE_RATIO * (weights.ttft_s if wanted_s is None else wanted_s)
        if cached or request.context_bytes is not None:
            num_bytes = min(map(request.rest_bytes, cached or ("",)))
        least_s_per_byte, rest_load_s = columns.least()
        if not has_all_seen:
            rest_load_s = 0.0
        least_s = num_bytes * least_s_per_byte
        least_stall_s = PROMPT_STALL_RATIO * least_s + pending_s
        best_s, ties = inf, dict[int, Price]()
        for place, row in visits:
            away_s = least_place_s = 0.0
            if place is not None:
                away_s = home_s * (place if place >= 0 else ~place)
                least_place_s = slot_s + away_s
                if place >= 0:
                    if least_s + least_place_s + rest_load_s > best_s:
                        break
                    if row in seen:
                        continue
            busy, done_s = busy_at[row], done_at[row]
            if done_s > latest_s or not has_room[row]:
                continue
            if least_s + least_stall_s * busy + least_place_s > best_s:
                continue
            if cached:
                num_bytes = request.rest_bytes(columns.addresses[row])
            prompt_s, ahead_s = num_bytes * columns.s_per_byte[row], done_s - now
            first_s = ahead_s + prompt_s if ahead_s > 0 else prompt_s
            price_s = first_s + (PROMPT_STALL_RATIO * prompt_s + pending_s) * busy
            load_s = opening_s = wait_s = late_s = 0.0
            if place is not None:
                num_slots = columns.num_slots[row]
                num_free = num_slots - columns.num_used[row]
                opening_s = slot_s * (1 + LAST_SLOT_RATIO / num_free if num_free > 0 else 1.0)
                price_s += opening_s + away_s
                load_s = columns.load_s(row, adapter)
                first_s += load_s
                load_s *= 1 + LOAD_STALL_RATIO * busy
                price_s += load_s
                if num_slots and num_free <= 0:
                    wait_s = weights.full_s
                    price_s += wait_s
            if first_s > late_from_s:
                late_s = weights.late_s
                price_s += late_s
            if price_s <= best_s:
                if price_s < best_s:
                    best_s, ties = price_s, {}
                ties[row] = Price(
                    ahead_s if ahead_s > 0 else 0.0,
                    prompt_s * (1 + PROMPT_STALL_RATIO * busy),
                    pending_s * busy,
                    load_s,
                    opening_s,
                    wait_s,
                    away_s,
                    late_s,
                )
        return ties


def slots_of(columns: Columns, rows: Sequence[int]) -> tuple[int, int]:
    """Return the slots of those of the rows that tell theirs, and how many of these are free."""
    if len(rows) == len(columns.addresses):
        return columns.all_slots, columns.all_free
    slots, used = columns.num_slots, columns.num_used
    return sum([slots[row] for row in rows]), sum([max(0, slots[row] - used[row]) for row in rows])
