"""The KV cache of one engine, as counts of blocks.

As vLLM 0.32 does it (`v1/core/block_pool.py`, `v1/core/kv_cache_manager.py`):

1. Free blocks stand in a queue. Allocation takes from its head. Freed blocks go to its tail, except
   those that are not full, whose content cannot be found again: they go to its head.
2. A full block keeps its content until it is allocated again, so a preempted request finds the
   blocks that it lost and nobody has allocated since.
3. A request's blocks are freed last one first, so that the end of its sequence is lost before its
   beginning.

One simplification: requests do not find each other's blocks (vLLM shares equal beginnings of
prompts under the same adapter). No workload here has prompts that begin alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class FreeRun:
    """Neighbours in the queue of free blocks.

    Attributes:
        blocks: How many are left.
        is_kept: Whether they hold what one preempted sequence can find again.
    """

    blocks: int
    is_kept: bool = False


class BlockPool:
    """All KV blocks of an engine.

    Attributes:
        size: Blocks in all.
        free: Blocks that nobody uses.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._queue = deque([FreeRun(size)])

    def allocate(self, blocks: int) -> None:
        """Allocate `blocks` free ones; the caller has checked that there are as many."""
        self.free -= blocks
        while blocks:
            run = self._queue[0]
            taken = min(blocks, run.blocks)
            run.blocks -= taken
            blocks -= taken
            if not run.blocks:
                self._queue.popleft()

    def release(self, blocks: int, num_full: int, *, is_kept: bool = False) -> FreeRun | None:
        """Free a sequence of `blocks`, of which the first `num_full` are full.

        Returns:
            If `is_kept`, the full ones, for `take_back`.
        """
        self.free += blocks
        if blocks > num_full:
            self._queue.appendleft(FreeRun(blocks - num_full))
        if not num_full:
            return None
        if not is_kept and self._queue and not self._queue[-1].is_kept:
            self._queue[-1].blocks += num_full
            return None
        run = FreeRun(num_full, is_kept)
        self._queue.append(run)
        return run if is_kept else None

    def take_back(self, kept: FreeRun) -> int:
        """Allocate what is left of `kept`, and return how many blocks that is."""
        blocks, kept.blocks, kept.is_kept = kept.blocks, 0, False
        self.free -= blocks
        return blocks
