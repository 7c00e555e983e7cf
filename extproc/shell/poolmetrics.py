"""An InferencePool's gauges by the names that dashboards and autoscalers of its pickers read.

Those of the Inference Extension's picker 1.5 (`inference_pool_*`) about pods. Its counters by
request (`inference_objective_*`) have no counterpart: tokens are not counted here, and objectives
are not resources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from extproc.core.types import EndpointView, Snapshot

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
        snapshot: Returns the current state of the pool; called once per scrape of the metrics.
    """

    pool: str
    snapshot: Callable[[], Snapshot]

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for the registry."""
        views = self.snapshot().endpoints
        known = [view for view in views if view.is_known]
        num_ready = sum(view.is_ready for view in views)
        yield self._gauge("ready_pods", "Endpoints that may get requests", [num_ready])
        for name, documentation, read in _AVERAGES:
            values = [sum(map(read, known)) / len(known)] if known else []
            yield self._gauge(name, f"{documentation}, on average", values)
        queues = GaugeMetricFamily(
            "inference_pool_per_pod_queue_size",
            "Requests waiting in the engine",
            labels=("name", "model_server_pod"),
        )
        for view in known:
            queues.add_metric((self.pool, view.name), view.num_waiting)
        yield queues

    def _gauge(self, name: str, documentation: str, values: Sequence[float]) -> Metric:
        """Return a family with the pool's name as its label, empty without a value."""
        family = GaugeMetricFamily(f"inference_pool_{name}", documentation, labels=("name",))
        for value in values:
            family.add_metric((self.pool,), value)
        return family
