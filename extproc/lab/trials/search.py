"""The search for a policy's SLO capacity, the highest offered rate that it serves well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
        attainment_at: Runs the policy at a rate.
        target: Attainment that must be reached.
        resolution: Largest ratio between the first rate that failed and the last one that passed.
        points: Attainment by rate, so far.
    """

    attainment_at: Callable[[float], float]
    target: float = 0.99
    resolution: float = 1.1
    points: dict[float, float] = field(default_factory=dict)

    def run(self, rates_rps: Iterable[float], near_rps: float | None = None) -> float:
        """Measure at every rate, then around the capacity, at most `MAX_PROBES` times.

        Args:
            rates_rps: Rates to measure in any case.
            near_rps: Expected capacity, from other seeds. Around it the strides begin with the
                resolution and double, so that a good guess costs two runs.
        """
        for rate_rps in rates_rps:
            self._measure(rate_rps)
        floor_rps = min(self.points, default=0.0) / MAX_DESCENT
        stride, has_passed = STRIDE, True
        if near_rps:
            stride = self.resolution
            has_passed = self._measure(near_rps / sqrt(stride))
        for _ in range(MAX_PROBES):
            low, high = bracket(self.points, self.target)
            if high is not None and high <= max(low * self.resolution, floor_rps) * EXACT:
                break
            has_passed = self._measure(_probe(low, high, stride, has_passed))
            stride = min(stride**2, STRIDE)
        return capacity(self.points, self.target)

    def _measure(self, rate_rps: float) -> bool:
        """Return whether the target is reached at a rate."""
        if rate_rps not in self.points:
            self.points[rate_rps] = self.attainment_at(rate_rps)
        return self.points[rate_rps] >= self.target


def _probe(low: float, high: float | None, stride: float, goes_up: bool) -> float:
    """Return the next rate: one stride further, at most to the middle of the gap."""
    if high is None:
        return low * stride
    if not low:
        return high / stride
    middle = sqrt(low * high)
    return min(low * stride, middle) if goes_up else max(high / stride, middle)


def bracket(points: Mapping[float, float], target: float) -> tuple[float, float | None]:
    """Return the highest rate up to which every measured rate reached the target, and the next.

    The first is 0 if none did; the second is None if all did.
    """
    low = 0.0
    for rate_rps in sorted(points):
        if points[rate_rps] < target:
            return low, rate_rps
        low = rate_rps
    return low, None


def capacity(points: Mapping[float, float], target: float) -> float:
    """Return the rate at which attainment falls below the target, between two measurements.

    At rate 0 attainment is 1: if no measurement reached the target, the result is a guess on the
    line from there. If every measurement did, it is the highest rate measured, a lower bound.
    """
    low, high = bracket(points, target)
    if high is None:
        return low
    above, below = points.get(low, 1.0), points[high]
    return low + (high - low) * (above - target) / (above - below)
