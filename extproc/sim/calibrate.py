"""Costs of an engine from its own metrics: what makes a profile measured instead of a model.

Two readings of a vLLM server's `/metrics` between which it was never idle give one sample: how many
steps it took, what they computed on average, and how long they were. Samples under different loads
give the costs, by least squares. Only figures that every vLLM has had since 0.8 are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.profiles import EngineProfile

_SINGULAR = 1e-7
"""Pivots of scaled columns below this, per sample: the samples do not tell the costs apart."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one page says.

    Attributes:
        at_s: When it was taken, seconds of any clock.
        num_steps: Steps since the start.
        generated_tokens: Tokens generated since the start.
        first_tokens: Requests that have had their first token.
        prompt_tokens: Prompt tokens computed since the start, cached ones left out.
        num_running: Requests in the batch.
        kv_tokens: KV tokens in use.
        num_adapters: Distinct adapters in the batch.
    """

    at_s: float
    num_steps: float
    generated_tokens: float
    first_tokens: float
    prompt_tokens: float
    num_running: float
    kv_tokens: float
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean step of some time, and what it computed.

    Attributes:
        num_decoding: Sequences that decoded.
        kv_tokens: KV of the batch, tokens.
        prefill_tokens: Prompt tokens.
        step_s: Seconds.
        num_adapters: Distinct adapters in the batch.
    """

    num_decoding: float
    kv_tokens: float
    prefill_tokens: float
    step_s: float
    num_adapters: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """What the costs are multiplied with."""
        return (1.0, self.num_decoding, self.kv_tokens, self.prefill_tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs as in `EngineProfile`, and how well they tell the samples' steps.

    Attributes:
        step_s: Seconds.
        step_per_decode_s: Seconds.
        step_per_kv_token_s: Seconds.
        step_per_prefill_token_s: Seconds.
        num_samples: How many samples there were.
        mean_error_ratio: Mean of the relative errors, without sign.
        max_error_ratio: The largest of them.
    """

    step_s: float
    step_per_decode_s: float
    step_per_kv_token_s: float
    step_per_prefill_token_s: float
    num_samples: int
    mean_error_ratio: float
    max_error_ratio: float

    def applied(self, profile: EngineProfile, *, where: str) -> EngineProfile:
        """`profile` with these costs, said to be measured at `where`. Its LoRA part stays."""
        return replace(
            profile,
            step_s=self.step_s,
            step_per_decode_s=self.step_per_decode_s,
            step_per_kv_token_s=self.step_per_kv_token_s,
            step_per_prefill_token_s=self.step_per_prefill_token_s,
            provenance=(
                f"step costs measured on {where}: {self.num_samples} samples, mean error "
                f"{self.mean_error_ratio:.1%}, largest {self.max_error_ratio:.1%}; the rest: "
                f"{profile.provenance}"
            ),
        )


def read_page(page: str, *, at_s: float) -> Reading:
    """Read a vLLM server's metrics page.

    Raises:
        ValueError: A figure is missing.
    """
    values: dict[str, float] = {}
    cache_tokens, newest_s, num_adapters = 0.0, -1.0, 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                labels = sample.labels
                cache_tokens = float(labels["num_gpu_blocks"]) * float(labels["block_size"])
            elif sample.name == "vllm:lora_requests_info" and sample.value > newest_s:
                # The newest series is the present one; older ones stay on the page.
                newest_s, running = sample.value, sample.labels["running_lora_adapters"]
                num_adapters = len(running.split(",")) if running else 0
            elif sample.name.startswith("vllm:") and not _has_more(sample.labels):
                values[sample.name] = sample.value
    try:
        return Reading(
            at_s=at_s,
            num_steps=values["vllm:iteration_tokens_total_count"],
            generated_tokens=values["vllm:generation_tokens_total"],
            first_tokens=values["vllm:time_to_first_token_seconds_count"],
            prompt_tokens=values["vllm:prompt_tokens_total"]
            - values["vllm:prefix_cache_hits_total"],
            num_running=values["vllm:num_requests_running"],
            kv_tokens=values["vllm:kv_cache_usage_perc"] * cache_tokens,
            num_adapters=num_adapters,
        )
    except KeyError as error:
        raise ValueError(f"the page has no {error}") from error


def sample_between(first: Reading, second: Reading) -> Sample | None:
    """The mean step between two readings.

    None if the engine took no step, if it was idle at one of them, if it was restarted, or if the
    number of adapters changed. The caller sees to it that it was busy all the time, and that many
    steps lie between: a prompt counts when it is done, the gauges are those of two moments.
    """
    num_steps = second.num_steps - first.num_steps
    if num_steps <= 0 or not first.num_running or not second.num_running:
        return None
    if first.num_adapters != second.num_adapters:
        return None
    first_tokens = second.first_tokens - first.first_tokens
    generated = second.generated_tokens - first.generated_tokens
    return Sample(
        num_decoding=(generated - first_tokens) / num_steps,
        kv_tokens=(first.kv_tokens + second.kv_tokens) / 2,
        prefill_tokens=(second.prompt_tokens - first.prompt_tokens) / num_steps,
        step_s=(second.at_s - first.at_s) / num_steps,
        num_adapters=first.num_adapters,
    )


def fit(samples: Iterable[Sample]) -> Fit:
    """The costs that tell best, in relative error, how long the steps without adapters were.

    No cost is negative: one that would be is left out.

    Raises:
        ValueError: There are too few samples, or they are too much alike.
    """
    used = [sample for sample in samples if not sample.num_adapters]
    costs = _least_squares([(sample.terms, sample.step_s) for sample in used])
    errors = [abs(_dot(costs, sample.terms) / sample.step_s - 1) for sample in used]
    mean_error = math.fsum(errors) / len(errors)
    return Fit(costs[0], costs[1], costs[2], costs[3], len(used), mean_error, max(errors))


def fit_lora(profile: EngineProfile, samples: Iterable[Sample]) -> EngineProfile:
    """`profile`, whose step costs are fitted, with the LoRA factor that tells best how long the
    steps with adapters were.

    Raises:
        ValueError: There are too few samples, or all have as many adapters.
    """
    rows = []
    for sample in samples:
        if sample.num_adapters:
            factor = sample.step_s / profile.forward_s(
                num_decoding=sample.num_decoding,
                kv_tokens=sample.kv_tokens,
                prefill_tokens=sample.prefill_tokens,
                num_adapters=0,
            )
            rows.append(((1.0, sample.num_adapters - 1.0), factor))
    base, per_adapter = _least_squares(rows)
    return replace(profile, lora_ratio=max(0.0, base - 1), lora_per_adapter_ratio=per_adapter)


_Row = tuple[Sequence[float], float]


def _least_squares(rows: Sequence[_Row]) -> list[float]:
    """Coefficients, none negative, with the least sum of squared relative errors."""
    width = len(rows[0][0]) if rows else 0
    if len(rows) < max(2, width):
        raise ValueError(f"{len(rows)} samples are too few")
    kept = list(range(width))
    while True:
        found = _solve([([terms[i] / value for i in kept], 1.0) for terms, value in rows])
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


def _has_more(labels: dict[str, str]) -> bool:
    """Whether a sample is only a part: of a histogram, of a reason."""
    return bool(labels.keys() - {"model_name", "engine"})
