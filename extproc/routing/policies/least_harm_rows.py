"""`LeastHarm` over columns: the same prices, and only where they may be the lowest.

An endpoint where the adapter does not run costs at least a slot and its place among the adapter's
homes. So those where it runs are looked at, then its homes from the first on, until the next one
cannot be cheaper than the best: all other terms are 0 or more, and sums of floats are monotonic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from extproc.fleet.columns import Columns
from extproc.routing.policies.harm import (
    LATE_RATIO,
    LOAD_STALL_RATIO,
    PROMPT_STALL_RATIO,
    ROOM_RATIO,
    FirstHomes,
    Weights,
    homes,
    last_slots,
)
from extproc.types import RequestInfo


class Search:
    """Looks for the rows that have room and the lowest price.

    Attributes:
        slot_s: The price of a slot for the adapter.
        running: Unfinished requests for the adapter, by those of the rows that have some.
        places: Of the rows that were looked at, among the adapter's homes.
        best_s: The lowest price; infinite as long as no row has room.
        ties: The rows that have it.
    """

    __slots__ = (
        *("_columns", "_first_homes", "_has_slot", "_now", "_request", "_rows", "_weights"),
        *("best_s", "places", "running", "slot_s", "ties"),
    )

    def __init__(
        self,
        weights: Weights,
        first_homes: FirstHomes,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
    ) -> None:
        self._weights, self._first_homes, self._columns = weights, first_homes, columns
        self._rows, self._request, self._now = rows, request, now
        self._has_slot = False
        self.slot_s, self.best_s = 0.0, inf
        self.running: Mapping[int, int] = {}
        self.places: dict[int, int] = {}
        self.ties: list[int] = []

    def run(self) -> bool:
        """Look; return whether a row was found that has what the request needs."""
        adapter = self._request.adapter
        if adapter is None:
            self._look((row, None) for row in self._rows)
            return bool(self.ties)
        self._weigh(adapter)
        self._look(self._candidates(adapter))
        self.ties.sort()
        return bool(self.ties) and (self._has_slot or self._is_slot_left())

    def _weigh(self, adapter: str) -> None:
        """Price a slot for the adapter."""
        columns, rows, running = self._columns, self._rows, self._columns.running(adapter)
        num_slots, num_free = columns.all_slots, columns.all_free
        if len(rows) < len(columns.views):
            slots, used = columns.num_slots, columns.num_used
            running = {row: running[row] for row in rows if row in running}
            num_slots = sum([slots[row] for row in rows])
            num_free = sum([slots[row] - used[row] for row in rows if slots[row] > used[row]])
        self.running = running
        num_elsewhere = sum(running.values())
        self.slot_s = self._weights.slot_price_s(num_slots, num_free, num_elsewhere, len(running))

    def _candidates(self, adapter: str) -> Iterator[tuple[int, float | None]]:
        """Yield the rows where the adapter runs; then the others, with the price of a slot and of
        the distance from home, until no further one can be cheaper than the best so far."""
        columns, slot_s, home_s = self._columns, self.slot_s, self._weights.home_s
        running, places = self.running, self.places
        for row in running:
            yield row, None
        least_s = self._least_prompt_s()
        for place, row in enumerate(self._in_order(adapter)):
            away_s = home_s * place
            if least_s + (slot_s + away_s) > self.best_s:
                return
            if row not in running:
                places[row] = place
                num_free = columns.num_slots[row] - columns.num_used[row]
                yield row, slot_s * last_slots(num_free) + away_s

    def _in_order(self, adapter: str) -> Iterable[int]:
        columns, rows = self._columns, self._rows
        if len(rows) == len(columns.views):
            return self._first_homes.of(adapter, columns.addresses)
        places = homes(adapter, tuple([columns.addresses[row] for row in rows]))
        return [row for _, row in sorted(zip(places, rows, strict=True))]

    def _least_prompt_s(self) -> float:
        """Return the least time that the prompt takes anywhere."""
        request = self._request
        num_bytes = request.rest_bytes("")
        if request.cached_bytes:
            num_bytes = min(map(request.rest_bytes, request.cached_bytes))
        return num_bytes * self._columns.least_s_per_byte

    def _look(self, rows: Iterable[tuple[int, float | None]]) -> None:
        """Look at rows with the price of an opening each, None where the adapter runs or none is
        asked for."""
        # Written out: a call for each endpoint is what this loop would cost.
        columns, request, now = self._columns, self._request, self._now
        weights, adapter = self._weights, request.adapter or ""
        done, busy_at, has_room = columns.done_s, columns.num_pending, columns.has_room
        pending_s, objective_s = weights.pending_s, weights.objective_s(request)
        latest_s, late_from_s = now + ROOM_RATIO * objective_s, LATE_RATIO * objective_s
        num_bytes, has_cached = request.rest_bytes(""), bool(request.cached_bytes)
        holders = columns.holders(adapter)
        for row, opening_s in rows:
            done_s = done[row]
            if done_s > latest_s or not has_room[row]:
                continue
            if has_cached:
                num_bytes = request.rest_bytes(columns.addresses[row])
            busy, prompt_s = busy_at[row], num_bytes * columns.s_per_byte[row]
            ahead_s = done_s - now
            first_s = ahead_s + prompt_s if ahead_s > 0 else prompt_s
            price = first_s + (PROMPT_STALL_RATIO * prompt_s + pending_s) * busy
            is_full = False
            if opening_s is not None:
                price += opening_s
                view = columns.views[row]
                is_full = 0 < columns.num_slots[row] <= columns.num_used[row]
                load_s = view.costs.cold_load_s
                if row in holders:
                    load_s = view.costs.load_s(adapter, view.gpu_adapters, view.cpu_adapters)
                first_s += load_s
                price += load_s * (1 + LOAD_STALL_RATIO * busy)
                price += weights.full_s if is_full else 0.0
            price += weights.late_s if first_s > late_from_s else 0.0
            self._has_slot = self._has_slot or not is_full
            if price < self.best_s:
                self.best_s, self.ties = price, [row]
            elif price == self.best_s:
                self.ties.append(row)

    def _is_slot_left(self) -> bool:
        """Return whether a row that has room has a free slot: those looked at have not."""
        columns, now = self._columns, self._now
        latest_s = now + ROOM_RATIO * self._weights.objective_s(self._request)
        slots, used = columns.num_slots, columns.num_used
        return any(
            columns.has_room[row] and columns.done_s[row] <= latest_s
            for row in self._rows
            if not 0 < slots[row] <= used[row]
        )
