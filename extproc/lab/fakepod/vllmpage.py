"""The part of vLLM 0.32's `/metrics` page that routers, the dashboard and load tests read.

It is updated by the engine model's steps and written by prometheus_client, as vLLM's own: text
format, label order, `_created` lines and the `name[]` filter are the same code.
`vllm:lora_requests_info` has vLLM's peculiarities (`v1/metrics/stats.py` and `loggers.py`):

1. The running and the waiting label always name the same adapters.
2. They are the adapters of requests that have produced a token and are not finished. A request
   that is queued, that waits for a slot or for a load, or that still prefills does not appear; one
   that ends with its first token never does.
3. Every combination ever true stays on the page, with the wall time when it was last true.
4. There is no combination before the first step, and nothing changes while the engine is idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.registry import Collector

from extproc.lab.engine.records import EngineRequest, EngineStats, Step, Timeline

CONTENT_TYPE = CONTENT_TYPE_LATEST
_QUEUE_S = "vllm:request_queue_time_seconds"
_STEP_TOKENS = "vllm:iteration_tokens_total"
_TOKEN_S = "vllm:inter_token_latency_seconds"
_TTFT_S = "vllm:time_to_first_token_seconds"
_BUCKETS: Mapping[str, str] = {
    _QUEUE_S: "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    _STEP_TOKENS: "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    _TOKEN_S: "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    _TTFT_S: "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
    "640 2560",
}
"""Upper bounds of each histogram's buckets."""
_MetricT = TypeVar("_MetricT", Gauge, Counter)


class VllmPage:
    """The metrics of one fake pod.

    Args:
        model_name: The base model: the `model_name` label, of adapters' requests too.
        max_loras: Adapter slots; 0 leaves `vllm:lora_requests_info` out, as vLLM does.
        num_gpu_blocks: KV blocks.
        block_tokens: Tokens per block.
        names: Served name of each adapter key that the engine uses.
        started_wall_s: `process_start_time_seconds`, wall seconds.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_loras: int,
        num_gpu_blocks: int,
        block_tokens: int,
        names: Mapping[str, str],
        started_wall_s: float,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._names = names
        self._engine = {"model_name": model_name, "engine": "0"}
        self._max_lora = str(max_loras)
        self._active: dict[str, set[str]] = {}
        self._last_token_s: dict[str, float] = {}
        self._running = self._one(Gauge, "vllm:num_requests_running")
        self._waiting = self._one(Gauge, "vllm:num_requests_waiting")
        by_reason = self._family(
            Gauge, "vllm:num_requests_waiting_by_reason", *self._engine, "reason"
        )
        self._capacity = by_reason.labels(**self._engine, reason="capacity")
        self._deferred = by_reason.labels(**self._engine, reason="deferred")
        self._kv_usage = self._one(Gauge, "vllm:kv_cache_usage_perc")
        self._prompt_tokens = self._one(Counter, "vllm:prompt_tokens")
        self._one(Counter, "vllm:prefix_cache_hits")
        self._generated_tokens = self._one(Counter, "vllm:generation_tokens")
        self._histograms = {name: self._histogram(name) for name in _BUCKETS}
        lora = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        name = "vllm:lora_requests_info"
        self._lora = self._family(Gauge, name, *lora) if max_loras else None
        cache = {"engine": "0", "block_size": block_tokens, "num_gpu_blocks": num_gpu_blocks}
        self._family(Gauge, "vllm:cache_config_info", *cache).labels(**cache).set(1)
        self._family(Gauge, "process_start_time_seconds").set(started_wall_s)

    def _family(self, kind: type[_MetricT], name: str, *labels: str) -> _MetricT:
        return kind(name, "", labels, registry=self.registry)

    def _one(self, kind: type[_MetricT], name: str) -> _MetricT:
        return self._family(kind, name, *self._engine).labels(**self._engine)

    def _histogram(self, name: str) -> Histogram:
        buckets = tuple(map(float, _BUCKETS[name].split()))
        family = Histogram(name, "", tuple(self._engine), buckets=buckets, registry=self.registry)
        return family.labels(**self._engine)

    def record(self, step: Step, *, wall: float, ignore: Collection[str] = ()) -> None:
        """Record a step that ended at wall time `wall` (seconds).

        `ignore` has the ids of requests aborted while it ran.
        """
        first_tokens = [t for t in step.first_tokens if t.request.id not in ignore]
        tokens = [request for request in step.tokens if request.id not in ignore]
        prompt_tokens = sum(timeline.request.prompt_tokens for timeline in first_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(len(tokens))
        self._histograms[_STEP_TOKENS].observe(prompt_tokens + len(tokens))
        for timeline in first_tokens:
            self._observe_first_token(timeline)
        self._observe_intervals(tokens, step.ended_s)
        for timeline in step.finished:
            if timeline.request.id not in ignore:
                queue_s = max(0.0, timeline.scheduled_s - timeline.submitted_s)
                self._histograms[_QUEUE_S].observe(queue_s)
                self.forget(timeline.request)
        self.set_gauges(step.stats, wall=wall)

    def forget(self, request: EngineRequest) -> None:
        """Forget a request that has ended. The page shows it with the next step."""
        self._last_token_s.pop(request.id, None)
        name = self._names[request.adapter] if request.adapter is not None else ""
        ids = self._active.get(name)
        if ids is not None:
            ids.discard(request.id)
            if not ids:
                del self._active[name]

    def select(self, names: Collection[str]) -> Collector:
        """Return the metrics called `names`, or all if there are none."""
        return self.registry.restricted_registry(names) if names else self.registry

    def render(self, names: Collection[str] = ()) -> bytes:
        """Return the page in the text format."""
        return generate_latest(self.select(names))

    def _observe_first_token(self, timeline: Timeline) -> None:
        request = timeline.request
        latency_s = max(0.0, timeline.first_token_s - timeline.submitted_s)
        self._histograms[_TTFT_S].observe(latency_s)
        if request.adapter is not None:
            self._active.setdefault(self._names[request.adapter], set()).add(request.id)

    def _observe_intervals(self, tokens: Iterable[EngineRequest], ended_s: float) -> None:
        for request in tokens:
            last_s = self._last_token_s.get(request.id)
            if last_s is not None:
                self._histograms[_TOKEN_S].observe(ended_s - last_s)
            self._last_token_s[request.id] = ended_s

    def set_gauges(self, stats: EngineStats, *, wall: float) -> None:
        """Show the engine as it is at wall time `wall` (seconds)."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._capacity.set(stats.num_waiting - stats.num_deferred)
        self._deferred.set(stats.num_deferred)
        self._kv_usage.set(stats.kv_usage_ratio)
        if self._lora is not None:
            active = ",".join(self._active)
            self._lora.labels(self._max_lora, active, active).set(wall)
