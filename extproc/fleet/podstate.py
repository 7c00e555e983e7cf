"""One pod, as those see it who load adapters."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from msgspec import Struct

from extproc.types import ModelCard

_NOTHING: Mapping[str, int] = MappingProxyType({})


class PodState(Struct, frozen=True):
    """What is known of one pod.

    Attributes:
        is_up: It answers its health check, is not ejected, and is not leaving.
        models: As `/v1/models` lists them, by name; None before the first listing. The same object
            as long as nothing changes.
        listed_at_s: When that listing was asked for.
        max_loras: Adapter slots on the GPU; None for unknown, as in the next two.
        max_cpu_loras: Adapters in its host memory, those in slots included.
        max_rank: The largest rank that it loads.
        num_pending: Unfinished requests, of all routers.
        pending_by_adapter: The same by served name; only adapters with requests appear.
        process: When its process started; None where unknown.
        is_resolver: It finds and loads by itself what a request names.
        pools: Names of the pools that it is in, where there are several.
        unsafe_version: Of its engine, where a load would change the weights of running requests;
            "" where it would not.
    """

    address: str
    is_up: bool = True
    models: Mapping[str, ModelCard] | None = None
    listed_at_s: float = -inf
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_rank: int | None = None
    num_pending: int = 0
    pending_by_adapter: Mapping[str, int] = _NOTHING
    process: float | None = None
    is_resolver: bool = False
    pools: frozenset[str] = frozenset()
    unsafe_version: str = ""

    @property
    def why_no_load(self) -> str:
        """Why nothing can be loaded there now: "" for no reason."""
        if not (self.unsafe_version and self.num_pending):
            return ""
        return (
            f"its engine, {self.unsafe_version}, would answer running requests with another "
            "adapter's weights: upgrade it, or allow it by adapters.allow_unsafe_versions"
        )
