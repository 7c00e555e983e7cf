"""Plain numbers that become metric families only at a scrape of the metrics.

An event costs a quarter of what prometheus_client's own counters and histograms take. Names get the
prefix `extproc_`. Event loop only: there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric


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


_Taken = tuple[list[int], float]


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

    def add(self, labels: tuple[str, ...] = (), count: float = 1) -> None:
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
        ends = [0, *[bisect_right(seconds, bound) for bound in self._bounds], len(seconds)]
        for place, (begin, end) in enumerate(pairwise(ends)):
            self._counts[place] += end - begin
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
        return partial(self._family, taken, bounds)

    def _family(self, taken: Mapping[str, _Taken], bounds: tuple[float, ...]) -> Metric:
        name = f"extproc_{self._name}"
        family = HistogramMetricFamily(name, self._documentation, labels=(self._label,))
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
