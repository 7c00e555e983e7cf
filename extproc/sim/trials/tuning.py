"""Tuning: every opponent's parameters searched with the same budget, on development suites only."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from math import exp, log
from statistics import fmean

from extproc.sim.opponents import TUNABLE
from extproc.sim.trials.trials import TrialResult

BUDGET = 9
"""Settings to try for each policy: two parameters with three values each."""


def settings_of(policy: str) -> list[str]:
    """Return the settings to try, as labels: the whole grid, or a sample of the budget's size."""
    grid = TUNABLE[policy]
    labels = [
        f"{policy}?" + "&".join(f"{key}={value:g}" for key, value in zip(grid, values, strict=True))
        for values in product(*grid.values())
    ]
    if len(labels) <= BUDGET:
        return labels
    return sorted(random.Random(policy).sample(labels, BUDGET))


def best_settings(results: Sequence[TrialResult]) -> dict[str, tuple[str, float]]:
    """Return for each policy the label with the highest geometric mean capacity, and that mean.

    The mean is over scenarios and seeds; ties go to the first label.
    """
    capacities: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        capacities[result.policy].append(log(max(result.capacity_rps, 1e-3)))
    best: dict[str, tuple[str, float]] = {}
    for label in sorted(capacities):
        policy, mean = label.partition("?")[0], exp(fmean(capacities[label]))
        if policy not in best or mean > best[policy][1]:
            best[policy] = (label, mean)
    return best
