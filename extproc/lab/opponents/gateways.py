"""The rules of gateways: Envoy's own, KubeAI's, the Gateway API Inference Extension's first, and
llm-d's.

**Envoy.** Power of two choices on own in-flight requests: LEAST_REQUEST with equal weights and
`choice_count: 2` (its default); the policy of Mitzenmacher, "The power of two choices in randomized
load balancing" (IEEE TPDS 2001).

**KubeAI.** Consistent hashing of the adapter's name with bounded loads (Mirrokni, Thorup,
Zadimoghaddam, arXiv 1608.01350), here over the rendezvous order (Thaler and Ravishankar, IEEE/ACM
ToN 1998) instead of a ring. Vimeo used c = 1.25 in HAProxy.

**The filter tree.** kubernetes-sigs/gateway-api-inference-extension v0.1.0,
`pkg/ext-proc/scheduling/{scheduler,filter}.go`, the branch for critical requests. "Least X" keeps
every endpoint within the lowest n-th part of the range; the choice among the rest at the end is
random.

**llm-d's blend of scorers around LoRA affinity**, as shipped and as it counts requests:
llm-d/llm-d-router v0.10.0, `pkg/epp/framework/plugins/scheduling/scorer/`. The scorers are
lora-affinity (1.0 if the adapter is active, 0.8 if there is room, else 0), queue and
kv-cache-utilization, each weighted. The maximum is drawn among ties. Weights: 2 for queue and KV
(the default configuration), 4 for lora-affinity (what KServe injects). With active-request-scorer
in the place of the queue, the queue is the picker's own requests in flight.

Its test for room counts the active adapters twice, because vLLM writes the same names into both
labels (llm-d-router issue 2605). `LoadState` is the successor proposed in pull request 2792: 1.0 in
a GPU slot, 0.7 in the CPU cache, 0.6 a free slot, 0.3 an idle adapter's slot, else 0. Its signal
does not exist in vLLM 0.33; here it is our inferred residency.

**Their input.** llm-d's default scorers and the filter tree read scrapes every 50 ms (llm-d-router
v0.10.0, `--refresh-metrics-interval`) and count nothing themselves. So requests sent since are
missing, and an adapter is where a page last named it. The snapshot's values are fresher.
`ScrapesOnly` shows them that. Some of llm-d's scorers count the picker's own requests in flight;
those a policy finds in `num_in_flight`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, inf

from msgspec.structs import replace

from extproc.lab.opponents.ties import least
from extproc.routing.policies import Policy
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

_Views = Sequence[EndpointView]


@dataclass(slots=True)
class LeastRequest:
    """The less busy of a few endpoints drawn at random.

    Args:
        choice_count: How many are drawn.
    """

    choice_count: int = 2

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the requests that this router itself has in flight there."""
        endpoints = snapshot.endpoints
        drawn = rng.sample(endpoints, min(self.choice_count, len(endpoints)))
        return Choice((least(drawn, lambda view: view.num_in_flight, rng),), "p2c")


class BoundedLoads:
    """The first endpoint in the adapter's order that is not above `c` times the mean load.

    Args:
        c: Bound, as a multiple of the mean number of unfinished requests; above 1.
    """

    def __init__(self, c: float = 1.25) -> None:
        if c <= 1:
            raise ValueError(f"c is {c}; allowed: above 1")
        self.c = c

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by hash and bound; for the base model, which has no order, by load alone."""
        endpoints = snapshot.endpoints
        if request.adapter is not None:
            total = sum(view.num_pending for view in endpoints) + 1
            capacity = ceil(self.c * total / len(endpoints))
            order = rendezvous_order(endpoints, request.adapter)
            for view in order:
                if view.num_pending < capacity:
                    return Choice((view,), "hash" if view is order[0] else "spill")
        return Choice((least(endpoints, lambda view: view.num_pending, rng),), "base")


def rendezvous_order(endpoints: _Views, key: str) -> list[EndpointView]:
    """Sort the endpoints by the key: the same for every router, and stable when one leaves."""

    def weight(view: EndpointView) -> bytes:
        return blake2b(f"{key}|{view.address}".encode(), digest_size=8).digest()

    return sorted(endpoints, key=weight, reverse=True)


@dataclass(slots=True)
class FilterTree:
    """The v0.1 tree.

    Args:
        queue_threshold: Waiting requests from which on an endpoint's queue is not low.
    """

    queue_threshold: int = 50

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the tree."""
        endpoints: _Views = snapshot.endpoints
        adapter = request.adapter
        low = [view for view in endpoints if view.num_waiting < self.queue_threshold]
        if low:
            active = [view for view in low if _is_active(view, adapter)]
            left: _Views = active or [view for view in low if _has_room(view)] or low
            reason = "affinity" if active else "room"
        else:
            shortest = _least(endpoints, lambda view: view.num_waiting)
            cheap = [v for v in shortest if _is_active(v, adapter) or _has_room(v)]
            left, reason = cheap or shortest, "busy"
        left = _least(left, lambda view: view.num_waiting)
        left = _least(left, lambda view: view.kv_usage_ratio)
        return Choice((rng.choice(left),), reason)


def _is_active(view: EndpointView, adapter: str | None) -> bool:
    return adapter is not None and adapter in view.pending_by_adapter


def _has_room(view: EndpointView) -> bool:
    return view.num_active_adapters < (view.max_loras or 0)


def _least(views: _Views, value: Callable[[EndpointView], float]) -> _Views:
    values = [value(view) for view in views]
    low, high = min(values), max(values)
    limit = low + (high - low) / len(views)
    return [view for view, own in zip(views, values, strict=True) if own <= limit]


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


@dataclass(slots=True)
class ScrapesOnly:
    """A policy that sees each endpoint's last report, and its own number of requests there.

    Nothing else: no adapters of requests since, no residency, nothing that other routers tell.
    """

    policy: Policy

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Let the policy choose by the reports."""
        views = {view.address: view for view in snapshot.endpoints}
        scraped = tuple(map(as_scraped, views.values()))
        choice = self.policy.choose(Snapshot(scraped, snapshot.now), request, rng=rng)
        if isinstance(choice, Wait):
            return choice
        return Choice(tuple(views[view.address] for view in choice.endpoints), choice.reason)


def as_scraped(view: EndpointView) -> EndpointView:
    """Return an endpoint as its last report shows it."""
    return replace(
        view,
        pending_by_adapter=dict.fromkeys(sorted(view.reported_adapters), 1),
        num_pending=view.num_running + view.num_waiting,
        num_told=0,
        num_unseen=0,
        num_foreign=0,
        gpu_adapters=(),
        cpu_adapters=(),
        num_adapter_loads=0,
        prompts_done_s=-inf,
    )
