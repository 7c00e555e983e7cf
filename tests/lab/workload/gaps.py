"""Arrivals, measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev


def gap_cv(times: Sequence[float]) -> float:
    """Coefficient of variation of the gaps between sorted times."""
    gaps = [second - first for first, second in pairwise(times)]
    return pstdev(gaps) / fmean(gaps)
