"""The next steps of an engine in which no request comes, ends or lacks a block.

In them only time, KV and blocks change. So they are computed in one go before anyone asks, and
taken when the engine gets there, unless something happens to it first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.scheduler import Scheduler

MAX_STEPS = 32
"""Steps computed at once: mostly, the next request comes before more have passed."""


class StepsAhead:
    """The steps that follow from the present state, one of which begins at `now`.

    Attributes:
        begins_s: When each of them begins, and at last when the last of them ends.
        free_blocks: Free blocks at each of these times.
        num_taken: Of those that the engine has taken.
    """

    __slots__ = ("begins_s", "free_blocks", "num_taken")

    def __init__(
        self, scheduler: Scheduler, profile: EngineProfile, *, num_adapters: int, now: float
    ) -> None:
        # The arithmetic on floats is that of `forward_s`, in the same order, so that the result
        # equals single steps to the last bit.
        decoders, block_tokens = scheduler.decoders, profile.block_tokens
        first = decoders.tick
        last = min(decoders.next_end - 1, first + MAX_STEPS)
        count, kv_tokens, residues = decoders.count, decoders.kv_tokens, decoders.residues
        fixed_s = profile.step_s + profile.step_per_decode_s * count
        per_kv_token_s, factor = profile.step_per_kv_token_s, profile.lora_factor(num_adapters)
        free = scheduler.pool.free
        self.begins_s, self.free_blocks, self.num_taken = [now], [free], 0
        for tick in range(first, last):
            free -= residues[-tick % block_tokens]
            if free < 0:
                break
            kv_tokens += count
            now += (fixed_s + per_kv_token_s * kv_tokens) * factor
            self.begins_s.append(now)
            self.free_blocks.append(free)

    @property
    def num_left(self) -> int:
        """Steps that the engine has not taken."""
        return len(self.begins_s) - 1 - self.num_taken

    def num_before(self, until: float) -> int:
        """Return how many steps, taken ones included, begin before `until`."""
        return min(bisect_left(self.begins_s, until), len(self.begins_s) - 1)

    def shown(self, now: float) -> tuple[float, int, int] | None:
        """Return the end of the last step that has ended by `now`, the free blocks then, and how
        many steps it is after the last that was taken.

        None if that is one which the engine has taken, and so shows itself.
        """
        index = bisect_right(self.begins_s, now) - 1
        if index <= self.num_taken:
            return None
        return self.begins_s[index], self.free_blocks[index], index - self.num_taken
