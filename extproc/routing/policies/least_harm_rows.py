"""`LeastHarm` over columns: the same prices, and only where they may be the lowest.

An endpoint where the adapter does not run costs at least a slot and its place among the adapter's
homes. So those where it runs are looked at, then its homes from the first on, until the next one
cannot be cheaper than the best: all other terms are 0 or more, and sums of floats are monotonic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
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
        ties: The rows that have the lowest price, in order; none where no row has room.
    """

    __slots__ = ("places", "running", "slot_s", "ties")

    def __init__(
        self,
        weights: Weights,
        first_homes: FirstHomes,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
    ) -> None:
        adapter, self.slot_s = request.adapter, 0.0
        self.places: dict[int, int] = {}
        self.running: Mapping[int, int] = {}
        order: Iterable[int] = ()
        if adapter is not None:
            self._weigh(weights, columns, rows, adapter)
            order = _in_order(first_homes, columns, rows, adapter)
        self.ties = self._look(weights, columns, rows, order, request, now)

    def _weigh(self, weights: Weights, columns: Columns, rows: Sequence[int], adapter: str) -> None:
        """Price a slot for the adapter."""
        running = columns.running(adapter)
        num_slots, num_free = columns.all_slots, columns.all_free
        if len(rows) < len(columns.addresses):
            slots, used = columns.num_slots, columns.num_used
            running = {row: running[row] for row in rows if row in running}
            num_slots = sum([slots[row] for row in rows])
            num_free = sum([slots[row] - used[row] for row in rows if slots[row] > used[row]])
        self.running = running
        num_elsewhere = sum(running.values()) if running else 0
        self.slot_s = weights.slot_price_s(num_slots, num_free, num_elsewhere, len(running))

    def _look(
        self,
        weights: Weights,
        columns: Columns,
        rows: Sequence[int],
        order: Iterable[int],
        request: RequestInfo,
        now: float,
    ) -> list[int]:
        """Look at the rows where the adapter runs, or at all where none is asked for; then at the
        others from the adapter's first home on, which need a slot, until no further one can be
        cheaper than the best so far."""
        # Written out: a call for each endpoint is what this loop would cost.
        adapter, running, slot_s, places = request.adapter, self.running, self.slot_s, self.places
        done, busy_at, has_room = columns.done_s, columns.num_pending, columns.has_room
        s_per_byte, slots, used = columns.s_per_byte, columns.num_slots, columns.num_used
        pending_s, home_s, objective_s = weights.pending_s, weights.home_s, weights.ttft_s
        if request.claim.ttft_s is not None:
            objective_s = request.claim.ttft_s
        latest_s, late_from_s = now + ROOM_RATIO * objective_s, LATE_RATIO * objective_s
        num_bytes, cached = request.rest_bytes(""), request.cached_bytes
        least_bytes = min(map(request.rest_bytes, cached)) if cached else num_bytes
        least_s = least_bytes * columns.least_s_per_byte
        least_stall_s = PROMPT_STALL_RATIO * least_s + pending_s
        first: Collection[int] = rows if adapter is None else running
        holders = columns.holders(adapter or "")
        best_s, ties, has_slot = inf, list[int](), False
        for place, row in enumerate(chain(first, order), -len(first)):
            busy = busy_at[row]
            if place < 0:
                if least_s + least_stall_s * busy > best_s:
                    continue
            else:
                away_s = home_s * place
                least_opening_s = slot_s + away_s
                if least_s + least_opening_s > best_s:
                    break
                if row in running or least_s + least_stall_s * busy + least_opening_s > best_s:
                    continue
            done_s = done[row]
            if done_s > latest_s or not has_room[row]:
                continue
            if cached:
                num_bytes = request.rest_bytes(columns.addresses[row])
            prompt_s, ahead_s = num_bytes * s_per_byte[row], done_s - now
            first_s = ahead_s + prompt_s if ahead_s > 0 else prompt_s
            price = first_s + (PROMPT_STALL_RATIO * prompt_s + pending_s) * busy
            if place < 0:
                has_slot = True
            else:
                places[row], num_free, view = place, slots[row] - used[row], columns.views[row]
                price += slot_s * last_slots(num_free) + away_s
                load_s = view.costs.cold_load_s
                if row in holders:
                    load_s = view.costs.load_s(adapter or "", view.gpu_adapters, view.cpu_adapters)
                first_s += load_s
                price += load_s * (1 + LOAD_STALL_RATIO * busy)
                if num_free > 0 or not slots[row]:
                    has_slot = True
                else:
                    price += weights.full_s
            if first_s > late_from_s:
                price += weights.late_s
            if price < best_s:
                best_s, ties = price, [row]
            elif price == best_s:
                ties.append(row)
        ties.sort()
        return ties if has_slot or (ties and _is_slot_left(columns, rows, latest_s)) else []


def _in_order(
    first_homes: FirstHomes, columns: Columns, rows: Sequence[int], adapter: str
) -> Iterable[int]:
    """Return the rows, from the adapter's first home on."""
    if len(rows) == len(columns.addresses):
        return first_homes.of(adapter, columns.addresses)
    places = homes(adapter, tuple([columns.addresses[row] for row in rows]))
    return [row for _, row in sorted(zip(places, rows, strict=True))]


def _is_slot_left(columns: Columns, rows: Sequence[int], latest_s: float) -> bool:
    """Return whether a row that has room has a free slot: those looked at have not."""
    slots, used = columns.num_slots, columns.num_used
    return any(
        columns.has_room[row] and columns.done_s[row] <= latest_s
        for row in rows
        if not 0 < slots[row] <= used[row]
    )
