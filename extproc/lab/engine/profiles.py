"""The costs of engines: one frozen record of constants per model and accelerator.

The GPU profiles are a model put together from published measurements and derivations; nothing in
them was measured by this project. `PROFILES` names them; `dataclasses.replace` overrides any field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import yaml


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Sizes, limits and costs of one engine.

    One step takes `(step_s + step_per_decode_s * decoding sequences + step_per_kv_token_s * KV
    tokens of the batch + step_per_prefill_token_s * prompt tokens computed) * LoRA factor`. With an
    adapter in the batch, the factor is `1 + lora_ratio + lora_per_adapter_ratio * (distinct
    adapters - 1)`. The time of adapter loads is added, which stall the step.

    Attributes:
        name: Key in `PROFILES`.
        provenance: For reports: where the figures come from.
        kv_capacity_tokens: KV cache without any adapter slot, tokens.
        block_tokens: Tokens per KV block.
        max_num_batched_tokens: Tokens that one step may compute.
        max_num_seqs: Requests that may run at once.
        max_model_len: Longest prompt plus response, tokens.
        step_s: Fixed part of a step, seconds.
        step_per_decode_s: Per sequence that decodes, seconds.
        step_per_kv_token_s: Per KV token of the sequences in the batch, seconds.
        step_per_prefill_token_s: Per prompt token computed, seconds.
        lora_ratio: Part by which one adapter in the batch lengthens the step.
        lora_per_adapter_ratio: Part that each further distinct adapter adds.
        disk_load_s: Reading an adapter from disk into CPU memory, seconds, plus
        disk_load_per_rank_s: this for each unit of its rank.
        gpu_load_s: Copying an adapter from CPU memory into a slot, seconds, plus
        gpu_load_per_rank_s: this for each unit of its rank.
        slot_tokens_per_rank: KV tokens that one slot displaces for each unit of `max_lora_rank`:
            slots are allocated at full rank when the engine starts.
    """

    name: str
    provenance: str
    kv_capacity_tokens: int
    block_tokens: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    max_model_len: int = 8192
    step_s: float = 0.0
    step_per_decode_s: float = 0.0
    step_per_kv_token_s: float = 0.0
    step_per_prefill_token_s: float = 0.0
    lora_ratio: float = 0.0
    lora_per_adapter_ratio: float = 0.0
    disk_load_s: float = 0.0
    disk_load_per_rank_s: float = 0.0
    gpu_load_s: float = 0.0
    gpu_load_per_rank_s: float = 0.0
    slot_tokens_per_rank: float = 0.0

    def kv_blocks(self, max_loras: int, max_lora_rank: int) -> int:
        """Return the KV blocks that the adapter slots leave.

        Args:
            max_loras: Slots; 0 for an engine without LoRA.
            max_lora_rank: The rank that each slot is allocated for.

        Raises:
            ValueError: The slots leave no room for one request of `max_model_len`; vLLM refuses
                to start.
        """
        reserved = max_loras * max_lora_rank * self.slot_tokens_per_rank
        blocks = int(self.kv_capacity_tokens - reserved) // self.block_tokens
        if blocks * self.block_tokens < self.max_model_len:
            raise ValueError(f"{max_loras} slots of rank {max_lora_rank} leave {blocks} KV blocks")
        return blocks

    def changed(self, figures: Mapping[str, float]) -> EngineProfile:
        """Return a profile with other figures, by their names; whole numbers stay whole.

        Raises:
            TypeError: There is no such figure.
        """
        changes: dict[str, Any] = {
            name: int(figure) if isinstance(getattr(self, name, None), int) else figure
            for name, figure in figures.items()
        }
        return replace(self, **changes)

    def slowed(self, factor: float) -> EngineProfile:
        """Return a profile whose steps take `factor` times as long."""
        return replace(
            self,
            step_s=self.step_s * factor,
            step_per_decode_s=self.step_per_decode_s * factor,
            step_per_kv_token_s=self.step_per_kv_token_s * factor,
            step_per_prefill_token_s=self.step_per_prefill_token_s * factor,
        )

    def load_s(self, rank: int, *, is_from_disk: bool) -> float:
        """Return the seconds for which the engine stops to load an adapter of `rank`."""
        to_gpu_s = self.gpu_load_s + self.gpu_load_per_rank_s * rank
        if not is_from_disk:
            return to_gpu_s
        return to_gpu_s + self.disk_load_s + self.disk_load_per_rank_s * rank

    def forward_s(
        self, *, num_decoding: float, kv_tokens: float, prefill_tokens: float, num_adapters: int
    ) -> float:
        """Return the seconds of the forward pass of one step, without loads.

        The counts are whole for one step; calibration uses means over several.
        """
        base_s = (
            self.step_s
            + self.step_per_decode_s * num_decoding
            + self.step_per_kv_token_s * kv_tokens
            + self.step_per_prefill_token_s * prefill_tokens
        )
        return base_s * self.lora_factor(num_adapters)

    def lora_factor(self, num_adapters: int) -> float:
        """Return the factor by which `num_adapters` distinct ones lengthen the forward pass."""
        if not num_adapters:
            return 1.0
        return 1 + self.lora_ratio + self.lora_per_adapter_ratio * (num_adapters - 1)


_GPU_PROVENANCE = "model, not measured"

# Llama-3.1-8B in bf16: 32 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes = 131,072 bytes a KV
# token; weights 16.1 GB. An adapter on all linear layers has 5.24 MB a rank: 40 KV tokens.
_SLOT_TOKENS_PER_RANK_8B = 40.0

H100_8B = EngineProfile(
    name="h100-8b",
    provenance=_GPU_PROVENANCE,
    # Derived: (80 GB x 0.92, vLLM's gpu_memory_utilization, less 16.1 GB of weights and 2 GB of
    # workspace) / 131,072 bytes.
    kv_capacity_tokens=423_000,
    # vLLM's defaults for an API server on an H100 (engine/arg_utils.py).
    max_num_batched_tokens=8192,
    max_num_seqs=1024,
    # Between 10.54 ms (fit of decode latency over batch, H100-64GB, Llama-3.1-8B, vLLM 0.8.5,
    # arXiv 2508.08343) and 6.5 ms (one request, H100-80GB, vLLM 0.21).
    step_s=0.0085,
    # Slope of the same fit: 0.0438 ms a sequence.
    step_per_decode_s=0.0000438,
    # Derived: 131,072 bytes at about 2.6 TB/s of HBM bandwidth.
    step_per_kv_token_s=0.00000005,
    # Derived: 16 GFLOP a token at half of 990 TFLOP/s.
    step_per_prefill_token_s=0.000035,
    # Range 0.1 to 0.3 for vLLM from 0.11 on (specialised CUDA graphs, vLLM PR 25914, 32005); 1.0
    # was measured on 0.8.5 with 300 slots.
    lora_ratio=0.2,
    # About 0.1 to 0.3 ms an adapter on a 10 ms step; the twin's fit says 1.9 % (arXiv 2508.08343).
    lora_per_adapter_ratio=0.01,
    # Line through 70, 92 and 141 ms for rank 8, 16 and 32 (mean of 50 loads, Llama-3.1-8B, logs of
    # arXiv 2508.08343).
    disk_load_s=0.046,
    disk_load_per_rank_s=0.003,
    # 6.4 to 8.1 ms, nearly the same for rank 8 to 32 (same logs).
    gpu_load_s=0.007,
    slot_tokens_per_rank=_SLOT_TOKENS_PER_RANK_8B,
)

A100_8B = EngineProfile(
    name="a100-8b",
    provenance=_GPU_PROVENANCE,
    # Derived as above for the 40 GB card, on which `step_s` was seen.
    kv_capacity_tokens=142_000,
    # vLLM's defaults for an API server on any A100 (engine/arg_utils.py).
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    # 75 tokens/s for one request (A100-40GB, Llama-3.1-8B, vLLM 0.23, johnmusgrave.com).
    step_s=0.013,
    # Slope of the decode step over batch in the Gateway API Inference Extension's simulator
    # (tools/simulations/llm_ig_simulation, Llama-2-7B on A100): 0.1026 ms a sequence.
    step_per_decode_s=0.0001026,
    # Derived: 131,072 bytes at 1.2 TB/s of usable bandwidth. The same simulator's 0.000535 ms is
    # for Llama-2's four times larger KV token.
    step_per_kv_token_s=0.00000012,
    # Between the same simulator's 0.0677 ms and the derived 0.09 ms (16 GFLOP at half of 312
    # TFLOP/s, less overlap).
    step_per_prefill_token_s=0.00008,
    lora_ratio=0.2,
    lora_per_adapter_ratio=0.01,
    disk_load_s=0.046,
    disk_load_per_rank_s=0.003,
    # 8.5 to 9.3 ms (Llama-2-7B, logs of arXiv 2508.08343).
    gpu_load_s=0.009,
    slot_tokens_per_rank=_SLOT_TOKENS_PER_RANK_8B,
)

# S-LoRA's own settings (github.com/S-LoRA/S-LoRA). Fitted by hand to the results that its authors
# published, `benchmarks/paper/synthetic/slora/*.jsonl` (mean latency and first-token latency at
# each rate give the step over the batch), with the slopes below derived. Its engine is LightLLM of
# 2023: slower steps than vLLM's. There are no slots; give `max_loras` the value of `max_num_seqs`
# to have no gate. Its adapters are in main memory, so nothing is read from disk.
_SLORA_PROVENANCE = "model, not measured; fitted to results published by S-LoRA's authors"

A100_80_7B_SLORA = EngineProfile(
    name="a100-80-7b-slora",
    provenance=_SLORA_PROVENANCE,
    # The published `--max_total_token_num` for setting S2. S-LoRA takes a request's final length
    # and its adapter's pages out of it and never recomputes; this engine takes what a request has
    # and preempts. The two come out within 10 % of each other (tests/lab/engine/test_profiles.py).
    kv_capacity_tokens=125_000,
    block_tokens=1,
    max_num_batched_tokens=8192,
    # LightLLM's default `running_max_req_size`.
    max_num_seqs=1000,
    # Its default `max_req_total_len`.
    max_model_len=3072,
    # 35 ms for 16 to 24 requests with adapters (Toppings, ATC 2025: A100, Llama-2-7B).
    step_s=0.0265,
    step_per_decode_s=0.00001,
    # Derived: 524,288 bytes a KV token (32 layers x 4,096 x 2 x 2 bytes) at 1.6 TB/s.
    step_per_kv_token_s=0.00000033,
    # Slope of the matrix products over tokens: 134 ms at 2,048 (Vidur's profile, Llama-2-7B).
    step_per_prefill_token_s=0.0000645,
    lora_ratio=0.2,
    # Latency grows by 4 % from 5 to 100 adapters, by 20 % to 1,000 (setting S1).
    lora_per_adapter_ratio=0.001,
    # 2 MiB a rank (query, key, value, output) over PCIe 4: 2 ms at rank 16 (Punica, 2310.18547).
    gpu_load_per_rank_s=0.000125,
)

A100_80_13B_SLORA = replace(
    A100_80_7B_SLORA,
    name="a100-80-13b-slora",
    kv_capacity_tokens=65_000,
    # 58, 64 and 86 ms a token at 1, 2 and 4 requests per second (14, 32 and 81 at once).
    step_s=0.043,
    # Derived: 819,200 bytes a KV token (40 layers x 5,120 x 2 x 2 bytes) at 1.6 TB/s.
    step_per_kv_token_s=0.0000005,
    # Derived: 26 GFLOP a token where the 7B model has 13.5.
    step_per_prefill_token_s=0.00013,
    # 3.1 MiB a rank.
    gpu_load_per_rank_s=0.000195,
)

A10G_7B_SLORA = replace(
    A100_80_7B_SLORA,
    name="a10g-7b-slora",
    kv_capacity_tokens=14_000,
    # 46 and 55 ms a token at 1 and 1.5 requests per second (12 and 20 at once).
    step_s=0.0276,
    step_per_decode_s=0.0002,
    # Derived: 524,288 bytes at 0.5 TB/s.
    step_per_kv_token_s=0.00000105,
    # Derived: 14 GFLOP a token at two thirds of 70 TFLOP/s.
    step_per_prefill_token_s=0.0003,
)

# No cost at all: for tests of what surrounds the engine, where only order and limits matter.
INSTANT = EngineProfile(
    name="instant",
    provenance="every cost is zero: for tests of transports",
    kv_capacity_tokens=423_000,
)

_ALL = (
    H100_8B,
    A100_8B,
    A100_80_7B_SLORA,
    A100_80_13B_SLORA,
    A10G_7B_SLORA,
    INSTANT,
)

PROFILES: Mapping[str, EngineProfile] = MappingProxyType(
    {profile.name: profile for profile in _ALL}
)
_FIGURES = tuple(
    each.name for each in fields(EngineProfile) if each.name not in ("name", "provenance")
)


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    profile: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e12)]]


def as_yaml(profile: EngineProfile) -> str:
    """Return all figures as the `profile:` of a scenario, with their provenance in a comment."""
    figures = {name: _rounded(getattr(profile, name)) for name in _FIGURES}
    text: str = yaml.safe_dump({"profile": figures}, sort_keys=False)
    return f"# {profile.provenance}\n{text}"


def _rounded(figure: float) -> float:
    return figure if isinstance(figure, int) else float(f"{figure:.6g}")


def read_profile(text: str, *, name: str) -> EngineProfile:
    """Return the profile that `as_yaml` wrote.

    Raises:
        ValueError: It is something else; the message says what is wrong.
    """
    figures = msgspec.yaml.decode(text, type=_ProfileFile).profile
    if different := set(figures) ^ set(_FIGURES):
        raise ValueError(f"missing or unknown in `profile`: {', '.join(sorted(different))}")
    return replace(INSTANT, name=name, provenance="read from a file").changed(figures)
