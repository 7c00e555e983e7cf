"""InferencePools' gauges by the names that dashboards and autoscalers of its pickers read.

Those of the Inference Extension's picker 1.5 (`inference_pool_*`) about pods. Its counters by
request (`inference_objective_*`) have no counterpart: tokens are not counted here, and objectives
are not resources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from extproc.observe.counters import labelled
from extproc.types import EndpointView, Snapshot

_AVERAGES: tuple[tuple[str, str, Callable[[EndpointView], float]], ...] = (
    ("average_queue_size", "Requests waiting in the engine", lambda view: view.num_waiting),
    ("average_running_requests", "Requests in the running batch", lambda view: view.num_running),
    (
        "average_kv_cache_utilization",
        "Part of the KV cache in use",
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
        yield _gauge("ready_pods", "Endpoints that may get requests", num_ready)
        for name, documentation, read in _AVERAGES:
            means = {pool: sum(map(read, own)) / len(own) for pool, own in known.items() if own}
            yield _gauge(name, f"{documentation}, on average", means)
        yield labelled(
            GaugeMetricFamily,
            "inference_pool_per_pod_queue_size",
            "Requests waiting in the engine",
            ("name", "model_server_pod"),
            {(pool, view.name): view.num_waiting for pool, own in known.items() for view in own},
        )


def _gauge(name: str, documentation: str, values: Mapping[str, float]) -> Metric:
    """Return a family with the pools' names as its label."""
    return labelled(GaugeMetricFamily, f"inference_pool_{name}", documentation, "name", values)
