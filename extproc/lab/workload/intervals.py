"""Means, differences and ratios over seeds, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

NOT_WORSE_RATIO = 0.97
"""A policy is not worse than another if the paired ratio is surely at least this."""

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom (any table)."""
_T_95_MORE = 2.228
"""For more than 10: the value for 10, which is on the safe side."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval.

    Bounds are None with fewer than two values.
    """

    mean: float
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values from independent seeds, by Student's t.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError("no values")
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean)
    quantile = _T_95[len(values) - 2] if len(values) - 2 < len(_T_95) else _T_95_MORE
    half = quantile * standard_error(values)
    return Interval(mean, mean - half, mean + half)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return stdev(values) / sqrt(len(values))


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the geometric mean of value over other, seed by seed.

    Raises:
        ValueError: A value is not positive.
    """
    if min(*values, *others) <= 0:
        raise ValueError("ratios need positive values")
    logs = interval([log(a / b) for a, b in zip(values, others, strict=True)])
    bounds = (None if bound is None else exp(bound) for bound in (logs.low, logs.high))
    return Interval(exp(logs.mean), *bounds)


def is_not_worse(ratio: Interval) -> bool:
    """Return whether the ratio is surely at least 0.97; never with one seed."""
    return ratio.low is not None and ratio.low >= NOT_WORSE_RATIO
