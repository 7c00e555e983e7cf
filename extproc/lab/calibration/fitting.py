"""An engine's costs fitted to samples of its steps under different loads, by least errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from extproc.lab.calibration.samples import Sample
from extproc.lab.engine.profiles import EngineProfile

_SINGULAR = 1e-6
"""With singular values below this part of the largest, the samples do not determine the costs."""
_ROUNDS = 20
"""Rounds of weighting the samples; later changes are far below any noise."""
_EXACT_RATIO = 0.002
"""Errors below this have the same weight."""
_MAX_GROWTH = 1.0
"""Largest growth of a step by a further adapter."""
_GROWTH_STEP = 0.0002
"""Precision of the growth."""
_NAMES = ("step_s", "step_per_decode_s", "step_per_kv_token_s", "step_per_prefill_token_s")
"""Costs in the order of `Sample.terms`."""


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the costs, by their names in `EngineProfile`, that explain the samples' steps best.

    The sum of relative errors is minimized, not of their squares: on a machine with other work some
    samples are far too long, and should not count for more than others. No cost is negative.

    Samples with adapters, if there are any, determine the costs, and those without determine how
    much shorter a step is without: adapters need not lengthen every part of a step alike, as the
    profile assumes, and steps with adapters matter most. Without any, their costs are left out.

    Raises:
        ValueError: There are too few samples, or they are too much alike.
    """
    adapted = [sample for sample in samples if sample.num_adapters]
    plain = [sample for sample in samples if not sample.num_adapters]
    if not adapted:
        costs = _least_errors(plain, [sample.step_s for sample in plain])
        return dict(zip(_NAMES, costs, strict=True))
    costs, growth = _fit_adapters(adapted)
    factor = max(1.0, median(_dot(costs, s.terms) / s.step_s for s in plain)) if plain else 1.0
    return {
        **{name: cost / factor for name, cost in zip(_NAMES, costs, strict=True)},
        "lora_ratio": factor - 1,
        "lora_per_adapter_ratio": growth * factor,
    }


def errors_of(profile: EngineProfile, samples: Iterable[Sample]) -> list[float]:
    """Return the relative error of the profile's step for each sample."""
    return [
        profile.forward_s(
            num_decoding=sample.num_decoding,
            kv_tokens=sample.kv_tokens,
            prefill_tokens=sample.prefill_tokens,
            num_adapters=sample.num_adapters,
        )
        / sample.step_s
        - 1
        for sample in samples
    ]


def _fit_adapters(samples: Sequence[Sample]) -> tuple[list[float], float]:
    """Fit the costs of a step with one adapter, and its relative growth by each further one.

    The best costs follow from the growth, so the growth is found by ternary search.
    """

    def costs_at(growth: float) -> tuple[float, list[float]]:
        times_s = [s.step_s / (1 + growth * (s.num_adapters - 1)) for s in samples]
        costs = _least_errors(samples, times_s)
        pairs = zip(samples, times_s, strict=True)
        return math.fsum(abs(_dot(costs, s.terms) / time_s - 1) for s, time_s in pairs), costs

    low, high = 0.0, _MAX_GROWTH if len({sample.num_adapters for sample in samples}) > 1 else 0.0
    while high - low > _GROWTH_STEP:
        third = (high - low) / 3
        if costs_at(low + third) <= costs_at(high - third):
            high -= third
        else:
            low += third
    growth = low if low < _GROWTH_STEP else (low + high) / 2
    return costs_at(growth)[1], growth


def _least_errors(samples: Sequence[Sample], times_s: Sequence[float]) -> list[float]:
    """Return non-negative coefficients of the samples' terms with the least sum of relative errors.

    By least squares, reweighted by the errors of the round before.
    """
    import numpy as np  # of the extra `loadtest`

    terms = np.array([sample.terms for sample in samples], ndmin=2)
    if len(samples) < max(2, terms.shape[1]):
        raise ValueError(f"{len(samples)} samples are too few")
    scales = terms.max(axis=0)
    scales[scales == 0] = 1.0
    rows = terms / scales / np.array(times_s)[:, np.newaxis]
    weights = np.ones(len(samples))
    for _ in range(1 + _ROUNDS):
        costs, kept = np.zeros(len(scales)), list(range(len(scales)))
        while True:
            found, _, rank, _ = np.linalg.lstsq(
                rows[:, kept] * weights[:, np.newaxis], weights, rcond=_SINGULAR
            )
            if rank < len(kept):
                raise ValueError("the samples are too much alike: vary batch, lengths and prompts")
            worst = int(found.argmin())
            if found[worst] >= 0:
                break
            del kept[worst]
        costs[kept] = found
        weights = np.maximum(_EXACT_RATIO, np.abs(rows @ costs - 1)) ** -0.5
    return [float(cost) for cost in costs / scales]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))
