"""`LeastHarm` over columns: the same prices, and only where they may be the lowest.

An endpoint where the adapter does not run costs at least a slot and its place among the adapter's
homes, and a load where it is not loaded. So the endpoints where it runs come first, then those
where it is loaded if they are few, then its homes in their order. The search ends when the next
home cannot be cheaper than the best: all other terms are 0 or more, and sums of floats are
monotonic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from math import inf

from extproc.fleet.columns import Columns
from extproc.phrases import FOR_ROOM, FOR_SLOT
from extproc.routing.policies.harm import (
    LAST_SLOT_RATIO,
    LATE_RATIO,
    LOAD_STALL_RATIO,
    PROMPT_STALL_RATIO,
    ROOM_RATIO,
    FirstHomes,
    Weights,
)
from extproc.types import RequestInfo, Wait

Price = tuple[float, float, int, float, float, float, float, float]
"""Of a row: prompts ahead, the own prompt, pending requests, load, slot, a wait for one, the
distance from home, and a late first token; all but the third in seconds, the first below 0 where
none are."""
_NONE: Mapping[int, int] = {}
_FEW = 4
"""Rows where an adapter is loaded that are looked at before its homes."""


class Search:
    """Looks for the rows that have room and the lowest price.

    Attributes:
        running: Unfinished requests for the adapter, by those of the rows that have some.
        ties: The rows that have the lowest price, and what it is made of; none where no row has
            room, or none that has has a slot.
    """

    __slots__ = ("_few", "_order", "_rest_load_s", "_slot_s", "running", "ties")

    def __init__(
        self,
        weights: Weights,
        first_homes: FirstHomes,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
    ) -> None:
        adapter, self._slot_s, self._rest_load_s = request.adapter, 0.0, 0.0
        self.ties: Mapping[int, Price] = {}
        latest_s = now + ROOM_RATIO * weights.objective_s(request)
        if not _is_place_left(columns, rows, adapter, latest_s):
            return
        self.running: Mapping[int, int] = _NONE
        self._order: Iterable[int] = ()
        self._few: Sequence[tuple[int, int]] = ()
        if adapter is not None and len(rows) == len(columns.addresses):
            running = self.running = columns.running(adapter)
            num, places = sum(running.values()) if running else 0, len(running)
            free = columns.all_free
            self._slot_s = weights.slot_price_s(columns.all_slots, free, num, places)
            self._arrange(first_homes, columns, adapter)
        elif adapter is not None:
            self._weigh(weights, first_homes, columns, rows, adapter)
        self.ties = self._look(weights, columns, rows, request, now)

    def _arrange(self, first_homes: FirstHomes, columns: Columns, adapter: str) -> None:
        """Put all rows in order, and those first where it is loaded, if they are few."""
        addresses, holders = columns.addresses, columns.few_holders(adapter)
        first = self._order = first_homes.of(adapter, addresses)
        if len(first) < len(addresses):
            self._order = first_homes.all(adapter, addresses)
        elif holders is not None and len(holders) <= _FEW:
            running, self._rest_load_s = self.running, columns.least_cold_load_s
            self._few = [(~first[row], row) for row in holders if row not in running]

    def _weigh(
        self,
        weights: Weights,
        first_homes: FirstHomes,
        columns: Columns,
        rows: Sequence[int],
        adapter: str,
    ) -> None:
        """Price a slot for the adapter by some of all rows, and put them in order."""
        slots, used, everywhere = columns.num_slots, columns.num_used, columns.running(adapter)
        running = self.running = {row: everywhere[row] for row in rows if row in everywhere}
        num_slots = sum([slots[row] for row in rows])
        num_free = sum([slots[row] - used[row] for row in rows if slots[row] > used[row]])
        num = sum(running.values())
        self._slot_s = weights.slot_price_s(num_slots, num_free, num, len(running))
        self._order = filter(set(rows).__contains__, first_homes.all(adapter, columns.addresses))

    def _look(
        self,
        weights: Weights,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
    ) -> dict[int, Price]:
        """Look at the rows where the adapter runs, or at all where none is asked for; then at the
        rest, which need a slot, until no further one can be cheaper than the best so far.
        """
        # Written out: a call for each endpoint is what this loop would cost.
        adapter, running, slot_s, pending_s = (
            request.adapter,
            self.running,
            self._slot_s,
            weights.pending_s,
        )
        home_s, objective_s, done_at, busy_at = (
            weights.home_s,
            request.claim.ttft_s,
            columns.done_s,
            columns.num_pending,
        )
        if objective_s is None:
            objective_s = weights.ttft_s
        latest_s, num_bytes, cached = (
            now + ROOM_RATIO * objective_s,
            request.body_bytes,
            request.cached_bytes,
        )
        if cached or request._context_bytes is not None:
            num_bytes = min(map(request.rest_bytes, cached or ("",)))
        least_s = num_bytes * columns.least_s_per_byte
        least_stall_s = PROMPT_STALL_RATIO * least_s + pending_s
        best_s, ties = inf, dict[int, Price]()
        first = zip(repeat(None), rows if adapter is None else running)
        for place, row in chain(first, self._few, enumerate(self._order)):
            busy = busy_at[row]
            least_price_s = least_s + least_stall_s * busy
            if place is not None:
                if place < 0:
                    place = ~place
                elif least_s + (slot_s + home_s * place) + self._rest_load_s > best_s:
                    break
                elif row in running:
                    continue
                away_s = home_s * place
                least_price_s += slot_s + away_s
            done_s = done_at[row]
            if least_price_s > best_s or done_s > latest_s or not columns.has_room[row]:
                continue
            if cached:
                num_bytes = request.rest_bytes(columns.addresses[row])
            prompt_s, ahead_s = num_bytes * columns.s_per_byte[row], done_s - now
            first_s = ahead_s + prompt_s if ahead_s > 0 else prompt_s
            price_s = first_s + (PROMPT_STALL_RATIO * prompt_s + pending_s) * busy
            load_s = opening_s = wait_s = late_s = 0.0
            if place is None:
                away_s = 0.0
            else:
                num_slots = columns.num_slots[row]
                num_free = num_slots - columns.num_used[row]
                opening_s = slot_s * (1 + LAST_SLOT_RATIO / num_free if num_free > 0 else 1.0)
                price_s += opening_s + away_s
                load_s = columns.load_s(row, adapter or "")
                first_s += load_s
                load_s *= 1 + LOAD_STALL_RATIO * busy
                price_s += load_s
                if num_slots and num_free <= 0:
                    wait_s = weights.full_s
                    price_s += wait_s
            if first_s > LATE_RATIO * objective_s:
                late_s = weights.late_s
                price_s += late_s
            if price_s <= best_s:
                if price_s < best_s:
                    best_s, ties = price_s, {}
                ties[row] = ahead_s, prompt_s, busy, load_s, opening_s, wait_s, away_s, late_s
        return ties


def terms_of(price: Price, weights: Weights) -> Mapping[str, float]:
    """Return the terms of a price, as `LeastHarm.terms` does."""
    ahead_s, prompt_s, busy, load_s, opening_s, wait_s, away_s, late_s = price
    return {
        "prompts_ahead": ahead_s if ahead_s > 0 else 0.0,
        "own_prompt": prompt_s * (1 + PROMPT_STALL_RATIO * busy),
        "batch": weights.pending_s * busy,
        "load": load_s,
        "slot": opening_s,
        "slot_wait": wait_s,
        "home": away_s,
        "late_first_token": late_s,
    }


def wait_for(
    columns: Columns, rows: Sequence[int], request: RequestInfo, now: float, weights: Weights
) -> Wait:
    """Return the wait of a request for which no row has room, or none that has has a slot."""
    most_ahead_s = ROOM_RATIO * weights.objective_s(request)
    latest_s, done_at, has_room = now + most_ahead_s, columns.done_s, columns.has_room
    reason = FOR_ROOM
    for row in rows:
        if has_room[row]:
            reason = "room"
            if done_at[row] <= latest_s:
                reason = FOR_SLOT
                break
    behind_s = [done_at[row] for row in rows if done_at[row] > latest_s]
    return Wait(min(behind_s, default=inf) - most_ahead_s, reason)


def _is_place_left(
    columns: Columns, rows: Sequence[int], adapter: str | None, latest_s: float
) -> bool:
    """Return whether a row has room, and a slot that is free or the adapter's own."""
    slots, used, has_room, done_at = (
        columns.num_slots,
        columns.num_used,
        columns.has_room,
        columns.done_s,
    )
    running: Mapping[int, int] = _NONE if adapter is None else columns.running(adapter)
    for row in rows:
        has_slot = adapter is None or row in running or not 0 < slots[row] <= used[row]
        if has_slot and has_room[row] and done_at[row] <= latest_s:
            return True
    return False
