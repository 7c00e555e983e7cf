"""llm-d's blend of scorers around LoRA affinity, as shipped and as it counts requests.

Source: llm-d/llm-d-router v0.10.0, `pkg/epp/framework/plugins/scheduling/scorer/`: lora-affinity
(1.0 if the adapter is active, 0.8 if there is room, else 0), queue and kv-cache-utilization, each
weighted, the maximum drawn among ties. Weights: 2 for queue and KV (the default configuration),
4 for lora-affinity (what KServe injects). With active-request-scorer in the place of the queue, the
queue is the picker's own requests in flight.

Its test for room counts the active adapters twice, because vLLM writes the same names
into both labels (llm-d-router issue 2605). `LoadState` is the successor proposed in pull request
2792: 1.0 in a GPU slot, 0.7 in the CPU cache, 0.6 a free slot, 0.3 an idle adapter's slot, else 0.
Its signal does not exist in vLLM 0.33; here it is our inferred residency.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from extproc.routing.policies.ranking import least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot


@dataclass(slots=True)
class _Blend:
    """Weighted scores; the queue is our own pending requests unless overridden.

    Args:
        lora_weight: Of the adapter's score.
        queue_weight: Of the queue score.
        kv_weight: Of the KV score.
    """

    lora_weight: float = 4
    queue_weight: float = 2
    kv_weight: float = 2

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the highest sum of weighted scores."""
        endpoints = snapshot.endpoints
        queues = {view.address: self._queue(view) for view in endpoints}
        low, high = min(queues.values()), max(queues.values())

        def cost(view: EndpointView) -> float:
            queue_score = (high - queues[view.address]) / (high - low) if high > low else 1.0
            score = self.lora_weight * self._score(view, request.adapter)
            score += self.queue_weight * queue_score
            return -(score + self.kv_weight * (1 - view.kv_usage_ratio))

        return Choice((least(endpoints, cost, rng),), "blend")

    def _queue(self, view: EndpointView) -> int:
        return view.num_pending

    def _score(self, view: EndpointView, adapter: str | None) -> float:
        raise NotImplementedError


@dataclass(slots=True)
class LoraAffinity(_Blend):
    """The blend with lora-affinity-scorer.

    Args:
        is_counting: Take our own requests in flight for the queue (active-request-scorer).
    """

    is_counting: bool = False

    def _queue(self, view: EndpointView) -> int:
        return view.num_in_flight if self.is_counting else view.num_waiting

    def _score(self, view: EndpointView, adapter: str | None) -> float:
        if adapter is not None and adapter in view.pending_by_adapter:
            return 1.0
        return 0.8 if 2 * view.num_active_adapters < (view.max_loras or 0) else 0.0


class LoadState(_Blend):
    """The blend with the proposed lora-load-state-scorer, on our own pending requests."""

    def _score(self, view: EndpointView, adapter: str | None) -> float:
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
