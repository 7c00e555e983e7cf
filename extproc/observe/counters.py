"""Plain numbers that become metric families only at a scrape of the metrics.

An event costs a quarter of what prometheus_client's own counters and histograms take. Names get the
prefix `extproc_`. Event loop only: there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from extproc.types import EndpointView, Snapshot


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    documentation: str,
    labels: str | tuple[str, ...],
    values: Mapping[Any, float],
) -> Metric:
    """Return a family; with a tuple of labels, the keys of the values are tuples, too."""
    names = (labels,) if isinstance(labels, str) else labels
    family = kind(name, documentation, labels=names)
    for value, number in values.items():
        family.add_metric((value,) if isinstance(labels, str) else value, number)
    return family


_Taken = tuple[Sequence[int], float]


class Counter:
    """One counter family; the `known` values of its single label start at 0."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: tuple[str, ...] = (),
        known: tuple[str, ...] = (),
    ) -> None:
        self._name = f"extproc_{name}"
        self._documentation = documentation
        self._labels = labels
        self._counts: dict[tuple[str, ...], float] = {(each,): 0 for each in known}
        if not labels:
            self._counts[()] = 0

    def add(self, labels: tuple[str, ...], count: float = 1) -> None:
        """Add to the count of these label values."""
        self._counts[labels] = self._counts.get(labels, 0) + count

    @property
    def total(self) -> float:
        """The sum over all labels."""
        return sum(self._counts.values())

    def keep(self, values: set[str]) -> None:
        """Forget all other values of the first label."""
        self._counts = {each: n for each, n in self._counts.items() if each[0] in values}

    def family(self) -> Metric:
        """Return the family as it is now."""
        return labelled(
            CounterMetricFamily, self._name, self._documentation, self._labels, self._counts
        )


class Histogram:
    """One histogram without labels, with upper bounds in seconds."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self._name = f"extproc_{name}"
        self._documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._counts)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def observe_all(self, seconds: list[float]) -> None:
        """Count durations: by bound, with a sort in place, where they are more than the bounds.

        Negative ones count as 0.
        """
        if len(seconds) < len(self._bounds):
            for each in seconds:
                self.observe(max(0.0, each))
            return
        seconds.sort()
        num_before, place = 0, bisect_left(self._bounds, seconds[0])
        while num_before < len(seconds):
            if place == len(self._bounds):
                num = len(seconds)
            else:
                num = bisect_right(seconds, self._bounds[place], num_before)
            self._counts[place] += num - num_before
            num_before, place = num, place + 1
        self.sum += sum(seconds[bisect_left(seconds, 0.0) :])

    def family(self) -> Metric:
        """Return the family as it is now."""
        family = HistogramMetricFamily(self._name, self._documentation)
        _add(family, (), self.taken(), self._bounds)
        return family

    def taken(self) -> _Taken:
        """Return the counts as they are now: of each bound and beyond, and the sum."""
        return self._counts.copy(), self.sum


class Histograms:
    """One histogram family with a label; a value without a duration has no series."""

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: tuple[float, ...],
        label: str,
        *,
        max_with_buckets: float = inf,
    ) -> None:
        self._name, self._documentation = name, documentation
        self._bounds, self._label = bounds, label
        self._max_with_buckets = max_with_buckets
        self._waiting: dict[str, list[float]] = {}
        self._by_value: dict[str, Histogram] = {}

    def waiting(self, value: str) -> list[float]:
        """Return where durations under this value of the label wait until `count`: add them."""
        return self._waiting.setdefault(value, [])

    def count(self) -> None:
        """Count what waits."""
        for value, seconds in self._waiting.items():
            if seconds:
                if value not in self._by_value:
                    self._by_value[value] = Histogram(self._name, self._documentation, self._bounds)
                self._by_value[value].observe_all(seconds)
                seconds.clear()

    def keep(self, values: Container[str]) -> None:
        """Forget all other values of the label, and what waits under them."""
        self._by_value = {each: own for each, own in self._by_value.items() if each in values}
        self._waiting = {each: own for each, own in self._waiting.items() if each in values}

    def taken(self) -> Callable[[], Metric]:
        """Return what makes the family as it is now, with what waits.

        Of more values than may have buckets, each has its number and its sum alone.
        """
        self.count()
        taken = {value: each.taken() for value, each in self._by_value.items()}
        bounds = self._bounds if len(taken) <= self._max_with_buckets else ()
        name = f"extproc_{self._name}"
        return partial(histograms, name, self._documentation, self._label, bounds, taken)


def histograms(
    name: str,
    documentation: str,
    label: str,
    bounds: tuple[float, ...],
    taken: Mapping[str, _Taken],
) -> Metric:
    """Return a family of histograms by the values of its label."""
    family = HistogramMetricFamily(name, documentation, labels=(label,))
    for value, each in taken.items():
        _add(family, (value,), each, bounds)
    return family


def _add(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    taken: _Taken,
    bounds: tuple[float, ...],
) -> None:
    """Add a histogram's samples to a family, with these bounds, none, or its own."""
    counts, seconds = taken
    total, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=False):
        total += count
        buckets.append((repr(bound), total))
    buckets.append(("+Inf", sum(counts)))
    family.add_metric(labels, buckets, seconds)


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
