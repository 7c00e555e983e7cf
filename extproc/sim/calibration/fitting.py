"""Costs of an engine from samples of its steps: what makes a profile measured instead of a model.

Samples under different loads (`extproc.sim.calibration.calibrate`) give the costs, by least errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from extproc.sim.calibration.calibrate import Sample
from extproc.sim.engine.profiles import INSTANT, EngineProfile

_SINGULAR = 1e-7
"""Pivots of scaled columns below this, per sample: the samples do not tell the costs apart."""

_ROUNDS = 20
"""Of weighing the samples anew; what remains to move after as many is far below any noise."""
_EXACT_RATIO = 0.002
"""Errors below this weigh alike."""
_MAX_GROWTH = 1.0
"""An adapter that lengthens a step by more than a first one's whole is not looked for."""
_GROWTH_STEP = 0.0002
"""How exactly the growth is found."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs as in `EngineProfile`, and how well they tell the samples' steps.

    Attributes:
        step_s: Seconds.
        step_per_decode_s: Seconds.
        step_per_kv_token_s: Seconds.
        step_per_prefill_token_s: Seconds.
        lora_ratio: None where the samples do not tell.
        lora_per_adapter_ratio: None where the samples do not tell.
        errors: For each sample, how much longer the costs say that its step is, as part of what
            it was.
    """

    step_s: float
    step_per_decode_s: float
    step_per_kv_token_s: float
    step_per_prefill_token_s: float
    lora_ratio: float | None = None
    lora_per_adapter_ratio: float | None = None
    errors: tuple[float, ...] = ()

    @property
    def mean_error_ratio(self) -> float:
        """Mean of the errors, without sign."""
        return math.fsum(map(abs, self.errors)) / len(self.errors)

    @property
    def median_error_ratio(self) -> float:
        """Median of the errors, without sign: what disturbs single samples does not move it."""
        return median(map(abs, self.errors))

    @property
    def max_error_ratio(self) -> float:
        """The largest error, without sign."""
        return max(map(abs, self.errors))

    def applied(self, profile: EngineProfile, *, where: str) -> EngineProfile:
        """`profile` with these costs, said to be measured at `where`; the others stay."""
        provenance = (
            f"step costs measured on {where}: {len(self.errors)} samples, errors "
            f"{self.median_error_ratio:.1%} in the median, {self.mean_error_ratio:.1%} in the "
            f"mean, {self.max_error_ratio:.1%} at most; the rest: {profile.provenance}"
        )
        return replace(self.costs_in(profile), provenance=provenance)

    def costs_in(self, profile: EngineProfile) -> EngineProfile:
        """`profile` with these costs; the others stay."""
        return replace(
            profile,
            step_s=self.step_s,
            step_per_decode_s=self.step_per_decode_s,
            step_per_kv_token_s=self.step_per_kv_token_s,
            step_per_prefill_token_s=self.step_per_prefill_token_s,
            lora_ratio=_or(self.lora_ratio, profile.lora_ratio),
            lora_per_adapter_ratio=_or(self.lora_per_adapter_ratio, profile.lora_per_adapter_ratio),
        )


def fit(samples: Iterable[Sample]) -> Fit:
    """The costs that tell best how long the samples' steps were.

    Best is the least sum of relative errors, without their squares: on a machine with other work
    some samples are far too long, and should not count for more than the others. No cost is
    negative: one that would be is left out.

    Where there are samples with adapters, they tell the costs, and those without how much less a
    step takes without. An adapter need not lengthen every part of a step alike, as the profile
    says that it does, and steps with adapters are those that matter.

    Raises:
        ValueError: There are too few samples, or they are too much alike.
    """
    samples = list(samples)
    with_adapters = [sample for sample in samples if sample.num_adapters]
    without = [sample for sample in samples if not sample.num_adapters]
    if not with_adapters:
        return _judged(Fit(*_split(_least_errors([(s.terms, s.step_s) for s in without]))), without)
    costs, growth = _fit_adapters(with_adapters)
    ratio = 0.0
    if without:
        ratio = max(0.0, median(_dot(costs, s.terms) / s.step_s for s in without) - 1)
    plain = _split([cost / (1 + ratio) for cost in costs])
    return _judged(Fit(*plain, ratio, growth * (1 + ratio)), samples)


def _fit_adapters(samples: Sequence[Sample]) -> tuple[list[float], float]:
    """Costs of a step with one adapter, and by which part of that each further one lengthens it.

    For each growth the best costs are known, so the best growth is searched for, by thirds.
    """

    def costs_at(growth: float) -> tuple[float, list[float]]:
        rows = [(s.terms, s.step_s / (1 + growth * (s.num_adapters - 1))) for s in samples]
        costs = _least_errors(rows)
        return math.fsum(abs(_dot(costs, terms) / value - 1) for terms, value in rows), costs

    low, high = 0.0, _MAX_GROWTH if len({sample.num_adapters for sample in samples}) > 1 else 0.0
    while high - low > _GROWTH_STEP:
        third = (high - low) / 3
        if costs_at(low + third) <= costs_at(high - third):
            high -= third
        else:
            low += third
    growth = low if low < _GROWTH_STEP else (low + high) / 2
    return costs_at(growth)[1], growth


def _judged(found: Fit, samples: Sequence[Sample]) -> Fit:
    return replace(found, errors=tuple(errors_of(found.costs_in(INSTANT), samples)))


def errors_of(profile: EngineProfile, samples: Iterable[Sample]) -> list[float]:
    """How much longer the profile says that each sample's step is, as part of what it was."""
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


def _split(costs: Sequence[float]) -> tuple[float, float, float, float]:
    """Costs in the order of `Sample.terms`."""
    fixed, per_decode, per_kv_token, per_prefill_token = costs
    return fixed, per_decode, per_kv_token, per_prefill_token


_Row = tuple[Sequence[float], float]


def _least_errors(rows: Sequence[_Row]) -> list[float]:
    """Coefficients, none negative, with the least sum of relative errors: least squares, where a
    row weighs the less the larger its error was the time before."""
    found = _least_squares(rows, [1.0] * len(rows))
    for _ in range(_ROUNDS):
        errors = (abs(_dot(found, terms) / value - 1) for terms, value in rows)
        found = _least_squares(rows, [max(_EXACT_RATIO, error) ** -0.5 for error in errors])
    return found


def _least_squares(rows: Sequence[_Row], weights: Sequence[float]) -> list[float]:
    """Coefficients, none negative, with the least sum of squares of weighted relative errors."""
    width = len(rows[0][0]) if rows else 0
    if len(rows) < max(2, width):
        raise ValueError(f"{len(rows)} samples are too few")
    kept = list(range(width))
    while True:
        found = _solve(
            [
                ([weight * terms[i] / value for i in kept], weight)
                for (terms, value), weight in zip(rows, weights, strict=True)
            ]
        )
        worst = min(range(len(kept)), key=lambda place: found[place] * _scale(rows, kept[place]))
        if found[worst] >= 0:
            break
        del kept[worst]
    coefficients = [0.0] * width
    for place, value in zip(kept, found, strict=True):
        coefficients[place] = value
    return coefficients


def _solve(rows: Sequence[_Row]) -> list[float]:
    """Normal equations, by Gauss with pivots; columns are scaled to lie near each other."""
    width = len(rows[0][0])
    scales = [_scale(rows, column) or 1.0 for column in range(width)]
    scaled = [([t / scale for t, scale in zip(terms, scales, strict=True)], v) for terms, v in rows]
    table = [
        [
            *(
                math.fsum(terms[row] * terms[column] for terms, _ in scaled)
                for column in range(width)
            ),
            math.fsum(terms[row] * value for terms, value in scaled),
        ]
        for row in range(width)
    ]
    for column in range(width):
        pivot = max(range(column, width), key=lambda row: abs(table[row][column]))
        if abs(table[pivot][column]) < _SINGULAR * len(rows):
            raise ValueError("the samples are too much alike: vary batch, lengths and prompts")
        table[column], table[pivot] = table[pivot], table[column]
        for row in range(width):
            if row != column:
                part = table[row][column] / table[column][column]
                table[row] = [a - part * b for a, b in zip(table[row], table[column], strict=True)]
    return [table[i][width] / table[i][i] / scales[i] for i in range(width)]


def _scale(rows: Sequence[_Row], column: int) -> float:
    return max(abs(terms[column]) for terms, _ in rows)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def _or(found: float | None, other: float) -> float:
    return other if found is None else found
