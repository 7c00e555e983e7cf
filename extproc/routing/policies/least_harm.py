"""Least estimated harm: every endpoint has a price in seconds, and the lowest is chosen.

The price estimates what the request costs there, itself and the requests that are there already:

1. **Prompts ahead** of it that are still to be computed: the wait for its own first token.
2. **Its own prompt**, without a prefix that is in the endpoint's KV cache. While the prompt is
   computed, the requests that decode there wait.
3. **The batch**: every pending request makes each step a little longer.
4. **A late first token**: beyond the objective.
5. **A slot**, where the adapter does not run. A taken slot is one that other adapters lack, so it
   costs more the fewer are free. The number in use varies by about the square root of all slots,
   and that is the scale. A slot costs a little more where few are free at the endpoint itself: a
   router that does not know of this pick yet may give the same slot away. An adapter with many
   requests fills a further slot with its share of them, and each pays a part. Where no slot is free
   the adapter waits until one is.
6. **A load**, unless the adapter is in a slot there: all wait while it is copied.
7. **A home**, where the adapter does not run. Each adapter has its own order of the endpoints, and
   a small price rises along it. So routers that do not know of each other's picks open an adapter
   in the same places.

Only endpoints with room are considered. The engine runs one more request soon, by its own reports
(`room`). The prompts ahead take no more than half of the objective. One more request leaves the
running requests their time per token, if that is an objective that any endpoint can meet. If none
of these has a free slot or runs the adapter, there is no room either. The last free slots are for
requests of priority 0 and above. If no endpoint has room, the request is held. In the queue it can
still take whatever becomes free first, and it keeps its place in the queue's order.

Sources: 1 and 3 are the two loads of LMetric (arXiv 2603.15202), here added in seconds. 5 and 6
follow from a gate of `max_loras` slots. 7 is rendezvous hashing (Thaler and Ravishankar, 1998). The
gain of each part is in docs/archive/policy-evidence.md.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import inf, sqrt

from msgspec.structs import asdict

from extproc.phrases import FOR_ROOM, FOR_SLOT, busiest_first, pending, short, whereabouts
from extproc.pods.columns import Columns
from extproc.routing.policies.harm import ROOM_RATIO, Prices, Weights, slots_of
from extproc.routing.policies.ranking import one_of
from extproc.routing.policies.rows import RowChoice, RowPolicy, Shown
from extproc.types import EndpointView, RequestInfo, Snapshot, Wait

TPOT_RATIO = 0.9
"""Part of the objective for a token's time within which one more request may run: those that run
get slower before reports show it."""
SPARE_S = 10.0
"""For which a request of a priority below 0 leaves the last slots to other requests."""


class LeastHarm(RowPolicy):
    """The policy. All arguments are seconds, 0 or more and not infinite.

    Args:
        ttft_s: The objective for the first token of requests that name none.
        late_s: Price of a first token that comes later.
        slot_s: Price of a slot while none is free.
        full_s: Price of an endpoint without a free slot, for an adapter that does not run there.
        pending_s: Price of each pending request.
        home_s: Price of each place in an adapter's order of endpoints.
    """

    uses_cached_bytes = True
    waits_alike = True

    def __init__(
        self,
        ttft_s: float = 0.5,
        late_s: float = 0.5,
        slot_s: float = 2.0,
        full_s: float = 1.0,
        pending_s: float = 0.002,
        home_s: float = 0.02,
    ) -> None:
        if not all(0 <= each < inf for each in (ttft_s, late_s, slot_s, full_s, pending_s, home_s)):
            raise ValueError("all arguments of least_harm are seconds, at least 0 and finite")
        self.ttft_s = ttft_s
        self._prices = Prices(Weights(ttft_s, late_s, slot_s, full_s, pending_s, home_s))

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice | Wait:
        adapter, claim = request.adapter, request.claim
        has_room: Sequence[bool] = columns.has_room
        ahead_s = ROOM_RATIO * (self.ttft_s if claim.ttft_s is None else claim.ttft_s)
        running = columns.running(adapter or "")
        if running and len(rows) < len(columns.addresses):
            running = {row: running[row] for row in rows if row in running}
        if claim.tpot_s is not None:
            has_room = _in_time(columns, rows, claim.tpot_s)
        if not _is_place_left(columns, rows, adapter, running, has_room, now + ahead_s):
            return _wait(columns, rows, has_room, now, ahead_s)
        is_low = adapter is not None and claim.priority < 0
        if is_low and _leaves_slots(columns, rows, running, request, now):
            return _wait(columns, rows, has_room, now, ahead_s)
        ties = self._prices.lowest(columns, rows, request, now, has_room, now + ahead_s, running)
        row = one_of(sorted(ties), rng) if len(ties) > 1 else next(iter(ties))
        reason = "base"
        if adapter is not None:
            reason = "running"
            if row not in running:
                reason = "full" if 0 < columns.num_slots[row] <= columns.num_used[row] else "open"
        return RowChoice(row, reason, self.terms, ties[row])

    def terms(
        self, snapshot: Snapshot, request: RequestInfo, views: Sequence[EndpointView]
    ) -> list[dict[str, float]]:
        """Return the terms of each view's price (`types.Terms`); all of them are 0 or more."""
        columns = Shown(snapshot.endpoints)
        rows = [columns.rows[view.address] for view in views]
        return [asdict(each) for each in self._prices.of(columns, rows, request, snapshot.now)]

    @staticmethod
    def _explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str | None:
        """Say why."""
        if reason not in _WORDS:
            return None
        cost = f"the least harm by estimate, {pending(chosen, others)}"
        if adapter is None:
            return cost
        runs = [view for view in others if adapter in view.pending_by_adapter]
        elsewhere = f"; it also runs on {busiest_first(runs, adapter)}" if runs else ""
        here = _WORDS[reason].format(short(adapter), whereabouts(chosen, adapter))
        return f"{here}{elsewhere}: {cost}"


_WORDS = {
    "base": "",
    "running": "{0} runs there",
    "open": "{0} is {1} there, where a slot is free",
    "full": "{0} is {1} there, and waits for a slot",
}


def _in_time(columns: Columns, rows: Sequence[int], tpot_s: float) -> Sequence[bool]:
    """Return which rows have room for a request with an objective for the time of its tokens: those
    that keep it, if any endpoint can."""
    costs, has_room = columns.costs, columns.has_room
    if not any(costs[row].can_have(tpot_s) for row in rows):
        return has_room
    most, pending = [each.most_running(TPOT_RATIO * tpot_s) for each in costs], columns.num_pending
    return [has and num < m for has, num, m in zip(has_room, pending, most, strict=True)]


def _is_place_left(
    columns: Columns,
    rows: Sequence[int],
    adapter: str | None,
    running: Mapping[int, int],
    has_room: Sequence[bool],
    latest_s: float,
) -> bool:
    """Return whether a row has room, and a slot that is free or the adapter's own."""
    slots, used, done_at = columns.num_slots, columns.num_used, columns.done_s
    for row in rows:
        has_slot = adapter is None or row in running or not 0 < slots[row] <= used[row]
        if has_slot and has_room[row] and done_at[row] <= latest_s:
            return True
    return False


def _wait(
    columns: Columns, rows: Sequence[int], has_room: Sequence[bool], now: float, ahead_s: float
) -> Wait:
    """Return the wait of a request for which no row has room, or none that has has a slot.

    Nobody says when a slot is free again; prompts are computed by a known time.
    """
    latest_s, done_at, reason = now + ahead_s, columns.done_s, FOR_ROOM
    for row in rows:
        if columns.has_room[row]:
            reason = "room"
            if has_room[row] and done_at[row] <= latest_s:
                reason = FOR_SLOT
                break
    behind_s = [done_at[row] for row in rows if done_at[row] > latest_s]
    return Wait(min(behind_s, default=inf) - ahead_s, reason)


def _leaves_slots(
    columns: Columns,
    rows: Sequence[int],
    running: Mapping[int, int],
    request: RequestInfo,
    now: float,
) -> bool:
    """Return whether a request that can wait would take one of the last slots, which more urgent
    requests need.

    The number in use varies by about the square root of all slots. So many are left to requests of
    priority 0 and above.
    """
    if running or now - request.arrived_at_s >= SPARE_S:
        return False
    num_slots, num_free = slots_of(columns, rows)
    return num_slots > 0 and num_free <= sqrt(num_slots)
