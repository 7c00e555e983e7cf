"""The estimates of `LeastHarm`: what a request costs at each row of columns."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import exp, inf, sqrt

from msgspec import Struct

from extproc.adapters.placement import order
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
        yield from first
        yield from self._order(adapter)[len(first) :]

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


_Parts = tuple[float, float, int, float, float, float, float, float]
"""Of a price: prompts ahead (below 0 where none are), the own prompt, pending requests, load, slot,
a wait for one, the distance from home, and a late first token; all but the third in seconds."""
_NONE: Mapping[int, int] = {}


class Search:
    """The prices of some rows for a request, and which are the lowest.

    An endpoint where the adapter does not run costs at least a slot and its place among the
    adapter's homes, and a load where it is not loaded. So the endpoints where it runs come first,
    then those where it is loaded if they are few, then its homes in their order. The search ends
    when the next home cannot be cheaper than the best: all other terms are 0 or more, and sums of
    floats are monotonic.

    Args:
        running: Unfinished requests for the adapter, by row.

    Attributes:
        running: The same of those of the rows that have some.
        num_slots: Of the rows that tell theirs, and `num_free` of those.
    """

    __slots__ = (
        *("_columns", "_few", "_now", "_order", "_request", "_rest_load_s", "_rows", "_seen"),
        *("_slot_s", "_weights", "num_free", "num_slots", "running"),
    )

    def __init__(
        self,
        weights: Weights,
        first_homes: FirstHomes,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        running: Mapping[int, int],
    ) -> None:
        self._weights, self._columns, self._rows = weights, columns, rows
        self._request, self._now = request, now
        self._slot_s = self._rest_load_s = 0.0
        self.running = _NONE
        self._seen: Container[int] = ()  # rows that are visited before `_order`
        self._order: Iterable[int] = ()
        self._few: Sequence[tuple[int, int]] = ()
        adapter = request.adapter
        if adapter is None:
            return
        if len(rows) == len(columns.addresses):
            self.running, self.num_slots = running, columns.all_slots
            self.num_free = columns.all_free
            addresses, holders = columns.addresses, columns.few_holders(adapter)
            first = self._order = first_homes.of(adapter, addresses)
            if len(first) < len(addresses):
                self._order = first_homes.all(adapter, addresses)
            elif holders is not None:  # in front of all rows in order, as they are few
                self._rest_load_s = columns.least[1]
                self._few = [(~first[row], row) for row in holders if row not in running]
                self._seen = holders
        else:
            slots, used = columns.num_slots, columns.num_used
            running = self.running = {row: running[row] for row in rows if row in running}
            self.num_slots = sum([slots[row] for row in rows])
            self.num_free = sum([max(0, slots[row] - used[row]) for row in rows])
            order = first_homes.all(adapter, columns.addresses)
            self._order = filter(set(rows).__contains__, order)
        self._seen = self._seen or running
        if self.num_slots:
            self._slot_s = weights.slot_s * exp(-self.num_free / sqrt(self.num_slots))
        if running:
            num_alike = (sum(running.values()) + 1) / (1 + len(running))
            self._slot_s /= max(1.0, num_alike / SHARED_SLOT)

    def price(self, parts: _Parts) -> Price:
        """Return the terms of a price."""
        ahead_s, prompt_s, busy, load_s, opening_s, wait_s, away_s, late_s = parts
        return Price(
            ahead_s if ahead_s > 0 else 0.0,
            prompt_s * (1 + PROMPT_STALL_RATIO * busy),
            self._weights.pending_s * busy,
            load_s,
            opening_s,
            wait_s,
            away_s,
            late_s,
        )

    def prices(self, rows: Iterable[int]) -> list[Price]:
        """Return the prices of some of the rows, with room or without."""
        running, always = self.running, [True] * len(self._columns.addresses)
        places = {row: place for place, row in enumerate(self._order)}
        found = []
        for row in rows:
            place = None if row in running else places.get(row)
            visit = None if place is None else ~place, row
            found.append(self.price(self.lowest(always, inf, [visit])[row]))
        return found

    def lowest(
        self,
        has_room: Sequence[bool],
        latest_s: float,
        visits: Iterable[tuple[int | None, int]] | None = None,
    ) -> Mapping[int, _Parts]:
        """Return the rows that have the lowest price of those that have room and whose prompts are
        computed by then; none where no row has.

        Args:
            visits: Rows to look at until no further one can be cheaper than the best so far; None
                for all. Each comes after its place among the adapter's homes. That is None where
                the adapter runs or no home is asked for, and inverted where it does not say which
                rows are left.
        """
        # Written out: a call for each endpoint is what this loop would cost.
        columns, weights, request, now = self._columns, self._weights, self._request, self._now
        if visits is None:
            rows = self._rows if request.adapter is None else self.running
            visits = chain(zip(repeat(None), rows), self._few, enumerate(self._order))
        adapter, seen, slot_s = request.adapter or "", self._seen, self._slot_s
        pending_s, home_s, rest_load_s = weights.pending_s, weights.home_s, self._rest_load_s
        done_at, busy_at = columns.done_s, columns.num_pending
        num_bytes, cached = request.body_bytes, request.cached_bytes
        wanted_s = request.claim.ttft_s
        late_from_s = LATE_RATIO * (weights.ttft_s if wanted_s is None else wanted_s)
        if cached or request._context_bytes is not None:
            num_bytes = min(map(request.rest_bytes, cached or ("",)))
        least_s = num_bytes * columns.least[0]
        least_stall_s = PROMPT_STALL_RATIO * least_s + pending_s
        best_s, ties = inf, dict[int, _Parts]()
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
                ties[row] = ahead_s, prompt_s, busy, load_s, opening_s, wait_s, away_s, late_s
        return ties
