"""Samples of a vLLM server's steps from its metrics.

Two readings of a page between which the server was never idle give one sample: the mean work and
the mean time of the steps between them. Only metrics that vLLM has had since 0.8 are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

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
class Reading:
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
    computed, seconds, and distinct adapters in the batch."""

    num_decoding: float
    kv_tokens: float
    prefill_tokens: float
    step_s: float
    num_adapters: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """The factors of the costs."""
        return (1.0, self.num_decoding, self.kv_tokens, self.prefill_tokens)


def read_page(page: str, *, at_s: float) -> Reading:
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
        return Reading(
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


def sample_over(readings: Sequence[Reading], *, num_adapters: int) -> Sample | None:
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
