"""The configuration of a fake pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.lab.engine.profiles import INSTANT, EngineProfile


@dataclass(frozen=True, slots=True)
class PodConfig:
    """One fake vLLM pod; the names are those of vLLM's options where there is one.

    Attributes:
        name: For `x-served-by` and the text of its responses.
        adapters: Adapters that it starts with, name to path; names without paths get
            `/adapters/NAME`. They are loaded in this order.
        max_loras: Adapter slots on the GPU; 0 for a server without LoRA.
        max_cpu_loras: Places in the CPU cache; `max_loras` by default.
        max_lora_rank: The rank that every slot is allocated for.
        ranks_by_path: Rank of the adapter at each path that exists; None if every path exists and
            holds an adapter of `max_lora_rank`.
        ranks_by_name: Rank of adapters by name, at any path without a rank of its own.
        resolver_dir: Folder in which it looks for adapters that requests name and it does not have,
            by their names: VLLM_LORA_RESOLVER_CACHE_DIR. Empty for a server without a resolver.
        loads_at_runtime: Adapters can be loaded and unloaded: VLLM_ALLOW_RUNTIME_LORA_UPDATING.
        profile: Costs and limits of the engine.
        api_key: Required on paths under `/v1` if set.
        drain_s: Seconds for which a process still serves after SIGTERM, while `/health` and
            `/metrics` respond 503 so that routers send requests elsewhere; running requests then
            have as long again. 0 ends at once, as vLLM does.
    """

    name: str = "pod-1"
    base_model: str = "base"
    adapters: Mapping[str, str] | Sequence[str] = ()
    max_loras: int = 4
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    ranks_by_path: Mapping[str, int] | None = None
    ranks_by_name: Mapping[str, int] = field(default_factory=dict)
    resolver_dir: str = ""
    loads_at_runtime: bool = True
    profile: EngineProfile = INSTANT
    api_key: str | None = None
    drain_s: float = 0.0

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Path of each adapter that it starts with."""
        if isinstance(self.adapters, Mapping):
            return dict(self.adapters)
        return {name: f"/adapters/{name}" for name in self.adapters}
