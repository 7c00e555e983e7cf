"""Plain numbers that become metric families only at a scrape of the metrics.

An event costs a quarter of what prometheus_client's own counters and histograms take. Names get the
prefix `extproc_`. Event loop only: there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from extproc.bounds import plain
from extproc.observe.attainment import OTHER

MAX_LABEL_CHARS = 256
"""Longest label value chosen by a client: a model's name (`openai.MAX_MODEL_BYTES`)."""


class CappedLabel:
    """The first `max_values` values of a label; all others become OTHER."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: set[str] = set()

    def cap(self, value: str) -> str:
        """Return the value, or OTHER; a new one is recorded while there is room."""
        if value in self._values:
            return value
        value = plain(value, MAX_LABEL_CHARS)
        if value not in self._values:
            if len(self._values) >= self._max_values:
                return OTHER
            self._values.add(value)
        return value


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

    def family(self) -> Metric:
        """Return the family as it is now."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric((), buckets, self.sum)
        return family
