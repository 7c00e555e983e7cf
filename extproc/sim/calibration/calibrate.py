"""What a vLLM server's metrics say of its steps: samples, for `extproc.sim.calibration.fitting`.

Two readings of a page between which the server was never idle give one sample: how many steps it
took, what they computed on average, and how long they were. Only figures that every vLLM has had
since 0.8 are read.
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
"""What `read_page` needs of a page."""


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
        kv_tokens: KV tokens in use. A page tells blocks; of each running request's last one half
            is taken to be empty.
        num_adapters: Distinct adapters in the batch.
        num_waiting: Requests in the queue.
        max_loras: Adapter slots; None where the page does not say.
    """

    at_s: float
    num_steps: float
    generated_tokens: float
    first_tokens: float
    prompt_tokens: float
    num_running: float
    kv_tokens: float
    num_adapters: int = 0
    num_waiting: float = 0.0
    max_loras: int | None = None


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


def read_page(page: str, *, at_s: float) -> Reading:
    """Read a vLLM server's metrics page.

    Raises:
        ValueError: A figure is missing.
    """
    values: dict[str, float] = {}
    cache_tokens, block_tokens, newest_s, num_adapters = 0.0, 0.0, -1.0, 0
    max_loras: int | None = None
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                block_tokens = float(sample.labels["block_size"])
                cache_tokens = float(sample.labels["num_gpu_blocks"]) * block_tokens
            elif sample.name == "vllm:lora_requests_info" and sample.value > newest_s:
                # The newest series is the present one; older ones stay on the page.
                newest_s, running = sample.value, sample.labels["running_lora_adapters"]
                num_adapters = len(running.split(",")) if running else 0
                max_loras = int(sample.labels["max_lora"])
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
            num_adapters=num_adapters,
            num_waiting=values["vllm:num_requests_waiting"],
            max_loras=max_loras,
        )
    except KeyError as error:
        raise ValueError(f"the page has no {error}") from error


def sample_over(readings: Sequence[Reading], *, num_adapters: int) -> Sample | None:
    """The mean step between the first and the last of some readings.

    None if the engine took no step, if it was idle at one of them, or if it was restarted. The
    caller sees to it that it was busy all the time, and that many steps lie between: a prompt
    counts when it is done. What a page tells of a moment is taken as the mean of the readings.

    Args:
        readings: Two or more.
        num_adapters: Distinct adapters in the batch.
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
    """Whether a sample is only a part: of a histogram, of a reason."""
    return bool(labels.keys() - {"model_name", "engine"})
