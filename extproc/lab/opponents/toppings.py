"""Toppings' rank-aware policy.

Source: Toppings (earlier CaraServe), USENIX ATC 2025, Algorithm 1: for each endpoint the marginal
prefill time, spread over an average response, plus the marginal decode time, infinite where decode
would break its objective; times the number of requests there; the least wins. Decode time is
linear in the sum of ranks (their MBGMV kernel).

The paper's candidates hold the adapter; adapters can be loaded anywhere here, so every endpoint is
a candidate and a cold adapter costs `load_s`, spread like the prefill.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.routing.policies.ranking import least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot

_BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class Toppings:
    """Algorithm 1.

    Args:
        ranks: Rank of each adapter, from its configuration; `default_rank` where it is not named.
        default_rank: See `ranks`.
        prefill_s_per_token: Slope of the prefill time: the paper's 44 and 90 ms for 256 and 1,024
            tokens (7B on an A100).
        decode_s_per_rank: Slope of the decode step over the sum of ranks: the paper's 34.8 and
            35.9 ms for 16 and 24 requests of rank 32 and 64.
        step_s: Fixed part of the decode step, from the same two.
        tpot_slo_s: Decode steps longer than this are refused.
        mean_output_tokens: Mean length of a response.
        load_s: What loading an adapter costs; 0 as published.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    default_rank: int = 16
    prefill_s_per_token: float = 0.00006
    decode_s_per_rank: float = 0.0000029
    step_s: float = 0.0326
    tpot_slo_s: float = 0.05
    mean_output_tokens: float = 200.0
    load_s: float = 0.0

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the least total cost."""
        return Choice((least(snapshot.endpoints, lambda v: self._cost(v, request), rng),), "cost")

    def _cost(self, view: EndpointView, request: RequestInfo) -> tuple[bool, float, float]:
        prefill_s = request.body_bytes / _BYTES_PER_TOKEN * self.prefill_s_per_token
        if request.adapter is not None and not view.has_loaded(request.adapter):
            prefill_s += self.load_s
        rank = self._rank(request.adapter)
        sum_of_ranks = rank + sum(self._rank(a) * n for a, n in view.pending_by_adapter.items())
        breaks_slo = self.step_s + self.decode_s_per_rank * sum_of_ranks > self.tpot_slo_s
        cost_s = prefill_s / self.mean_output_tokens + self.decode_s_per_rank * rank
        return breaks_slo, cost_s * view.num_pending, cost_s  # the last breaks ties of idle ones

    def _rank(self, adapter: str | None) -> int:
        return 0 if adapter is None else self.ranks.get(adapter, self.default_rank)
