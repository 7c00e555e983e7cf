"""The `/metrics` page of vLLM 0.32, kept up to date from the engine model's steps.

It is written by prometheus_client, as vLLM's own: text format, label order, `_created` lines and
the `name[]` filter are the same code. `vllm:lora_requests_info` has vLLM's peculiarities
(`v1/metrics/stats.py` and `loggers.py`):

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
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.sim.engine.records import EngineRequest, EngineStats, Step, Timeline
from extproc.sim.fakepod import vllmfamilies as families

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LORA_LABELS = ("running_lora_adapters", "waiting_lora_adapters")
_MetricT = TypeVar("_MetricT", Gauge, Counter, Summary)


class VllmPage:
    """The metrics of one fake pod.

    Args:
        model_name: The base model: the `model_name` label, of adapters' requests too.
        max_loras: Adapter slots; 0 leaves `vllm:lora_requests_info` out, as vLLM does.
        max_model_len: Longest prompt plus answer, tokens.
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
        max_model_len: int,
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
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        self.registry.register(_Process(started_wall_s))
        self._make_gauges()
        self._make_counters()
        self._histograms = self._make_histograms(max_model_len)
        lora = ("vllm:lora_requests_info", "max_lora", *_LORA_LABELS)
        self._lora = self._family(Gauge, *lora) if max_loras else None
        self._make_cache_config(num_gpu_blocks, block_tokens)
        self._make_http()

    def _make_gauges(self) -> None:
        self._running = self._one(Gauge, "vllm:num_requests_running")
        self._waiting = self._one(Gauge, "vllm:num_requests_waiting")
        self._by_reason = self._each(
            Gauge, "vllm:num_requests_waiting_by_reason", families.WAITING_REASONS
        )
        self._each(Gauge, "vllm:engine_sleep_state", families.SLEEP_STATES)["awake"].set(1)
        self._kv_usage = self._one(Gauge, "vllm:kv_cache_usage_perc")

    def _make_counters(self) -> None:
        self._counters = {name: self._one(Counter, name) for name in families.COUNTERS}
        self._by_source = self._each(Counter, "vllm:prompt_tokens_by_source", families.SOURCES)
        self._each(Counter, "vllm:prompt_tokens_cached_by_source", families.CACHE_TIERS)
        self._success = self._each(Counter, "vllm:request_success", families.FINISHED_REASONS)
        rejections = self._family(Counter, "vllm:admission_rejections", "model_name", "reason")
        for reason in families.REJECTION_REASONS:
            rejections.labels(self._engine["model_name"], reason)

    def _make_histograms(self, max_model_len: int) -> dict[str, Histogram]:
        return {
            name: Histogram(
                name,
                families.HELP[name],
                list(self._engine),
                buckets=bounds,
                registry=self.registry,
            ).labels(**self._engine)
            for name, bounds in families.histograms(max_model_len).items()
        }

    def _make_cache_config(self, num_gpu_blocks: int, block_tokens: int) -> None:
        config = {
            **families.CACHE_CONFIG,
            "engine": "0",
            "block_size": str(block_tokens),
            "effective_attention_block_size": str(block_tokens),
            "kv_cache_size_tokens": str(num_gpu_blocks * block_tokens),
            "num_gpu_blocks": str(num_gpu_blocks),
        }
        info = self._family(Gauge, "vllm:cache_config_info", *config)
        info.labels(**config).set(1)

    def _make_http(self) -> None:
        self._http_requests = self._family(Counter, "http_requests", "handler", "method", "status")
        self._http_request_bytes = self._family(Summary, "http_request_size_bytes", "handler")
        self._http_response_bytes = self._family(Summary, "http_response_size_bytes", "handler")
        fine, coarse = "http_request_duration_highr_seconds", "http_request_duration_seconds"
        self._http_fine = Histogram(
            fine,
            families.HELP[fine],
            buckets=families.HTTP_FINE_BUCKETS_S,
            registry=self.registry,
        )
        self._http_coarse = Histogram(
            coarse,
            families.HELP[coarse],
            ["handler", "method"],
            buckets=families.HTTP_COARSE_BUCKETS_S,
            registry=self.registry,
        )

    def _family(self, kind: type[_MetricT], name: str, *labels: str) -> _MetricT:
        return kind(name, families.HELP[name], labels, registry=self.registry)

    def _one(self, kind: type[_MetricT], name: str) -> _MetricT:
        """A metric of this engine."""
        return self._family(kind, name, *self._engine).labels(**self._engine)

    def _each(
        self, kind: type[_MetricT], name: str, label: tuple[str, tuple[str, ...]]
    ) -> dict[str, _MetricT]:
        """A metric of this engine for each value of one more label."""
        key, values = label
        family = self._family(kind, name, *self._engine, key)
        return {value: family.labels(**self._engine, **{key: value}) for value in values}

    def record(self, step: Step, *, wall: float, ignore: Collection[str] = ()) -> None:
        """Take over one step, once it has ended at wall time `wall` (seconds).

        Args:
            step: The step.
            wall: When it ended, wall seconds.
            ignore: Ids of requests aborted while it ran.
        """
        counters = self._counters
        first_tokens = [t for t in step.first_tokens if t.request.id not in ignore]
        tokens = [request for request in step.tokens if request.id not in ignore]
        prompt_tokens = sum(timeline.request.prompt_tokens for timeline in first_tokens)
        counters["vllm:prompt_tokens"].inc(prompt_tokens)
        counters["vllm:prefix_cache_queries"].inc(prompt_tokens)
        self._by_source["local_compute"].inc(prompt_tokens)
        counters["vllm:generation_tokens"].inc(len(tokens))
        counters["vllm:num_preemptions"].inc(len(step.preempted))
        self._histograms["vllm:iteration_tokens_total"].observe(prompt_tokens + len(tokens))
        for timeline in first_tokens:
            self._observe_first_token(timeline)
        self._observe_intervals(tokens, step.ended_s)
        for timeline in step.finished:
            if timeline.request.id not in ignore:
                self._observe_finished(timeline)
        self._set_gauges(step.stats, wall)

    def record_abort(self, request: EngineRequest) -> None:
        """Forget an aborted request. What the page says changes with the next step."""
        self._forget(request)

    def record_idle(self, *, wall: float) -> None:
        """Say that nothing runs or waits, at wall time `wall` (seconds)."""
        self._set_gauges(EngineStats(), wall)

    def record_http(
        self,
        *,
        handler: str,
        method: str,
        status: int,
        request_bytes: int,
        response_bytes: int,
        duration_s: float,
    ) -> None:
        """Count one HTTP exchange."""
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_request_bytes.labels(handler).observe(request_bytes)
        self._http_response_bytes.labels(handler).observe(response_bytes)
        self._http_fine.observe(duration_s)
        self._http_coarse.labels(handler, method).observe(duration_s)

    def select(self, names: Collection[str]) -> Collector:
        """What to render: the metrics called `names`, or all if there are none."""
        return self.registry.restricted_registry(names) if names else self.registry

    def render(self, names: Collection[str] = ()) -> bytes:
        """The page in the text format: the metrics called `names`, or all if there are none."""
        return generate_latest(self.select(names))

    def _observe_first_token(self, timeline: Timeline) -> None:
        request = timeline.request
        latency_s = max(0.0, timeline.first_token_s - timeline.submitted_s)
        self._histograms["vllm:time_to_first_token_seconds"].observe(latency_s)
        if request.adapter is not None:
            self._active.setdefault(self._names[request.adapter], set()).add(request.id)

    def _observe_intervals(self, tokens: Iterable[EngineRequest], ended_s: float) -> None:
        histogram = self._histograms["vllm:inter_token_latency_seconds"]
        for request in tokens:
            last_s = self._last_token_s.get(request.id)
            if last_s is not None:
                histogram.observe(ended_s - last_s)
            self._last_token_s[request.id] = ended_s

    def _observe_finished(self, timeline: Timeline) -> None:
        request, finished_s = timeline.request, timeline.finished_s or 0.0
        decode_s = finished_s - timeline.first_token_s
        self._success["length" if request.output_tokens else "stop"].inc()
        for name, value in {
            "vllm:request_prompt_tokens": request.prompt_tokens,
            "vllm:request_generation_tokens": request.output_tokens,
            "vllm:request_max_num_generation_tokens": request.output_tokens,
            "vllm:request_params_n": 1,
            "vllm:request_params_max_tokens": request.output_tokens,
            "vllm:request_time_per_output_token_seconds": (
                decode_s / max(1, request.output_tokens - 1)
            ),
            "vllm:e2e_request_latency_seconds": finished_s - timeline.submitted_s,
            "vllm:request_queue_time_seconds": timeline.scheduled_s - timeline.submitted_s,
            "vllm:request_inference_time_seconds": finished_s - timeline.scheduled_s,
            "vllm:request_prefill_time_seconds": timeline.first_token_s - timeline.scheduled_s,
            "vllm:request_decode_time_seconds": decode_s,
            "vllm:request_num_preemptions": timeline.num_preemptions,
            "vllm:request_prefill_kv_computed_tokens": request.prompt_tokens,
        }.items():
            self._histograms[name].observe(max(0.0, value))
        self._forget(request)

    def _forget(self, request: EngineRequest) -> None:
        self._last_token_s.pop(request.id, None)
        name = self._names[request.adapter] if request.adapter is not None else ""
        ids = self._active.get(name)
        if ids is not None:
            ids.discard(request.id)
            if not ids:
                del self._active[name]

    def _set_gauges(self, stats: EngineStats, wall: float) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._by_reason["capacity"].set(stats.num_waiting - stats.num_deferred)
        self._by_reason["deferred"].set(stats.num_deferred)
        self._kv_usage.set(stats.kv_usage_ratio)
        if self._lora is not None:
            active = ",".join(self._active)
            self._lora.labels(self._max_lora, active, active).set(wall)


class _Process(Collector):
    """prometheus_client's process metrics, with the start time of the pod: several pods, or a pod
    that restarts, can live in one process."""

    def __init__(self, started_wall_s: float) -> None:
        self._process = ProcessCollector(registry=None)
        self._started_wall_s = started_wall_s

    def collect(self) -> Iterable[Metric]:
        name = "process_start_time_seconds"
        for family in self._process.collect():
            if family.name == name:
                yield GaugeMetricFamily(name, family.documentation, self._started_wall_s)
            else:
                yield family
