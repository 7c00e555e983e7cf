"""What a fake pod is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extproc.sim.engine.profiles import INSTANT, EngineProfile


@dataclass(frozen=True, slots=True)
class PodConfig:
    """One fake vLLM pod; the names are those of vLLM's options where there is one.

    Attributes:
        name: Who it is: in `x-served-by` and in the text of its answers.
        base_model: Name of the base model.
        adapters: Adapters that it starts with, name to path; a bare list of names has the paths
            `/adapters/NAME`. They are loaded in this order.
        max_loras: Adapter slots on the GPU; 0 for a server without LoRA.
        max_cpu_loras: Places in the CPU cache; `max_loras` by default.
        max_lora_rank: The rank that every slot is allocated for.
        ranks_by_path: Rank of the adapter at each path that exists; None if every path exists and
            holds an adapter of `max_lora_rank`.
        profile: Costs and limits of the engine.
        time_scale: Engine seconds per second; above 1 is faster than life.
        runtime_updating: Whether adapters can be loaded and unloaded over HTTP.
        api_key: Asked for on paths under `/v1` where it is set.
        default_output_tokens: Length of an answer whose request does not say.
        max_body_bytes: Longest request body.
        drain_s: Seconds for which a process that is told to end still serves, while `/health` and
            `/metrics` answer 503 so that whoever watches goes elsewhere; then what runs has as long
            again. 0 ends at once, as vLLM does.
    """

    name: str = "pod-1"
    base_model: str = "base"
    adapters: Mapping[str, str] | Sequence[str] = ()
    max_loras: int = 4
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    ranks_by_path: Mapping[str, int] | None = None
    profile: EngineProfile = INSTANT
    time_scale: float = 1.0
    runtime_updating: bool = True
    api_key: str | None = None
    default_output_tokens: int = 16
    max_body_bytes: int = 64 * 1024 * 1024
    drain_s: float = 0.0

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Path of each adapter that it starts with."""
        if isinstance(self.adapters, Mapping):
            return dict(self.adapters)
        return {name: f"/adapters/{name}" for name in self.adapters}
