"""Bounds, to see how much of the possible a policy reaches.

- **B0, pooled**: one engine N times as wide. Every adapter is resident, without load cost, slot
  gate or cost per further adapter: perfect balance and perfect memory. No policy's capacity exceeds
  it (as a latency it is a reference, not a proof). It serves in order and sheds nothing, so in a
  run too short for its queue to form a policy that sheds can pass it.
- **B1, pooled slots**: the same engine with all pods' slots and CPU caches, the true adapters,
  loads and gate. No adapter needs a second slot, and no pod is full while another has room. A load
  stalls the whole engine, for an Nth of its time. It serves in order as far as slots allow, and
  drops requests that wait beyond the objective. So it bounds what placement and balance can give
  near the target. Far below it B3 passes it, because B3 chooses which requests to drop.
- **B2, clairvoyant loads**: Belady's eviction over the pooled slots on the true sequence of
  arrivals. It has the fewest adapter loads of any routing that serves requests in their order. An
  overloaded engine does not: it serves one adapter's queue together, and falls below.
- **B3, informed greedy**, and **B4, stale greedy**, on states up to T old and without knowledge of
  its own later dispatches: `extproc.lab.trials.oracle`. They hold and shed as policies may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.requests import Workload

POOLED_ADAPTER = "pooled"


def pooled_settings(settings: FleetSettings) -> FleetSettings:
    """Return B0's fleet: one engine as wide as all pods together, and adapters for free."""
    return replace(
        settings,
        num_pods=1,
        kinds=(),
        num_routers=1,
        profile=_wide(settings, adapter_cost=0.0),
        max_loras=1,
        max_cpu_loras=None,
        max_lora_rank=_largest_rank(settings),
    )


def pooled_slots(settings: FleetSettings, *, patience_s: float) -> FleetSettings:
    """Return B1's fleet: one engine with the slots of all; requests leave after `patience_s`."""
    return replace(
        settings,
        num_pods=1,
        kinds=(),
        num_routers=1,
        profile=_wide(settings, adapter_cost=1 / settings.num_pods),
        max_loras=settings.num_slots,
        max_cpu_loras=sum(pod.max_cpu_loras or pod.max_loras for pod in settings.pods),
        max_lora_rank=_largest_rank(settings),
        patience_s=patience_s,
    )


def _largest_rank(settings: FleetSettings) -> int:
    return max(pod.max_lora_rank for pod in settings.pods)


def _wide(settings: FleetSettings, *, adapter_cost: float) -> EngineProfile:
    """Return the costs of one engine in the place of all; adapters at a part of theirs."""
    profile, num = settings.profile, settings.num_pods
    blocks = sum(pod.profile.kv_blocks(pod.max_loras, pod.max_lora_rank) for pod in settings.pods)
    slowness = [kind.slowness for kind in settings.kinds for _ in range(kind.num_pods)]
    speed = num - len(slowness) + sum(1 / each for each in slowness)
    return replace(
        profile,
        name=f"{profile.name} x {num}",
        kv_capacity_tokens=blocks * profile.block_tokens,
        slot_tokens_per_rank=0.0,
        max_num_batched_tokens=profile.max_num_batched_tokens * num,
        max_num_seqs=profile.max_num_seqs * num,
        step_per_decode_s=profile.step_per_decode_s / speed,
        step_per_kv_token_s=profile.step_per_kv_token_s / speed,
        step_per_prefill_token_s=profile.step_per_prefill_token_s / speed,
        lora_per_adapter_ratio=profile.lora_per_adapter_ratio * adapter_cost,
        disk_load_s=profile.disk_load_s * adapter_cost,
        disk_load_per_rank_s=profile.disk_load_per_rank_s * adapter_cost,
        gpu_load_s=profile.gpu_load_s * adapter_cost,
        gpu_load_per_rank_s=profile.gpu_load_per_rank_s * adapter_cost,
    )


def pooled_workload(workload: Workload) -> Workload:
    """Return B0's workload: every adapter is the same one, and a tenant."""
    arrivals = tuple(
        replace(
            arrival,
            adapter=None if arrival.adapter is None else POOLED_ADAPTER,
            tenant=arrival.tenant or arrival.adapter or "",
        )
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals, adapters={POOLED_ADAPTER: 1})


def belady_loads(adapters: Sequence[str | None], num_slots: int, *, count_from: int = 0) -> int:
    """Return B2: the loads under clairvoyant eviction, of the requests from `count_from` on.

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


def count_belady(workload: Workload, settings: FleetSettings) -> float:
    """Return B2 of a scenario: loads per 1,000 requests after the warm-up."""
    arrivals = workload.arrivals
    first = sum(arrival.at_s < settings.warm_up_s for arrival in arrivals)
    adapters = [arrival.adapter for arrival in arrivals]
    loads = belady_loads(adapters, settings.num_slots, count_from=first)
    return 1000 * loads / max(1, len(arrivals) - first)
