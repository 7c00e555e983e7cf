"""Bounds that show how much of what is possible a rule reaches.

- **B0, pooled**: one engine N times as wide with every adapter resident, no load cost, no slot gate
  and no cost per further adapter: perfect balance and perfect memory. No rule's capacity exceeds it
  (as a latency it is a reference, not a proof).
- **B2, clairvoyant loads**: Belady's eviction over the pooled slots on the true sequence of
  arrivals: the least adapter loads of any routing that serves requests in the order they come. An
  overloaded engine does not: it serves one adapter's queue together, and falls below.
  Beside it the static optimum: the most popular adapters keep their slots for ever.
- **B3, informed greedy**: the true state of every pod at this moment, remaining answer lengths
  included; each pod is simulated forward with and without the request, and the request goes where
  it adds the fewest SLO misses, then the least total delay, its own and others', a second of a slot
  in use counting as a second of delay. A reference for the value of information: greedy, blind to
  what comes next, so not optimal.
- **B4, stale greedy**: B3 on states up to T old, without any knowledge of what it sent since.

B3 and B4 neither hold nor shed; compare them with rules that do not either.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot
from extproc.sim.fleetsettings import FleetSettings
from extproc.sim.forecast import PodState, Queued, forecast, state_of
from extproc.sim.judge import Slo
from extproc.sim.workload import Workload

if TYPE_CHECKING:
    from extproc.sim.fleet import Fleet

POOLED_ADAPTER = "pooled"


def pooled_settings(settings: FleetSettings) -> FleetSettings:
    """B0's fleet: one engine that is as wide as all pods together."""
    profile, num = settings.profile, settings.num_pods
    kv_tokens = profile.kv_blocks(settings.max_loras, settings.max_lora_rank) * profile.block_tokens
    wide = replace(
        profile,
        name=f"{profile.name} x {num}",
        kv_capacity_tokens=kv_tokens * num,
        slot_tokens_per_rank=0.0,
        max_num_batched_tokens=profile.max_num_batched_tokens * num,
        max_num_seqs=profile.max_num_seqs * num,
        step_per_decode_s=profile.step_per_decode_s / num,
        step_per_kv_token_s=profile.step_per_kv_token_s / num,
        step_per_prefill_token_s=profile.step_per_prefill_token_s / num,
        lora_per_adapter_ratio=0.0,
        disk_load_s=0.0,
        disk_load_per_rank_s=0.0,
        gpu_load_s=0.0,
        gpu_load_per_rank_s=0.0,
    )
    return replace(
        settings, num_pods=1, num_routers=1, profile=wide, max_loras=1, max_cpu_loras=None
    )


def pooled_workload(workload: Workload) -> Workload:
    """B0's workload: every adapter is one that is always there; tenants stay."""
    arrivals = tuple(
        replace(arrival, adapter=None if arrival.adapter is None else POOLED_ADAPTER)
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals, adapters={POOLED_ADAPTER: 1})


def belady_loads(adapters: Sequence[str | None], num_slots: int, *, count_from: int = 0) -> int:
    """B2: loads under clairvoyant eviction, of the requests from `count_from` on.

    Args:
        adapters: Adapter of each request in order; None for the base model.
        num_slots: Slots of all pods together.
        count_from: Index of the first request that counts.
    """
    following = _next_uses(adapters)
    resident: dict[str, float] = {}
    furthest: list[tuple[float, str]] = []  # (minus next use, adapter); may hold old entries
    num_loads = 0
    for index, adapter in enumerate(adapters):
        if adapter is None:
            continue
        if adapter not in resident:
            num_loads += index >= count_from
            if len(resident) == num_slots:
                _evict(resident, furthest)
        resident[adapter] = following[index]
        heappush(furthest, (-following[index], adapter))
    return num_loads


def _evict(resident: dict[str, float], furthest: list[tuple[float, str]]) -> None:
    while True:
        next_use, adapter = heappop(furthest)
        if resident.get(adapter) == -next_use:
            del resident[adapter]
            return


def _next_uses(adapters: Sequence[str | None]) -> list[float]:
    seen: dict[str | None, int] = {}
    following = [inf] * len(adapters)
    for index in range(len(adapters) - 1, -1, -1):
        following[index] = seen.get(adapters[index], inf)
        seen[adapters[index]] = index
    return following


def static_loads(shares: Mapping[str | None, float], num_slots: int) -> float:
    """Loads per request where the most popular adapters hold the slots for ever."""
    popular = sorted((part for name, part in shares.items() if name is not None), reverse=True)
    return sum(popular[num_slots:])


class Oracle:
    """B3, and with an age B4.

    Args:
        slo: What requests must meet.
        age_s: How old a pod's state gets before it is looked at again; 0 for B3.
        slot_price: Seconds of delay that a slot-second counts as. Without it the greedy opens
            adapters everywhere and runs into the slots, which it does not see coming.
    """

    def __init__(self, slo: Slo, age_s: float = 0.0, slot_price: float = 1.0) -> None:
        self._slo = slo
        self._slot_price = slot_price
        self._age_s = age_s
        self._fleet: Fleet | None = None
        self._states: dict[str, tuple[float, PodState]] = {}
        self._phases_s: defaultdict[str, float] = defaultdict(float)

    def attach(self, fleet: Fleet) -> None:
        """Give it the truth to look at."""
        self._fleet = fleet

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the pod where the request does the least harm."""
        assert self._fleet is not None, "not attached to a fleet"
        arrival = self._fleet.flights[request.request_id].arrival
        extra = Queued(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.adapter)
        costs = {v.address: self._harm(v, extra, snapshot.now, rng) for v in snapshot.endpoints}
        return Choice((least(snapshot.endpoints, lambda v: costs[v.address], rng),), "oracle")

    def _harm(
        self, view: EndpointView, extra: Queued, now: float, rng: random.Random
    ) -> tuple[float, float]:
        state = self._state(view.address, now, rng)
        if state is None:
            return inf, inf
        before = forecast(state, self._slo, now=now)
        after = forecast(state, self._slo, now=now, extra=extra)
        delay_s = after.total_s - before.total_s
        delay_s += self._slot_price * (after.slot_s - before.slot_s)
        return after.num_misses - before.num_misses, delay_s

    def _state(self, address: str, now: float, rng: random.Random) -> PodState | None:
        assert self._fleet is not None
        taken_at_s, state = self._states.get(address, (-inf, None))
        if state is None or not self._age_s or self._is_due(address, taken_at_s, now, rng):
            pod = self._fleet.pods.get(address)
            if pod is None:
                return None
            pod.catch_up(now)
            state = state_of(pod, self._fleet.workload.adapters)
            self._states[address] = (now, state)
        return state

    def _is_due(self, address: str, taken_at_s: float, now: float, rng: random.Random) -> bool:
        """Whether a scrape fell between the last look and now; pods' scrapes are out of phase."""
        if address not in self._phases_s:
            self._phases_s[address] = rng.uniform(0, self._age_s)
        phase_s = self._phases_s[address]
        return (now - phase_s) // self._age_s > (taken_at_s - phase_s) // self._age_s


def attach_oracles(fleet: Fleet) -> None:
    """Give every oracle among a fleet's rules the fleet."""
    for router in fleet.routers:
        if isinstance(router.policy, Oracle):
            router.policy.attach(fleet)


def count_belady(workload: Workload, settings: FleetSettings) -> float:
    """B2 of a scenario: loads per 1,000 requests after the warm-up."""
    arrivals = workload.arrivals
    first = sum(arrival.at_s < settings.warm_up_s for arrival in arrivals)
    num_slots = settings.num_pods * settings.max_loras
    loads = belady_loads([a.adapter for a in arrivals], num_slots, count_from=first)
    return 1000 * loads / max(1, len(arrivals) - first)
