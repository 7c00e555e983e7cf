"""The adapters that an engine holds: slots on the GPU over a cache in CPU memory.

Both are least-recently-used, as in vLLM 0.32 (`lora/worker_manager.py`,
`LRUCacheWorkerLoRAManager.add_adapter`, and `lora/model_manager.py`): an adapter is read into the
CPU cache before it gets a slot, an adapter that leaves the CPU cache loses its slot too, and each
use refreshes both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A load of an adapter.

    Attributes:
        is_from_disk: True if it was read from disk, then copied to the GPU; False if only the copy
            from CPU memory to the GPU was needed.
    """

    adapter: str
    is_from_disk: bool


class AdapterCache:
    """The adapters that one engine holds.

    Args:
        max_loras: Slots on the GPU, at least 1.
        max_cpu_loras: Places in the CPU cache, at least `max_loras`.

    Raises:
        ValueError: The sizes are out of range; vLLM refuses to start with them.
    """

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        if not 1 <= max_loras <= max_cpu_loras:
            raise ValueError(f"need 1 <= max_loras <= max_cpu_loras: {max_loras}, {max_cpu_loras}")
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        # Dicts keep insertion order: the first key is the least recently used.
        self._gpu: dict[str, None] = {}
        self._cpu: dict[str, None] = {}

    @property
    def gpu(self) -> tuple[str, ...]:
        """Adapters in GPU slots, most recently used first."""
        return tuple(reversed(self._gpu))

    @property
    def cpu(self) -> tuple[str, ...]:
        """Adapters in the CPU cache, most recently used first."""
        return tuple(reversed(self._cpu))

    def use(self, adapter: str) -> AdapterLoad | None:
        """Bring `adapter` onto the GPU, or refresh it there.

        Returns:
            The load, or None if the adapter had its slot already.
        """
        if adapter in self._gpu:  # and so in the CPU cache
            _refresh(self._cpu, adapter)
            _refresh(self._gpu, adapter)
            return None
        is_from_disk = adapter not in self._cpu
        if is_from_disk and len(self._cpu) == self.max_cpu_loras:
            oldest = next(iter(self._cpu))
            del self._cpu[oldest]
            self._gpu.pop(oldest, None)
        _refresh(self._cpu, adapter)
        if len(self._gpu) == self.max_loras:
            del self._gpu[next(iter(self._gpu))]
        self._gpu[adapter] = None
        return AdapterLoad(adapter, is_from_disk)


def _refresh(cache: dict[str, None], adapter: str) -> None:
    cache.pop(adapter, None)
    cache[adapter] = None
