"""Prometheus metrics of endpoints: a snapshot of the pools as metric families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from extproc.costs import BYTES_PER_TOKEN
from extproc.observe.counters import labelled
from extproc.types import EndpointView, Snapshot

# Reads an endpoint's gauge; None where the value is not known: absent, not 0.
_GAUGES: tuple[tuple[str, str, Callable[[EndpointView], float | None]], ...] = (
    (
        "endpoint_ready",
        "1 if the pod may get requests: discovery says so, and its engine is neither asleep nor "
        "stopped.",
        lambda view: view.is_ready,
    ),
    (
        "endpoint_known",
        "1 if the pod has a load report that has not expired. A pod without one "
        "that is not silent gets its share by what routers have sent there.",
        lambda view: view.is_known,
    ),
    (
        "endpoint_silent",
        "1 if the pod has no valid load report and does not answer either. It gets "
        "requests only where no other pod can take them.",
        lambda view: view.is_silent,
    ),
    (
        "endpoint_report_old",
        "1 if the report shows requests that no router knows of while its counters "
        "stand still. These requests do not count. All were aborted at once, or the "
        "engine hangs.",
        lambda view: view.has_old_report,
    ),
    (
        "endpoint_unreachable",
        "1 if the last call to the pod could not connect: refused, or no route.",
        lambda view: view.is_unreachable,
    ),
    (
        "endpoint_ejected",
        "1 if the pod is ejected because it fails, or is on trial with as many "
        "requests as it may have.",
        lambda view: view.is_ejected,
    ),
    (
        "endpoint_asleep",
        "1 if the engine sleeps by its last report. The pod gets no requests.",
        lambda view: view.is_asleep,
    ),
    (
        "endpoint_dead",
        "1 if the pod's /health says that its engine has stopped. The pod gets no requests.",
        lambda view: view.died_at_s is not None,
    ),
    (
        "endpoint_mixes_weights",
        "1 if the pod's version of vLLM gives running requests the weights of an "
        "adapter that is being loaded. Nothing is loaded there while the pod has "
        "requests.",
        lambda view: view.mixes_weights,
    ),
    (
        "endpoint_in_flight",
        "Unfinished requests that this router sent to the pod.",
        lambda view: view.num_in_flight,
    ),
    (
        "endpoint_pending",
        "Unfinished requests of the pod, including those from other sources.",
        lambda view: view.num_pending + view.num_foreign,
    ),
    (
        "endpoint_active_adapters_per_slot",
        "Distinct adapters with unfinished requests, divided by the GPU slots. "
        "Above 1, requests wait for a slot.",
        lambda view: view.num_active_adapters / view.max_loras if view.max_loras else None,
    ),
    (
        "requests_deferred",
        "Requests that wait for an adapter slot, by the engine's own count.",
        lambda view: view.num_deferred if view.is_known else None,
    ),
    (
        "endpoint_kv_usage_ratio",
        "Share of the KV cache in use.",
        lambda view: view.kv_usage_ratio if view.is_known else None,
    ),
    (
        "endpoint_prefill_tokens_per_second",
        "Speed at which the pod computes prompts, as configured or learned.",
        lambda view: 1 / (view.costs.prompt_s_per_byte * BYTES_PER_TOKEN),
    ),
    (
        "endpoint_cold_load_seconds",
        "Time to load an adapter from disk there, as configured or learned.",
        lambda view: view.costs.cold_load_s,
    ),
    (
        "endpoint_cached_load_seconds",
        "Time to load an adapter from the CPU cache there, as configured or learned.",
        lambda view: view.costs.cached_load_s,
    ),
    (
        "endpoint_decode_seconds_per_token",
        "Time that each running request takes for an output token, over the last "
        "second of work. Absent until the pod's reports show it.",
        lambda view: None if view.costs.decode is None else view.costs.decode.token_s,
    ),
)


def endpoint_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of each endpoint, by its address."""
    views, now = snapshot.endpoints, snapshot.now
    # One dict of labels for all families: a third of what those of `add_metric` take.
    labels = [{"endpoint": view.address} for view in views]
    for name, documentation, read in _GAUGES:
        family = GaugeMetricFamily(f"extproc_{name}", documentation, labels=("endpoint",))
        family.samples = [
            Sample(family.name, own, value)
            for own, view in zip(labels, views, strict=True)
            if (value := read(view)) is not None
        ]
        yield family
    loads = {view.address: view.num_adapter_loads for view in views}
    documentation = (
        "Adapters that entered a GPU slot, as far as the router can infer it. "
        "Its rate is the thrashing that routing should avoid."
    )
    yield labelled(CounterMetricFamily, "extproc_adapter_loads", documentation, "endpoint", loads)
    times = {view.address: view.reported_at_s for view in views}
    ages = {address: now - at_s for address, at_s in times.items() if at_s is not None}
    name, documentation = "extproc_endpoint_report_age_seconds", "Age of the last load report."
    yield labelled(GaugeMetricFamily, name, documentation, "endpoint", ages)


# InferencePools' gauges by the names that dashboards and autoscalers of its pickers read.
#
# Those of the Inference Extension's picker 1.5 (`inference_pool_*`) about pods. Its counters by
# request (`inference_objective_*`) have no counterpart: tokens are not counted here, and objectives
# are not resources.

_AVERAGES: tuple[tuple[str, str, Callable[[EndpointView], float]], ...] = (
    ("average_queue_size", "Requests that wait in the engine", lambda view: view.num_waiting),
    ("average_running_requests", "Requests in the running batch", lambda view: view.num_running),
    (
        "average_kv_cache_utilization",
        "Share of the KV cache in use",
        lambda view: view.kv_usage_ratio,
    ),
)


@dataclass(eq=False)
class PoolMetrics:
    """A collector. Averages and queues cover the pods with a load report that has not expired.

    Attributes:
        pools: Their names.
        snapshot: Returns the current state of all; called once per scrape of the metrics.
        in_pool: Returns whether an endpoint, by its address, is of a pool.
    """

    pools: Sequence[str]
    snapshot: Callable[[], Snapshot]
    in_pool: Callable[[str, str], bool]

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for the registry."""
        views = self.snapshot().endpoints
        of = {
            pool: [view for view in views if self.in_pool(view.address, pool)]
            for pool in self.pools
        }
        known = {pool: [view for view in own if view.is_known] for pool, own in of.items()}
        num_ready = {pool: sum(view.is_ready for view in own) for pool, own in of.items()}
        yield _gauge("ready_pods", "Pods that may get requests.", num_ready)
        for name, documentation, read in _AVERAGES:
            means = {pool: sum(map(read, own)) / len(own) for pool, own in known.items() if own}
            yield _gauge(name, f"{documentation}, on average of the pods.", means)
        yield labelled(
            GaugeMetricFamily,
            "inference_pool_per_pod_queue_size",
            "Requests that wait in the engine of each pod.",
            ("name", "model_server_pod"),
            {(pool, view.name): view.num_waiting for pool, own in known.items() for view in own},
        )


def _gauge(name: str, documentation: str, values: Mapping[str, float]) -> Metric:
    """Return a family with the pools' names as its label."""
    return labelled(GaugeMetricFamily, f"inference_pool_{name}", documentation, "name", values)
