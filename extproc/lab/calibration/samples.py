"""Samples of a vLLM server's steps from its metrics, and the costs that explain them.

Two readings of a page between which the server was never idle give one sample: the mean work and
the mean time of the steps between them. Only metrics that vLLM has had since 0.8 are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

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

SERIES = (
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)
"""The metrics that `read_page` needs."""


@dataclass(frozen=True, slots=True)
class PageSample:
    """The figures of one page; totals are since the server's start.

    Attributes:
        at_s: When it was taken, seconds of any clock.
        num_steps: Total of steps.
        generated_tokens: Total of tokens generated.
        first_tokens: Total of requests that have had their first token.
        prompt_tokens: Total of prompt tokens computed, without cached ones.
        num_running: Requests in the batch.
        kv_tokens: KV tokens in use. A page has blocks; the last block of each running request is
            assumed to be half empty.
        max_loras: Adapter slots; None if the page does not say.
    """

    at_s: float
    num_steps: float
    generated_tokens: float
    first_tokens: float
    prompt_tokens: float
    num_running: float
    kv_tokens: float
    num_waiting: float = 0.0
    max_loras: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean step of a window: sequences that decoded, the batch's KV tokens, prompt tokens
    computed, seconds, distinct adapters in the batch, and how often other costs came up."""

    num_decoding: float
    kv_tokens: float
    prefill_tokens: float
    step_s: float
    num_adapters: int = 0
    extra_terms: tuple[float, ...] = ()

    @property
    def terms(self) -> tuple[float, ...]:
        """The factors of the costs."""
        return (1.0, self.num_decoding, self.kv_tokens, self.prefill_tokens, *self.extra_terms)


def read_page(page: str, *, at_s: float) -> PageSample:
    """Read a vLLM server's metrics page.

    Raises:
        ValueError: A figure is missing.
    """
    values: dict[str, float] = {}
    cache_tokens, block_tokens, newest_s = 0.0, 0.0, -1.0
    max_loras: int | None = None
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                block_tokens = float(sample.labels["block_size"])
                cache_tokens = float(sample.labels["num_gpu_blocks"]) * block_tokens
            elif sample.name == "vllm:lora_requests_info" and sample.value > newest_s:
                newest_s, max_loras = sample.value, int(sample.labels["max_lora"])
            elif sample.name.startswith("vllm:") and not _has_more(sample.labels):
                values[sample.name] = sample.value
    try:
        num_running = values["vllm:num_requests_running"]
        used_tokens = values["vllm:kv_cache_usage_perc"] * cache_tokens
        return PageSample(
            at_s=at_s,
            num_steps=values["vllm:iteration_tokens_total_count"],
            generated_tokens=values["vllm:generation_tokens_total"],
            first_tokens=values["vllm:time_to_first_token_seconds_count"],
            prompt_tokens=values["vllm:prompt_tokens_total"]
            - values["vllm:prefix_cache_hits_total"],
            num_running=num_running,
            kv_tokens=max(0.0, used_tokens - num_running * (block_tokens - 1) / 2),
            num_waiting=values["vllm:num_requests_waiting"],
            max_loras=max_loras,
        )
    except KeyError as error:
        raise ValueError(f"the page has no {error}") from error


def sample_over(readings: Sequence[PageSample], *, num_adapters: int) -> Sample | None:
    """Return the mean step between the first and the last of two or more readings.

    None if the engine took no step, if it was idle at one of them, or if it was restarted. The
    caller keeps it busy, for many steps: a prompt counts when it is done. Gauges are averaged over
    the readings.
    """
    first, last = readings[0], readings[-1]
    num_steps = last.num_steps - first.num_steps
    if num_steps <= 0 or not all(reading.num_running for reading in readings):
        return None
    first_tokens = last.first_tokens - first.first_tokens
    generated = last.generated_tokens - first.generated_tokens
    return Sample(
        num_decoding=(generated - first_tokens) / num_steps,
        kv_tokens=math.fsum(reading.kv_tokens for reading in readings) / len(readings),
        prefill_tokens=(last.prompt_tokens - first.prompt_tokens) / num_steps,
        step_s=(last.at_s - first.at_s) / num_steps,
        num_adapters=num_adapters,
    )


def _has_more(labels: dict[str, str]) -> bool:
    """Return whether a sample is only a part, of a histogram or of a reason."""
    return bool(labels.keys() - {"model_name", "engine"})


# --- fitting ----------------------------------------------------------------------------------


def fit(samples: Sequence[Sample], *extra_terms: str) -> dict[str, float]:
    """Return the costs, by their names in `EngineProfile`, that explain the samples' steps best.

    The sum of relative errors is minimized, not of their squares. On a machine with other work some
    samples are far too long, and should not count for more than the rest. No cost is negative.

    Samples with adapters, if there are any, determine the costs. Samples without adapters determine
    how much shorter a step is without. Adapters need not lengthen every part of a step alike, as
    the profile assumes, and steps with adapters matter most. Without any, their costs are left out.

    Args:
        samples: Of steps.
        extra_terms: The names of their other costs, which adapters do not lengthen.

    Raises:
        ValueError: There are too few samples, or they are too much alike.
    """
    adapted = [sample for sample in samples if sample.num_adapters]
    plain = [sample for sample in samples if not sample.num_adapters]
    if not adapted:
        costs = _least_errors(plain, [sample.step_s for sample in plain])
        return dict(zip((*_NAMES, *extra_terms), costs, strict=True))
    costs, growth = _fit_adapters(adapted)
    factor = max(1.0, median(_dot(costs, s.terms) / s.step_s for s in plain)) if plain else 1.0
    return {
        **dict(zip((*_NAMES, *extra_terms), costs, strict=True)),
        **{name: cost / factor for name, cost in zip(_NAMES, costs, strict=False)},
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
