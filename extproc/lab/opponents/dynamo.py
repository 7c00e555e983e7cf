"""Proportional sticky placement: as many homes per adapter as its share of the slots.

Source: ai-dynamo/dynamo, `lib/llm/src/lora/` (2026). Every tick the request rate of each adapter
over a window is smoothed. It gets ceil(share x all slots) endpoints, scaled down by largest
remainders if that is more than there are. Rendezvous hashing decides which ones, slot-aware and
sticky. It gets fewer only after a cool-down. A request goes to a home where its adapter is loaded,
else to any home, else to wherever it is loaded, else to its one hashed pin. Inside the set: the
least work, which here is our own count of unfinished requests.

Every router computes the same table from its own share of the traffic, and no router talks.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from extproc.lab.opponents.hashing import least_pending, rendezvous_order
from extproc.lab.opponents.ties import least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot


@dataclass(slots=True)
class ProportionalSticky:
    """Dynamo's policy.

    Args:
        tick_s: Between two computations of the table.
        window_s: Over which rates are counted.
        smoothing: Weight of the newest rate.
        cooldown_ticks: Ticks for which a smaller set must be wanted before it is used.
    """

    tick_s: float = 3.0
    window_s: float = 90.0
    smoothing: float = 0.3
    cooldown_ticks: int = 3
    _seen: deque[tuple[float, str]] = field(default_factory=deque, init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    _rates: dict[str, float] = field(default_factory=dict, init=False)
    _homes: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    _shrinking: dict[str, int] = field(default_factory=dict, init=False)
    _next_tick_s: float = field(default=0.0, init=False)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose within the adapter's homes."""
        adapter, endpoints = request.adapter, snapshot.endpoints
        if adapter is None:
            return least_pending(endpoints, rng)
        self._seen.append((snapshot.now, adapter))
        self._counts[adapter] += 1
        if snapshot.now >= self._next_tick_s:
            self._tick(snapshot)
        homes = [view for view in endpoints if view.address in self._homes.get(adapter, ())]
        loaded = [view for view in homes if view.has_loaded(adapter)]
        if loaded or homes:
            return _least_work(loaded or homes, rng, "home" if loaded else "lazy-load")
        elsewhere = [view for view in endpoints if view.has_loaded(adapter)]
        if elsewhere:
            return _least_work(elsewhere, rng, "elsewhere")
        return Choice((rendezvous_order(endpoints, adapter)[0],), "pin")

    def _tick(self, snapshot: Snapshot) -> None:
        now = snapshot.now
        self._next_tick_s = now + self.tick_s
        while self._seen and self._seen[0][0] < now - self.window_s:
            _, adapter = self._seen.popleft()
            self._counts[adapter] -= 1
            if not self._counts[adapter]:
                del self._counts[adapter]
        for adapter in self._rates.keys() | self._counts.keys():
            before = self._rates.get(adapter)
            rate = self._counts[adapter] / self.window_s if adapter in self._counts else 0.0
            smoothed = rate if before is None else before + self.smoothing * (rate - before)
            self._rates[adapter] = smoothed
        active = sorted(adapter for adapter in self._rates if adapter in self._counts)
        slots = {view.address: view.max_loras or 1 for view in snapshot.endpoints}
        self._place(self._wanted(active, slots), snapshot.endpoints, slots)

    def _wanted(self, active: Sequence[str], slots: dict[str, int]) -> dict[str, int]:
        """Return the number of homes of each adapter, at least one, as in the original."""
        total_slots = sum(slots.values())
        total_rate = sum(self._rates[adapter] for adapter in active) or 1.0
        ideal = {a: self._rates[a] / total_rate * total_slots for a in active}
        wanted = {a: min(len(slots), max(1, ceil(ideal[a]))) for a in active}
        if sum(wanted.values()) > total_slots:
            wanted = {a: max(1, int(ideal[a])) for a in active}
            spare = total_slots - sum(wanted.values())
            by_remainder = sorted(active, key=lambda a: (int(ideal[a]) - ideal[a], a))
            for adapter in by_remainder[: max(0, spare)]:
                wanted[adapter] = min(len(slots), wanted[adapter] + 1)
        return {**dict.fromkeys(self._homes, 0), **wanted}  # idle adapters cool down too

    def _place(
        self, wanted: dict[str, int], endpoints: Sequence[EndpointView], slots: dict[str, int]
    ) -> None:
        """Assign slots in the order of names, as the original does."""
        free = dict(slots)
        homes: dict[str, tuple[str, ...]] = {}
        for adapter in sorted(wanted):
            count = self._after_cooldown(adapter, wanted[adapter])
            before = self._homes.get(adapter, ())
            order = [view.address for view in rendezvous_order(endpoints, adapter)]
            order.sort(key=lambda address: address not in before)  # sticky; the sort is stable
            taken = [address for address in order if free[address] > 0][:count]
            for address in taken:
                free[address] -= 1
            if taken:
                homes[adapter] = tuple(taken)
        self._homes = homes

    def _after_cooldown(self, adapter: str, wanted: int) -> int:
        before = len(self._homes.get(adapter, ()))
        if wanted >= before:
            self._shrinking.pop(adapter, None)
            return wanted
        self._shrinking[adapter] = self._shrinking.get(adapter, 0) + 1
        if self._shrinking[adapter] < self.cooldown_ticks:
            return before
        del self._shrinking[adapter]
        return wanted


def _least_work(views: Sequence[EndpointView], rng: random.Random, reason: str) -> Choice:
    return Choice((least(views, lambda view: view.num_pending, rng),), reason)
