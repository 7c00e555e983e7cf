"""LoRAServe's rank-aware placement.

Source: Jaiswal et al., "Serving Heterogeneous LoRA Adapters in Distributed LLM Inference Systems"
(arXiv 2511.22880): a table says with which probability each adapter's requests go to which
server. Every period it is made anew: from each adapter's demand in tokens and from what a server
can serve of its rank within the objectives, adapters are packed into servers rank by rank, so that
few servers have more than one rank, each server as full as the others; an adapter may be split. The
new servers are then named so that least moves.

Simplified: what a server can serve falls linearly with the rank, by the paper's 84 % for rank 128
beside 8, where the paper profiles it; demand is the past period's, smoothed; each router makes a
table of its own traffic. As in the paper, the number of adapters on a server is not bounded.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.lab.opponents.hashing import least_pending, rendezvous_order
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot

COST_PER_RANK = 0.84 / (128 - 8)
"""Part by which a token takes longer for each unit of its adapter's rank."""

Shares = dict[str, float]


@dataclass(slots=True)
class LoraServe:
    """Packing by rank.

    Args:
        ranks: Rank of each adapter, from its configuration; `default_rank` where it is not named.
        default_rank: See `ranks`.
        period_s: Between two tables.
        smoothing: Weight of the newest period's demand.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    default_rank: int = 16
    period_s: float = 10.0
    smoothing: float = 0.5
    _seen: Counter[str] = field(default_factory=Counter, init=False)
    _demand: Shares = field(default_factory=dict, init=False)
    _table: dict[str, Shares] = field(default_factory=dict, init=False)
    _next_s: float | None = field(default=None, init=False)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Draw an endpoint by the adapter's probabilities."""
        adapter, endpoints = request.adapter, snapshot.endpoints
        if adapter is None:
            return least_pending(endpoints, rng)
        if self._next_s is None:
            self._next_s = snapshot.now + self.period_s
        if snapshot.now >= self._next_s:
            self._next_s = snapshot.now + self.period_s
            self._place(endpoints)
        self._seen[adapter] += request.body_bytes
        shares = self._table.get(adapter, {})
        known = [view for view in endpoints if shares.get(view.address)]
        if not known:
            return Choice((rendezvous_order(endpoints, adapter)[0],), "pin")
        return Choice((rng.choices(known, [shares[v.address] for v in known])[0],), "table")

    def _place(self, endpoints: Sequence[EndpointView]) -> None:
        for adapter in self._demand.keys() | self._seen.keys():
            before = self._demand.get(adapter, float(self._seen[adapter]))
            self._demand[adapter] = before + self.smoothing * (self._seen[adapter] - before)
        self._seen.clear()
        ordered = sorted(self._demand, key=lambda adapter: (-self._rank(adapter), adapter))
        work = {a: self._demand[a] * (1 + COST_PER_RANK * self._rank(a)) for a in ordered}
        bins = packed(work, len(endpoints))
        table: dict[str, Shares] = defaultdict(dict)
        for address, own in self._named(bins, [view.address for view in endpoints]):
            for adapter, part in own.items():
                table[adapter][address] = part
        self._table = dict(table)

    def _named(
        self, bins: Sequence[Shares], addresses: Sequence[str]
    ) -> Sequence[tuple[str, Shares]]:
        """Give each bin the address that has most of its work already, best matches first."""
        matches = sorted(
            (
                -sum(min(p, self._table.get(a, {}).get(address, 0.0)) for a, p in own.items()),
                number,
                address,
            )
            for number, own in enumerate(bins)
            for address in addresses
        )
        named: dict[int, str] = {}
        for _, number, address in matches:
            if number not in named and address not in named.values():
                named[number] = address
        return [(address, bins[number]) for number, address in named.items()]

    def _rank(self, adapter: str) -> int:
        return self.ranks.get(adapter, self.default_rank)


def packed(work: Mapping[str, float], num: int) -> list[Shares]:
    """Fill `num` bins one after the other with equal parts of the work, in the order given.

    Returns:
        For each bin, the work of each adapter in it.
    """
    size = sum(work.values()) / num
    bins: list[Shares] = [{} for _ in range(num)]
    number, room = 0, size
    for adapter, amount in work.items():
        rest = amount
        while rest > room and number < num - 1:
            if room > 0:
                bins[number][adapter] = room
            rest -= room
            number, room = number + 1, size
        if rest > 0:
            bins[number][adapter] = rest
        room -= rest
    return bins
