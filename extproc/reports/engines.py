"""The metric names of each inference engine, the profiles that `exposition` reads pages by, and the
paths of its calls.

Names change between versions of an engine, so most entries are tuples: the first name that has
series on the page is the one that counts. Nothing here parses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct


class LoraInfo(Struct, frozen=True):
    """A family whose labels name the active adapters and whose value is a wall time."""

    family: str
    running_label: str  # the adapters of running requests
    waiting_label: str  # the adapters of waiting requests
    max_label: str  # the number of adapter slots on the GPU
    separator: str = ","  # between two names in a label


class ResidencySeries(Struct, frozen=True):
    """A family with one series per adapter and level that the adapter is loaded at."""

    family: str
    adapter_label: str
    level_label: str
    gpu_level: str  # the level that means a GPU slot
    cpu_level: str  # the level that means the CPU cache


class CacheInfo(Struct, frozen=True):
    """A family whose labels are the settings of an engine's KV cache."""

    family: str
    blocks_label: str  # the number of blocks
    block_size_label: str  # tokens in each
    prefix_label: str  # "False" where beginnings of prompts are not kept


class LabelledFamily(Struct, frozen=True):
    """The part of a family that has one value in one label."""

    family: str
    label: str
    value: str


class EngineMetrics(Struct, frozen=True):
    """One engine: the metrics that make up a load report, None where it has no such metric; calls.

    Attributes:
        engine_label: Series that agree in this label count the same requests (ranks of one
            engine); series that differ in it are separate engines, whose requests add up.
        counts_steps: `generated_tokens` moves with each step of running requests, not at their end.
        safe_loads_since: The first release in which loading an adapter leaves running requests
            alone; None where no other is known.
    """

    name: str  # for configuration, e.g. `vllm`
    engine_label: str
    running: tuple[str, ...]  # gauge of running requests
    waiting: tuple[str, ...]  # gauge of waiting requests
    kv_usage: tuple[str, ...]  # gauge of KV cache use, 0 to 1
    generated_tokens: tuple[str, ...] = ()  # counter of output tokens
    prompt_tokens: tuple[str, ...] = ()  # counter of prompts' tokens
    first_tokens: tuple[str, ...] = ()  # counter of requests that have had their first token
    counts_steps: bool = False
    lora_slots: tuple[str, ...] = ()  # gauge of adapter slots on the GPU
    deferred: LabelledFamily | None = None  # requests held back by adapter slots alone
    awake: LabelledFamily | None = None  # 0 while the engine sleeps and serves nobody
    lora_info: LoraInfo | None = None  # active adapters
    residency: ResidencySeries | None = None  # loaded adapters
    cache_info: CacheInfo | None = None  # size of the KV cache
    process_start: str = "process_start_time_seconds"  # of the server's process, wall seconds
    cpu_cache_flag: str = "--max-cpu-loras"  # of the server: places in the CPU cache
    max_rank_flag: str = "--max-lora-rank"  # of the server: largest adapter rank
    load_path: str = "/v1/load_lora_adapter"  # loads an adapter into a running server
    unload_path: str = "/v1/unload_lora_adapter"
    safe_loads_since: tuple[int, int, int] | None = None
    joins_names: bool = False  # `openai.Spelling`

    @property
    def families(self) -> tuple[str, ...]:
        """The names of all families that are read, each once."""
        optional = (self.deferred, self.awake, self.lora_info, self.residency, self.cache_info)
        return (
            *self.running,
            *self.waiting,
            *self.kv_usage,
            *self.generated_tokens,
            *self.prompt_tokens,
            *self.first_tokens,
            *self.lora_slots,
            *(part.family for part in optional if part is not None),
            self.process_start,
        )


_VLLM = EngineMetrics(
    name="vllm",
    engine_label="engine",  # data-parallel rank; absent before 0.8
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    # The second name is the one up to 0.11; versions 0.9 to 0.11 have both.
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    generated_tokens=("vllm:generation_tokens_total",),
    prompt_tokens=("vllm:prompt_tokens_total",),
    first_tokens=("vllm:time_to_first_token_seconds_count",),
    counts_steps=True,
    # Proposed together with `lora_adapter_loaded` (vllm-project/vllm pull request 54830).
    lora_slots=("vllm:max_gpu_lora_adapters",),
    deferred=LabelledFamily("vllm:num_requests_waiting_by_reason", "reason", "deferred"),
    awake=LabelledFamily("vllm:engine_sleep_state", "sleep_state", "awake"),  # since 0.11.2
    lora_info=LoraInfo(
        family="vllm:lora_requests_info",
        running_label="running_lora_adapters",
        waiting_label="waiting_lora_adapters",
        max_label="max_lora",
    ),
    residency=ResidencySeries(
        family="vllm:lora_adapter_loaded",
        adapter_label="adapter_name",
        level_label="level",
        gpu_level="gpu",
        cpu_level="cpu",
    ),
    cache_info=CacheInfo(
        "vllm:cache_config_info", "num_gpu_blocks", "block_size", "enable_prefix_caching"
    ),
    # vllm-project/vllm issue 47724, mended by pull request 47725: the wheels of 0.25.1 do not have
    # it, those of 0.26.0 do.
    safe_loads_since=(0, 26, 0),
)

# SGLang does not report active or loaded adapters: they are known from our dispatches alone. Its
# newer versions report the number of slots (`--max-loras-per-batch`). It counts the tokens of a
# request when that ends.
_SGLANG = EngineMetrics(
    name="sglang",
    engine_label="dp_rank",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_usage=("sglang:token_usage",),
    generated_tokens=("sglang:generation_tokens_total",),
    first_tokens=("sglang:time_to_first_token_seconds_count",),
    lora_slots=("sglang:lora_pool_slots_total",),
    cpu_cache_flag="--max-loaded-loras",
    load_path="/load_lora_adapter",
    unload_path="/unload_lora_adapter",
    joins_names=True,
)

PROFILES: Mapping[str, EngineMetrics] = MappingProxyType({p.name: p for p in (_VLLM, _SGLANG)})
