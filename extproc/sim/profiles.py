"""What an engine costs: one frozen record of constants per model and accelerator.

The GPU profiles are a model put together from published measurements and derivations; nothing in
them was measured by this project. `PROFILES` names them; `dataclasses.replace` overrides any field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Sizes, limits and costs of one engine.

    One step takes `(step_s + step_per_decode_s * decoding sequences + step_per_kv_token_s * KV
    tokens of the batch + step_per_prefill_token_s * prompt tokens computed) * LoRA factor`, the
    factor being `1 + lora_ratio + lora_per_adapter_ratio * (distinct adapters - 1)` if there is
    an adapter in the batch, plus the time of the adapter loads, which stall it.

    Attributes:
        name: Key in `PROFILES`.
        provenance: For reports: where the figures come from.
        kv_capacity_tokens: KV cache without any adapter slot, tokens.
        block_tokens: Tokens per KV block.
        max_num_batched_tokens: Tokens that one step may compute.
        max_num_seqs: Requests that may run at once.
        max_model_len: Longest prompt plus answer, tokens.
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
        """KV blocks left beside the adapter slots.

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

    def load_s(self, rank: int, *, is_from_disk: bool) -> float:
        """Seconds that the engine stands still to bring an adapter of `rank` onto the GPU."""
        to_gpu_s = self.gpu_load_s + self.gpu_load_per_rank_s * rank
        if not is_from_disk:
            return to_gpu_s
        return to_gpu_s + self.disk_load_s + self.disk_load_per_rank_s * rank

    def forward_s(
        self, *, num_decoding: int, kv_tokens: int, prefill_tokens: int, num_adapters: int
    ) -> float:
        """Seconds that the forward pass of one step takes, loads excluded."""
        base_s = (
            self.step_s
            + self.step_per_decode_s * num_decoding
            + self.step_per_kv_token_s * kv_tokens
            + self.step_per_prefill_token_s * prefill_tokens
        )
        return base_s * self.lora_factor(num_adapters)

    def lora_factor(self, num_adapters: int) -> float:
        """By how much `num_adapters` distinct ones in the batch lengthen its forward pass."""
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

# No cost at all: for tests of what surrounds the engine, where only order and limits matter.
INSTANT = EngineProfile(
    name="instant",
    provenance="every cost is zero: for tests of transports",
    kv_capacity_tokens=423_000,
)

PROFILES: Mapping[str, EngineProfile] = MappingProxyType(
    {profile.name: profile for profile in (H100_8B, A100_8B, INSTANT)}
)
