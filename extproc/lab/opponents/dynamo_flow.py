"""Dynamo's other placement: homes by a min-cost flow instead of hashing alone.

Source: ai-dynamo/dynamo, `lib/llm/src/lora/routing/{mcf_allocator,min_cost_flow}.rs` (2026). The
flow goes from each adapter, as much as it wants homes, to endpoints, at most one unit to each, as
many as they have slots. A home costs its place in the adapter's rendezvous order, plus 1,000 if it
is new, less 250 if it is kept; a home that finds no slot costs more than all others together.
Everything else is as in `extproc.lab.opponents.dynamo`.

Simplified: every adapter is solved at every tick over all endpoints, where the original leaves the
unchanged ones alone and considers the first 16 endpoints of each order. With equal weights of
adapters, as it has by default, the prices keep them in place anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from extproc.lab.opponents.dynamo import ProportionalSticky
from extproc.lab.opponents.hashing import rendezvous_order
from extproc.types import EndpointView

LOAD_COST, KEEP_REWARD = 1_000, 250
NOWHERE = ""
"""The address of homes that find no slot."""
NOWHERE_COST = 10**12


@dataclass(slots=True)
class MinCostFlow(ProportionalSticky):
    """Proportional placement by a min-cost flow."""

    def _place(
        self, wanted: dict[str, int], endpoints: Sequence[EndpointView], slots: dict[str, int]
    ) -> None:
        counts = {name: self._after_cooldown(name, wanted[name]) for name in sorted(wanted)}
        costs = {}
        for adapter in counts:
            before = self._homes.get(adapter, ())
            costs[adapter] = {
                view.address: place + (-KEEP_REWARD if view.address in before else LOAD_COST)
                for place, view in enumerate(rendezvous_order(endpoints, adapter))
            }
        homes = least_cost_homes(counts, costs, slots)
        self._homes = {adapter: tuple(sorted(own)) for adapter, own in homes.items() if own}


def least_cost_homes(
    counts: Mapping[str, int], costs: Mapping[str, Mapping[str, int]], slots: Mapping[str, int]
) -> dict[str, set[str]]:
    """Return the homes of each adapter that cost least in all, by successive shortest paths.

    Args:
        counts: Homes that each adapter wants; it gets fewer where slots run out.
        costs: Of each adapter at each endpoint.
        slots: Adapters that fit on each endpoint.
    """
    flow = _Flow(costs, slots)
    for adapter, count in counts.items():
        for _ in range(min(count, len(slots))):
            flow.add(adapter)
    return flow.homes


class _Flow:
    """Homes so far; each `add` keeps them the cheapest for their number."""

    def __init__(self, costs: Mapping[str, Mapping[str, int]], slots: Mapping[str, int]) -> None:
        self.homes: dict[str, set[str]] = {adapter: set() for adapter in costs}
        self._costs = costs
        self._free = dict(slots)
        self._at: dict[str, set[str]] = {address: set() for address in slots}

    def add(self, adapter: str) -> None:
        """Give an adapter one more home, moving others' where that is cheaper."""
        own = self._costs[adapter]
        cost_to: dict[str, float] = {
            address: inf if address in self.homes[adapter] else own[address] for address in self._at
        }
        cost_to[NOWHERE] = NOWHERE_COST
        origin: dict[str, tuple[str, str]] = {}  # how each is reached: from where, moving whom
        moves = [move for address in self._at for move in self._moves(address)]
        for _ in self._at:
            has_changed = False
            for cost, start, end, moved in moves:
                if cost_to[start] + cost < cost_to[end]:
                    cost_to[end], origin[end] = cost_to[start] + cost, (start, moved)
                    has_changed = True
            if not has_changed:
                break
        open_ = [NOWHERE, *(address for address, free in self._free.items() if free)]
        place = min(open_, key=lambda address: cost_to[address])
        if place:
            self._free[place] -= 1
        while place in origin:
            start, moved = origin[place]
            self.homes[moved].remove(start)
            self._at[start].remove(moved)
            self._set(moved, place)
            place = start
        self._set(adapter, place)

    def _set(self, adapter: str, place: str) -> None:
        if place:
            self.homes[adapter].add(place)
            self._at[place].add(adapter)

    def _moves(self, start: str) -> list[tuple[float, str, str, str]]:
        """Return the cheapest move from an endpoint to each other one: cost, from, to, whom."""
        found: list[tuple[float, str, str, str]] = []
        for end in [*self._at, NOWHERE]:
            prices = [
                (self._costs[a].get(end, NOWHERE_COST) - self._costs[a][start], a)
                for a in self._at[start]
                if end not in self.homes[a]
            ]
            if prices and end != start:
                cost, adapter = min(prices)
                found.append((cost, start, end, adapter))
        return found
