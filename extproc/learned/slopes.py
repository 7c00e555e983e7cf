"""A slope or a rate through points of (bytes, seconds), and the level of some seconds, each with
how sure it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import repeat
from math import inf, sqrt
from operator import mul, sub, truediv
from statistics import fmean
from typing import NamedTuple

STEP_S = 0.05
"""Of a time between two first tokens, what may be a step's own and no prompt's."""

_MIN_THIRD = 4
_ERROR = 2 * 1.4826 * 1.2533 * sqrt(2)
"""Of the difference of two medians of n, over their spread / sqrt(n): a normal distribution's
standard deviation is 1.4826 median deviations, a median's error 1.2533 times a mean's. Twice that,
as what comes at the same time is late together."""
_RATE_ERROR = _ERROR / sqrt(2)
"""The same of one median."""

Point = tuple[int, float]  # bytes, seconds


class Slope(NamedTuple):
    """Seconds per byte, and its standard error."""

    s_per_byte: float
    error_s_per_byte: float


class Level(NamedTuple):
    """The median of some seconds, and the bounds that it is between in 19 of 20 cases."""

    low_s: float
    middle_s: float
    high_s: float


def level(seconds: Collection[float]) -> Level:
    """Return the level of some seconds. A bound is infinite where they are too few to show it."""
    ordered, num = sorted(seconds), len(seconds)
    half, error = num / 2, sqrt(num)  # of the rank, as the median's is a binomial distribution
    if half + error >= num:
        return Level(-inf, median(ordered) if num else 0.0, inf)
    return Level(ordered[int(half - error)], median(ordered), ordered[int(half + error)])


def drawn(s_per_byte: float, variance: float, *found: Slope | None) -> float:
    """Return the slope that is likeliest by some that were found, if such slopes are `s_per_byte`,
    with a variance."""
    if not variance:
        return s_per_byte
    weight, total = 1 / variance, s_per_byte / variance
    for each in found:
        if each is not None:
            precision = 1 / max(each.error_s_per_byte**2, 1e-6 * variance)
            weight, total = weight + precision, total + precision * each.s_per_byte
    return total / weight


def fit(points: Iterable[Point]) -> Slope | None:
    """Return the slope of the resistant line through (bytes, seconds); None if they are few, or all
    alike."""
    ordered = sorted(points)
    third = len(ordered) // 3
    if third < _MIN_THIRD:
        return None
    sizes, times = zip(*ordered, strict=True)
    low_bytes, low_s = median(sizes[:third]), median(times[:third])
    high_bytes, high_s = median(sizes[-third:]), median(times[-third:])
    width = high_bytes - low_bytes
    if not width:
        return None
    slope = (high_s - low_s) / width
    rests = list(map(sub, times, map(mul, sizes, repeat(slope))))
    spread_s = median(map(abs, map(sub, rests, repeat(median(rests)))))
    return Slope(slope, _ERROR * spread_s / sqrt(third) / width)


def rate(points: Collection[Point]) -> Slope | None:
    """Return the seconds per byte of (bytes, seconds) that were computed one after the other; None
    if they are few."""
    if len(points) < 2 * _MIN_THIRD:
        return None
    sizes, times = zip(*points, strict=True)
    ratios = list(map(truediv, times, sizes))
    middle = median(ratios)
    spread = median(map(abs, map(sub, ratios, repeat(middle))))
    step = STEP_S / median(sizes)
    return Slope(middle, _RATE_ERROR * spread / sqrt(len(points)) + step)


def most(points: Collection[Point]) -> float:
    """Return what a byte can cost at most by (bytes, seconds): whatever was ahead of a prompt and
    is unknown, it was computed in that time. Infinite if they are few."""
    third = len(points) // 3
    if third < _MIN_THIRD:
        return inf
    sizes, times = zip(*sorted(points)[-third:], strict=True)
    num_bytes, seconds = median(sizes), median(times)
    return seconds / num_bytes if num_bytes else inf


def median(values: Iterable[float]) -> float:
    """Return the median of some values; `statistics.median` takes twice the time."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def beyond(own: Iterable[Slope | None], common: Slope | None) -> float:
    """Return what endpoints' slopes vary by beyond their errors, 0 where nothing is known."""
    slopes = [each for each in own if each is not None]
    if common is None or not slopes:
        return 0.0
    middle = common.s_per_byte
    rests = [(each.s_per_byte - middle) ** 2 - each.error_s_per_byte**2 for each in slopes]
    return max(0.0, fmean(rests))
