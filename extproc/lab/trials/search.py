"""The search for a policy's SLO capacity, the highest offered rate that it serves well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import sqrt

MAX_PROBES = 16
"""Sixteen strides of 1.5 are more than six-hundredfold."""
STRIDE = 1.5
"""Ratio between two rates while one of them is still to fail, or to pass."""
MAX_DESCENT = 8.0
"""The search ends at the lowest common rate divided by this: slow runs are long, and how bad such a
policy is no longer matters."""
EXACT = 1 + 1e-9
"""Rates that differ by less are equal."""


@dataclass(slots=True)
class CapacitySearch:
    """Finds the capacity of one policy from attainments at chosen rates.

    Attributes:
        target: Attainment that must be reached.
        resolution: Largest ratio between the first rate that failed and the last one that passed.
        points: Attainment by rate, so far.
    """

    target: float = 0.99
    resolution: float = 1.1
    points: dict[float, float] = field(default_factory=dict)

    def rates(self, rates_rps: Iterable[float], near_rps: float | None = None) -> Iterator[float]:
        """Yield every rate, then those around the capacity, at most `MAX_PROBES`.

        Each is to be measured, and its attainment put into `points`, before the next is asked for.

        Args:
            rates_rps: Rates to measure in any case.
            near_rps: Expected capacity, from other seeds. Around it the strides begin with the
                resolution and double, so that a good guess costs two runs.
        """
        for rate_rps in rates_rps:
            yield from self._unless_known(rate_rps)
        floor_rps = min(self.points, default=0.0) / MAX_DESCENT
        stride, last_rps = STRIDE, 0.0
        if near_rps:
            stride = self.resolution
            last_rps = near_rps / sqrt(stride)
            yield from self._unless_known(last_rps)
        for _ in range(MAX_PROBES):
            low, high = self.bracket
            if high is not None and high <= max(low * self.resolution, floor_rps) * EXACT:
                break
            has_passed = self.points.get(last_rps, 1.0) >= self.target
            last_rps = _probe(low, high, stride, has_passed)
            yield from self._unless_known(last_rps)
            stride = min(stride**2, STRIDE)

    def _unless_known(self, rate_rps: float) -> Iterator[float]:
        if rate_rps not in self.points:
            yield rate_rps

    @property
    def bracket(self) -> tuple[float, float | None]:
        """The highest rate up to which every measured rate reached the target, and the next.

        The first is 0 if none did; the second is None if all did.
        """
        low = 0.0
        for rate_rps in sorted(self.points):
            if self.points[rate_rps] < self.target:
                return low, rate_rps
            low = rate_rps
        return low, None

    @property
    def capacity_rps(self) -> float:
        """The rate at which attainment falls below the target, between two measurements.

        At rate 0 attainment is 1: if no measurement reached the target, the result is a guess on
        the line from there. If every measurement did, it is the highest rate measured, a lower
        bound.
        """
        low, high = self.bracket
        if high is None:
            return low
        above, below = self.points.get(low, 1.0), self.points[high]
        return low + (high - low) * (above - self.target) / (above - below)


def _probe(low: float, high: float | None, stride: float, goes_up: bool) -> float:
    """Return the next rate: one stride further, at most to the middle of the gap."""
    if high is None:
        return low * stride
    if not low:
        return high / stride
    middle = sqrt(low * high)
    return min(low * stride, middle) if goes_up else max(high / stride, middle)
