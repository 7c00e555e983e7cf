"""llm-d's blend of scorers around LoRA affinity, as shipped and as repaired.

Source: llm-d/llm-d-router v0.10.0, `pkg/epp/framework/plugins/scheduling/scorer/`: lora-affinity
(1.0 if the adapter is active, 0.8 if there is room, else 0), queue and kv-cache-utilization, each
weighted, the maximum drawn among ties. Weights: 2 for queue and KV (the default configuration),
4 for lora-affinity (what KServe injects).

As shipped, its test for room counts the active adapters twice, because vLLM writes the same names
into both labels (llm-d-router issue 2605). `LoadState` is the successor proposed in pull request
2792: 1.0 in a GPU slot, 0.7 in the CPU cache, 0.6 a free slot, 0.3 an idle adapter's slot, else 0.
Its signal does not exist in vLLM 0.33; here it is our inferred residency.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot


class LoraAffinity:
    """The blend with lora-affinity-scorer.

    Args:
        lora_weight: Of the affinity score.
        queue_weight: Of the queue score.
        kv_weight: Of the KV score.
        is_repaired: Count active adapters once, and take our own pending requests for the queue.
    """

    def __init__(
        self,
        lora_weight: float = 4,
        queue_weight: float = 2,
        kv_weight: float = 2,
        is_repaired: bool = False,
    ) -> None:
        self.weights = (lora_weight, queue_weight, kv_weight)
        self.is_repaired = is_repaired

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the highest sum of weighted scores."""
        adapter = request.adapter
        return _blend(
            snapshot.endpoints,
            lambda view: self._score(view, adapter),
            self.weights,
            rng,
            is_fresh=self.is_repaired,
        )

    def _score(self, view: EndpointView, adapter: str | None) -> float:
        if adapter is not None and adapter in view.pending_by_adapter:
            return 1.0
        num_active = view.num_active_adapters * (1 if self.is_repaired else 2)
        return 0.8 if num_active < (view.max_loras or 0) else 0.0


class LoadState:
    """The blend with the proposed lora-load-state-scorer.

    Args:
        lora_weight: Of the load-state score.
        queue_weight: Of the queue score, on our own pending requests.
        kv_weight: Of the KV score.
    """

    def __init__(
        self, lora_weight: float = 4, queue_weight: float = 2, kv_weight: float = 2
    ) -> None:
        self.weights = (lora_weight, queue_weight, kv_weight)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the highest sum of weighted scores."""
        adapter = request.adapter
        return _blend(
            snapshot.endpoints, lambda v: _load_state(v, adapter), self.weights, rng, is_fresh=True
        )


def _load_state(view: EndpointView, adapter: str | None) -> float:
    slots = view.max_loras or 0
    if adapter is None:
        return 0.6 if view.num_active_adapters < slots else 0.0
    if adapter in view.gpu_adapters:
        return 1.0
    if view.num_active_adapters >= slots:
        return 0.0
    if adapter in view.cpu_adapters:
        return 0.7
    return 0.6 if len(view.gpu_adapters) < slots else 0.3


def _blend(
    endpoints: Sequence[EndpointView],
    affinity: Callable[[EndpointView], float],
    weights: tuple[float, float, float],
    rng: random.Random,
    *,
    is_fresh: bool,
) -> Choice:
    queues = [view.num_pending if is_fresh else view.num_waiting for view in endpoints]
    low, high = min(queues), max(queues)
    lora_weight, queue_weight, kv_weight = weights

    def cost(view: EndpointView) -> float:
        queue = view.num_pending if is_fresh else view.num_waiting
        queue_score = (high - queue) / (high - low) if high > low else 1.0
        score = lora_weight * affinity(view) + queue_weight * queue_score
        return -(score + kv_weight * (1 - view.kv_usage_ratio))

    return Choice((least(endpoints, cost, rng),), "blend")
