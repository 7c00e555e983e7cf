"""Least estimated harm: every endpoint has a price in seconds, and the lowest is chosen.

The price estimates what the request costs there, itself and the requests that are there already:

1. **Prompts ahead** of it that are still to be computed, its own first token's wait.
2. **Its own prompt**: while it is computed, the requests that decode there wait.
3. **The batch**: every pending request makes each step a little longer.
4. **A slot**, where the adapter does not run: a slot taken is one that other adapters lack, so it
   costs more the fuller the endpoints are. Where no slot is free the adapter waits until one is.
5. **A load**, unless the adapter is in a slot there: all wait while it is copied.
6. **A home**, where the adapter does not run: a small price along an order of the endpoints that
   is the adapter's own, so that routers that do not know of each other's picks open it in the same
   places and not in as many as there are routers.

Nothing is held: where all slots are taken the request goes where the harm is least.

Sources: 1 and 3 are the two loads of LMetric (arXiv 2603.15202), here added in seconds; 4 and 5 are
what a gate of `max_loras` slots adds; 6 is rendezvous hashing (Thaler and Ravishankar, 1998).
docs/policy.md has what each part gains.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import inf

from extproc.core.policies.ranking import lowest, one_of
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot
from extproc.core.words import busiest_first, pending, short, whereabouts

PROMPT_STALL_RATIO = 0.1
LOAD_STALL_RATIO = 0.05
"""Part of a prompt's and of a load's time that counts as harm to each pending request: it decodes
a step later, but has most of its steps without that."""
MAX_ADAPTERS_WITH_HOMES = 1024
"""Whose homes are remembered; computing them takes about a microsecond for each endpoint."""


class LeastHarm:
    """The policy. All arguments are seconds, 0 or more and not infinite.

    Args:
        slot_s: Price of a slot while all slots of the endpoints to choose from are in use; it goes
            with the square of the part in use, which is more than 1 where adapters wait.
        full_s: Price of an endpoint without a free slot, for an adapter that does not run there.
        pending_s: Price of each pending request.
        home_s: Price of each place in an adapter's order of endpoints.
    """

    def __init__(
        self,
        slot_s: float = 1.0,
        full_s: float = 1.0,
        pending_s: float = 0.002,
        home_s: float = 0.02,
    ) -> None:
        if not all(0 <= each < inf for each in (slot_s, full_s, pending_s, home_s)):
            raise ValueError(
                "slot_s, full_s, pending_s and home_s must be at least 0 seconds, and finite"
            )
        self.slot_s, self.full_s = slot_s, full_s
        self.pending_s, self.home_s = pending_s, home_s

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the lowest price."""
        views, now, adapter = snapshot.endpoints, snapshot.now, request.adapter
        num_bytes, pending_s = request.body_bytes, self.pending_s
        prices = []
        for view in views:
            busy, prompt_s = view.num_pending, num_bytes * view.costs.prompt_s_per_byte
            price = prompt_s * (1 + PROMPT_STALL_RATIO * busy) + pending_s * busy
            ahead_s = view.prompts_done_s - now
            prices.append(price + ahead_s if ahead_s > 0 else price)
        if adapter is None:
            return Choice((one_of(lowest(views, prices), rng),), "base")
        self._add_opening(prices, adapter, views)
        chosen = one_of(lowest(views, prices), rng)
        if adapter in chosen.pending_by_adapter:
            return Choice((chosen,), "running")
        return Choice((chosen,), "full" if _is_full(chosen) else "open")

    def _add_opening(
        self, prices: list[float], adapter: str, views: Sequence[EndpointView]
    ) -> None:
        """Add what it costs to run the adapter where it does not, if the price can be the lowest:
        slot, home, load, wait."""
        slot_s = self.slot_s * _part_in_use(views) ** 2
        places = homes(adapter, tuple([view.address for view in views]))
        best = inf
        for index, price in enumerate(prices):
            if price > best:
                continue  # it only gets dearer, so what it costs exactly does not matter
            view = views[index]
            if adapter not in view.pending_by_adapter:
                opening_s = slot_s + self.home_s * places[index]
                if price + opening_s <= best:
                    opening_s += _load_s(adapter, view)
                    if _is_full(view):
                        opening_s += self.full_s
                prices[index] = price = price + opening_s
            if price < best:
                best = price

    @staticmethod
    def explain(
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


@lru_cache(maxsize=MAX_ADAPTERS_WITH_HOMES)
def homes(adapter: str, addresses: tuple[str, ...]) -> tuple[int, ...]:
    """Return each address's place in the adapter's own order, the same in every router."""
    ranked = sorted(range(len(addresses)), key=lambda index: _draw(adapter, addresses[index]))
    places = dict(zip(ranked, range(len(addresses)), strict=True))
    return tuple(places[index] for index in range(len(addresses)))


def _draw(adapter: str, address: str) -> bytes:
    return blake2b(f"{adapter}|{address}".encode(), digest_size=8).digest()


def _part_in_use(views: Sequence[EndpointView]) -> float:
    """Return the part of the adapter slots that is in use; more than 1 where adapters wait.

    Endpoints whose slots are unknown do not count; without others it is 0.
    """
    slots = [view.max_loras or 0 for view in views]
    used = sum([len(view.pending_by_adapter) for view in views if view.max_loras])
    return used / sum(slots) if used else 0.0


def _load_s(adapter: str, view: EndpointView) -> float:
    """Return the harm of loading the adapter there, 0 where it is in a slot."""
    if adapter in view.gpu_adapters:
        return 0.0
    costs = view.costs
    load_s = costs.cached_load_s if adapter in view.cpu_adapters else costs.cold_load_s
    return load_s * (1 + LOAD_STALL_RATIO * view.num_pending)


def _is_full(view: EndpointView) -> bool:
    return view.max_loras is not None and len(view.pending_by_adapter) >= view.max_loras
