"""The caches of one engine: KV blocks, with the prefixes that requests share, and adapters.

As vLLM 0.32 does it (`v1/core/block_pool.py`, `v1/core/kv_cache_manager.py`):

1. Free blocks stand in a queue. Allocation takes from its head. Freed blocks go to its tail, but
   for those that are not full, and so cannot be found again: they go to its head.
2. A full block keeps its content, and can be found by it, until it is allocated again. Blocks that
   somebody uses are shared, not copied; blocks found in the queue leave it.
3. A request's blocks are freed last one first, so that the end of a prefix goes before its start.
4. The adapter is part of a block's key: the same prompt under another adapter, or under the base
   model, finds nothing.
5. A block can be found as soon as the step that computes it is put together.

6. So a preempted request finds its lost blocks, as far as nobody has allocated them.

One simplification: other requests find the shared prefix that a request names, and not the rest of
its prompt or its answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

PrefixKey = tuple[str | None, str, int]
"""Adapter, name of the prefix, and its length in blocks."""

_KEPT: PrefixKey = (None, "", 0)
"""No shared prefix has this key."""


@dataclass(slots=True, eq=False)
class Prefix:
    """Blocks that can be found again: the first `blocks` of its `key[2]` have their content.

    While nobody uses it, `run` are its blocks in the queue. With the key `_KEPT` it has the blocks
    of one preempted sequence behind its shared prefix.
    """

    key: PrefixKey
    blocks: int = 0
    num_users: int = 0
    run: _Run | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbours in the queue of free blocks that are alike: of one prefix, or without use."""

    blocks: int
    prefix: Prefix | None = None


class BlockPool:
    """All KV blocks of an engine.

    Attributes:
        size: Blocks in all.
        free: Blocks that nobody uses, those with a prefix that can still be found among them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._queue = deque([_Run(size)])
        self._prefixes: dict[PrefixKey, Prefix] = {}

    @property
    def prefixes(self) -> dict[PrefixKey, int]:
        """How many blocks of each prefix are here."""
        return {key: prefix.blocks for key, prefix in self._prefixes.items()}

    def cost(self, blocks: int, key: PrefixKey | None) -> int:
        """Free blocks that `blocks` take which begin with the prefix `key`."""
        prefix = self._prefixes.get(key) if key else None
        return blocks if prefix is None or not prefix.num_users else blocks - prefix.blocks

    def hold(self, key: PrefixKey) -> Prefix:
        """Use the prefix `key`, as far as it is here, at the start of a sequence."""
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = Prefix(key)
        if prefix.run is not None:
            self._withdraw(prefix)
        prefix.num_users += 1
        return prefix

    def allocate(self, blocks: int) -> None:
        """Take `blocks` free ones; there are as many."""
        self.free -= blocks
        while blocks:
            run = self._queue[0]
            taken = min(blocks, run.blocks)
            run.blocks -= taken
            blocks -= taken
            if run.prefix is not None:
                self._forget(run.prefix, taken)
            if not run.blocks:
                self._queue.popleft()

    def release(
        self, blocks: int, num_full: int, prefix: Prefix | None, *, is_kept: bool = False
    ) -> Prefix | None:
        """Give back a sequence of `blocks`, of which the first `num_full` are full, and the first
        of these `prefix`.

        Returns:
            If `is_kept`, the other full ones, for `take_back`.
        """
        self._prepend(blocks - num_full)
        own = num_full - (prefix.blocks if prefix else 0)
        kept = None
        if is_kept and own:
            kept = Prefix(_KEPT, own)
            self._queue_up(kept)
        else:
            self._append(own)
        if prefix is not None:
            self._leave(prefix)
        return kept

    def take_back(self, kept: Prefix) -> int:
        """Take what is left of `kept` out of the queue; how many blocks that is."""
        if kept.run is not None:
            self._withdraw(kept)
        return kept.blocks

    def _leave(self, prefix: Prefix) -> None:
        prefix.num_users -= 1
        if prefix.num_users:
            return
        if prefix.blocks:
            self._queue_up(prefix)
        else:
            del self._prefixes[prefix.key]

    def _queue_up(self, prefix: Prefix) -> None:
        prefix.run = _Run(prefix.blocks, prefix)
        self._queue.append(prefix.run)
        self.free += prefix.blocks

    def _withdraw(self, prefix: Prefix) -> None:
        assert prefix.run is not None
        prefix.run.blocks = 0
        prefix.run.prefix = None
        prefix.run = None
        self.free -= prefix.blocks

    def _append(self, blocks: int) -> None:
        if not blocks:
            return
        self.free += blocks
        if self._queue and self._queue[-1].prefix is None:
            self._queue[-1].blocks += blocks
        else:
            self._queue.append(_Run(blocks))

    def _prepend(self, blocks: int) -> None:
        if not blocks:
            return
        self.free += blocks
        if self._queue and self._queue[0].prefix is None:
            self._queue[0].blocks += blocks
        else:
            self._queue.appendleft(_Run(blocks))

    def _forget(self, prefix: Prefix, blocks: int) -> None:
        prefix.blocks -= blocks
        if not prefix.blocks:
            prefix.run = None
            self._prefixes.pop(prefix.key, None)


# --- The adapters that an engine holds: slots on the GPU over a cache in CPU memory.
#
# Both are least-recently-used, as in vLLM 0.32 (`lora/worker_manager.py`,
# `LRUCacheWorkerLoRAManager.add_adapter`, and `lora/model_manager.py`): an adapter is read into
# the CPU cache before it gets a slot, an adapter that leaves the CPU cache loses its slot too,
# and each use refreshes both.


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
