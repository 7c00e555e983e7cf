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
running requests their time per token, if that is an objective that any endpoint can meet. A slot is
free, or the adapter runs. The last free slots are for requests of priority 0 and above. If no
endpoint has room, the request is held. In the queue it can still take whatever becomes free first,
and it keeps its place in the queue's order.

Sources: 1 and 3 are the two loads of LMetric (arXiv 2603.15202), here added in seconds. 5 and 6
follow from a gate of `max_loras` slots. 7 is rendezvous hashing (Thaler and Ravishankar, 1998). The
gain of each part is in docs/archive/policy-evidence.md.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from math import inf, sqrt

from extproc.fleet.columns import Columns
from extproc.phrases import FOR_ROOM, FOR_SLOT, busiest_first, pending, short, whereabouts
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
from extproc.routing.policies.least_harm_rows import Search, terms_of, wait_for
from extproc.routing.policies.ranking import lowest, one_of
from extproc.routing.policies.rows import RowChoice
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

TPOT_RATIO = 0.9
"""Part of the objective for a token's time within which one more request may run: those that run
get slower before reports show it."""
SPARE_S = 10.0
"""For which a request of a priority below 0 leaves the last slots to other requests."""


class LeastHarm:
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
        self._weights = Weights(ttft_s, late_s, slot_s, full_s, pending_s, home_s)
        self._first_homes = FirstHomes()
        self._last_slot: tuple[Sequence[EndpointView], str, float] = ((), "", 0.0)

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose the lowest price, or wait for a slot."""
        now, adapter = snapshot.now, request.adapter
        views = self._with_room(snapshot.endpoints, request, now)
        if isinstance(views, Wait):
            return views
        prices = self._prices(views, request, snapshot)
        if adapter is None:
            return Choice((one_of(lowest(views, prices), rng),), "base", self.terms)
        chosen = one_of(lowest(views, prices), rng)
        if adapter in chosen.pending_by_adapter:
            return Choice((chosen,), "running", self.terms)
        return Choice((chosen,), "full" if _is_full(chosen) else "open", self.terms)

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice | Wait | None:
        """Choose as `choose` does (`rows.RowChooser`); None for requests with an objective for
        their tokens or a priority below 0."""
        if request.claim.tpot_s is not None or request.claim.priority < 0:
            return None
        search = Search(self._weights, self._first_homes, columns, rows, request, now)
        ties = search.ties
        if not ties:
            return wait_for(columns, rows, request, now, self._weights)
        row = one_of(sorted(ties), rng)
        price, reason = terms_of(ties[row], self._weights), "base"
        if request.adapter is not None:
            reason = "running"
            if row not in search.running:
                reason = "full" if 0 < columns.num_slots[row] <= columns.num_used[row] else "open"
        return RowChoice(row, reason, self.terms, price)

    def _with_room(
        self, views: Sequence[EndpointView], request: RequestInfo, now: float
    ) -> Sequence[EndpointView] | Wait:
        """Return the endpoints that have room for a request, or a wait for one.

        Nobody says when a slot is free again; prompts are computed by a known time.
        """
        adapter, most_ahead_s = request.adapter, ROOM_RATIO * self._weights.objective_s(request)
        latest_s, tpot_s = now + most_ahead_s, request.claim.tpot_s
        roomy = [view for view in views if view.has_room and view.prompts_done_s <= latest_s]
        if tpot_s is not None and any(view.costs._can_have(tpot_s) for view in views):
            tpot_s *= TPOT_RATIO
            roomy = [view for view in roomy if view.num_pending < view.costs._most_running(tpot_s)]
        if (
            adapter is not None
            and roomy
            and (
                all(_has_no_slot(view, adapter) for view in roomy)
                or _leaves_slots(request, views, now=now)
            )
        ):
            reason, roomy = FOR_SLOT, []
        else:
            reason = "room" if any(view.has_room for view in views) else FOR_ROOM
        if roomy:
            return views if len(roomy) == len(views) else roomy
        behind_s = [view.prompts_done_s for view in views if view.prompts_done_s > latest_s]
        return Wait(min(behind_s, default=inf) - most_ahead_s, reason)

    def _prices(
        self, views: Sequence[EndpointView], request: RequestInfo, snapshot: Snapshot
    ) -> list[float]:
        """Return each view's price, or a part of it that is above the lowest already.

        `terms` has the same as separate numbers; here most endpoints need no more than the first
        three.
        """
        adapter, num_bytes, weights = request.adapter, request.rest_bytes(""), self._weights
        has_cached = bool(request.cached_bytes)
        late_from_s = LATE_RATIO * self._weights.objective_s(request)
        openings = [0.0] * len(views)
        if adapter is not None:
            openings = self._openings(adapter, snapshot.endpoints, views)
        prices, best = [], inf
        for view, opening in zip(views, openings, strict=True):
            busy, costs = view.num_pending, view.costs
            if has_cached:
                num_bytes = request.rest_bytes(view.address)
            prompt_s = num_bytes * costs.prompt_s_per_byte
            ahead_s = view.prompts_done_s - snapshot.now
            first_s = ahead_s + prompt_s if ahead_s > 0 else prompt_s
            price = first_s + (PROMPT_STALL_RATIO * prompt_s + weights.pending_s) * busy
            if adapter is not None and adapter not in view.pending_by_adapter:
                price += opening
                if price <= best:
                    load_s = costs.load_s(adapter, view.gpu_adapters, view.cpu_adapters)
                    first_s += load_s
                    price += load_s * (1 + LOAD_STALL_RATIO * busy)
                    price += weights.full_s if _is_full(view) else 0.0
            price += weights.late_s if first_s > late_from_s else 0.0
            prices.append(price)
            best = min(best, price)
        return prices

    def _openings(
        self, adapter: str, endpoints: Sequence[EndpointView], views: Sequence[EndpointView]
    ) -> list[float]:
        """Return the price of a slot and of the distance from home at some of all endpoints, where
        the adapter does not run."""
        slot_s, home_s = self._slot_price_s(adapter, endpoints), self._weights.home_s
        addresses = tuple([view.address for view in endpoints])
        places = homes(adapter, addresses)
        if views is not endpoints:
            place_at = dict(zip(addresses, places, strict=True))
            places = tuple([place_at[view.address] for view in views])
        return [
            slot_s * last_slots(_num_free(view)) + home_s * place
            for view, place in zip(views, places, strict=True)
        ]

    def _slot_price_s(self, adapter: str, views: Sequence[EndpointView]) -> float:
        """Return the price of a slot for the adapter, where it does not run.

        A choice and its terms ask for the same one.
        """
        last_views, last_adapter, slot_s = self._last_slot
        if views is last_views and adapter == last_adapter:
            return slot_s
        counts = [view.pending_by_adapter.get(adapter, 0) for view in views]
        num_slots = sum([view.max_loras or 0 for view in views])
        num_free = sum([max(0, _num_free(view)) for view in views])
        num_places = len(counts) - counts.count(0)
        slot_s = self._weights.slot_price_s(num_slots, num_free, sum(counts), num_places)
        self._last_slot = views, adapter, slot_s
        return slot_s

    def terms(
        self, snapshot: Snapshot, request: RequestInfo, views: Sequence[EndpointView]
    ) -> list[dict[str, float]]:
        """Return the terms of each view's price (`types.Terms`); all of them are 0 or more."""
        adapter = request.adapter
        slot_s = 0.0
        addresses: tuple[str, ...] = ()
        places: tuple[int, ...] = ()
        if adapter is not None and any(adapter not in view.pending_by_adapter for view in views):
            slot_s = self._slot_price_s(adapter, snapshot.endpoints)
            addresses = tuple([view.address for view in snapshot.endpoints])
            places = homes(adapter, addresses)
        found = []
        for view in views:
            opening = None
            if adapter is not None and adapter not in view.pending_by_adapter:
                opening = slot_s, places[bisect_left(addresses, view.address)]
            found.append(self._terms(view, request, snapshot.now, opening))
        return found

    def _terms(
        self,
        view: EndpointView,
        request: RequestInfo,
        now: float,
        opening: tuple[float, int] | None,
    ) -> dict[str, float]:
        """Return the terms of a view's price; with the price of a slot, and its place among the
        adapter's homes, where the adapter does not run."""
        weights, busy, costs = self._weights, view.num_pending, view.costs
        prompt_s = request.rest_bytes(view.address) * costs.prompt_s_per_byte
        ahead_s = max(0.0, view.prompts_done_s - now)
        first_s, late_from_s = ahead_s + prompt_s, LATE_RATIO * weights.objective_s(request)
        terms = {
            "prompts_ahead": ahead_s,
            "own_prompt": prompt_s * (1 + PROMPT_STALL_RATIO * busy),
            "batch": weights.pending_s * busy,
        }
        if opening is not None and request.adapter is not None:
            load_s = costs.load_s(request.adapter, view.gpu_adapters, view.cpu_adapters)
            first_s += load_s
            terms["load"] = load_s * (1 + LOAD_STALL_RATIO * busy)
            terms["slot"] = opening[0] * last_slots(_num_free(view))
            terms["slot_wait"] = weights.full_s if _is_full(view) else 0.0
            terms["home"] = weights.home_s * opening[1]
        terms["late_first_token"] = weights.late_s if first_s > late_from_s else 0.0
        return terms

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


def _num_free(view: EndpointView) -> int:
    """Return how many slots are free, below 0 where more are wanted than there are, or nobody knows
    how many there are."""
    return (view.max_loras or 0) - len(view.pending_by_adapter)


def _leaves_slots(request: RequestInfo, views: Sequence[EndpointView], *, now: float) -> bool:
    """Return whether a request that can wait would take one of the last slots, which more urgent
    requests need.

    The number in use varies by about the square root of all slots. So many are left to requests of
    priority 0 and above.
    """
    adapter, claim = request.adapter, request.claim
    if claim.priority >= 0 or now - request.arrived_at_s >= SPARE_S:
        return False
    if any(adapter in view.pending_by_adapter for view in views):
        return False
    slots = [(view.max_loras, len(view.pending_by_adapter)) for view in views if view.max_loras]
    num_free = sum(max(0, num - num_used) for num, num_used in slots)
    return bool(slots) and num_free <= sqrt(sum(num for num, _ in slots))


def _is_full(view: EndpointView) -> bool:
    return view.max_loras is not None and len(view.pending_by_adapter) >= view.max_loras


def _has_no_slot(view: EndpointView, adapter: str) -> bool:
    return adapter not in view.pending_by_adapter and _is_full(view)
