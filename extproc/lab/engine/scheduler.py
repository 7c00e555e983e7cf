"""vLLM's scheduler: the requests that a step computes, without time costs and adapter caches.

The rules are in `extproc.lab.engine.engine`. A step touches only the requests that come, end or
compute prompts. The decoding ones are sums (`Decoders`), of whom every one gets its token in every
step, since a step's budget covers `max_num_seqs`. So a prefill that was cut by the budget is alone,
and it is the newest of the batch.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from extproc.lab.engine.caches import BlockPool, Prefix
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.records import EngineRequest, EngineStats, Timeline
from extproc.lab.engine.sequences import Decoders, Sequence, WaitingQueue


class Batch(Struct):
    """One step: all decoding sequences, and chunks of prompts.

    Attributes:
        budget: Tokens that may still be added.
        num_decoding: Sequences that compute one token after their prefill.
        kv_tokens: KV of the batch with this step's tokens.
        num_generated_tokens: After the step: tokens that it produced.
        chunks: (sequence, tokens) of those that do more than decode.
        tokens: After a detailed step: requests that got a token.
        first_tokens: After the step: requests with their first token or the end of their prefill.
    """

    budget: int
    num_decoding: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    num_generated_tokens: int = 0
    chunks: list[tuple[Sequence, int]] = []
    preempted: list[EngineRequest] = []
    tokens: list[EngineRequest] = []
    first_tokens: list[Timeline] = []
    finished: list[Timeline] = []

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Add `tokens` of `sequence` to the step."""
        if sequence.generated and sequence.computed + 1 == sequence.num_tokens:
            self.num_decoding += 1
        else:
            self.prefill_tokens += tokens
        self.kv_tokens += sequence.computed + tokens
        self.budget -= tokens
        self.chunks.append((sequence, tokens))


class Scheduler:
    """The requests of one engine.

    Args:
        profile: Limits; its costs play no part.
        kv_blocks: Blocks of the KV cache.
        max_loras: Distinct adapters that may run at once.

    Attributes:
        sequences: The unfinished requests by id.
        running: The batch, oldest first.
        decoders: The part of the batch that decodes.
        pool: The KV cache.
        is_regrouped: Set by each change of the batch, reset by the engine.
    """

    def __init__(self, profile: EngineProfile, *, kv_blocks: int, max_loras: int) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[Sequence, None] = {}
        self.waiting = WaitingQueue()
        self.decoders = Decoders(profile.block_tokens)
        self.pool = BlockPool(kv_blocks)
        self.is_regrouped = False
        self._profile = profile
        self._max_loras = max_loras
        self._block_tokens = profile.block_tokens
        self._num_by_adapter: dict[str, int] = {}
        self._cut: Sequence | None = None  # the running one whose prompt is not all computed
        # True if nothing that waits can be admitted before something comes, ends or is preempted.
        self._is_blocked = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Distinct adapters of the batch, in its order."""
        found = dict.fromkeys([sequence.request.adapter for sequence in self.running])
        return tuple(adapter for adapter in found if adapter is not None)

    @property
    def is_steady(self) -> bool:
        """Whether the next step can only decode: no prompt to compute, no request to admit."""
        return (
            self._cut is None
            and self.decoders.count > 0
            and (self._is_blocked or not self.waiting.size)
        )

    def stats(self, free_blocks: int) -> EngineStats:
        """Return the gauges, if `free_blocks` are free."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=self.waiting.size,
            num_deferred=self.waiting.num_deferred,
            kv_usage_ratio=1 - free_blocks / self.pool.size,
        )

    def submit(self, request: EngineRequest, *, now: float) -> None:
        """Queue a request whose id is not in use."""
        sequence = self.sequences[request.id] = Sequence(request, now)
        self.waiting.append(sequence)
        self._is_blocked = False

    def abort(self, request_id: str) -> Sequence | None:
        """Drop and return a request; None if it is unknown or finished."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.is_running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self._is_blocked = False
        return sequence

    def schedule(self, *, now: float) -> Batch:
        """Return the step that begins at `now`."""
        batch = Batch(self._profile.max_num_batched_tokens)
        self._grow(batch)
        if self._cut is not None:
            self._continue(self._cut, batch)
        if not batch.preempted and not self._is_blocked:
            if self.waiting.size:
                self._admit(batch, now)
            else:
                self._is_blocked = True
        return batch

    def complete(self, batch: Batch, *, ended_s: float, is_detailed: bool = False) -> None:
        """Record the end of the step of `batch` at `ended_s`.

        If `is_detailed`, fill in `batch.tokens`, which takes time for each sequence.
        """
        if is_detailed:
            decoding = (s.request for s in self.running if s.joined is not None)
            batch.tokens.extend(decoding)
        batch.num_generated_tokens = self.decoders.count
        for sequence in self.decoders.advance():
            self._finish(sequence, batch, ended_s)
        for sequence, tokens in batch.chunks:
            self._compute(sequence, tokens, batch, ended_s)

    def _compute(self, sequence: Sequence, tokens: int, batch: Batch, ended_s: float) -> None:
        sequence.computed += tokens
        if sequence.computed < sequence.num_tokens:
            self._cut = sequence
            return
        if self._cut is sequence:
            self._cut = None
        output_tokens = sequence.request.output_tokens
        if output_tokens:
            sequence.generated += 1
            batch.num_generated_tokens += 1
            batch.tokens.append(sequence.request)
        if sequence.first_token_s is None:
            sequence.first_token_s = ended_s
            batch.first_tokens.append(sequence.timeline())
        if sequence.generated == output_tokens:
            self._finish(sequence, batch, ended_s)
        else:
            self.decoders.join(sequence)

    def _grow(self, batch: Batch) -> None:
        """Give every decoding sequence its block, preempting the newest where there is none."""
        decoders, pool = self.decoders, self.pool
        needed = decoders.blocks_needed
        if needed <= pool.free:
            pool.allocate(needed)
        else:
            self._grow_each(batch)
        batch.num_decoding = decoders.count
        batch.kv_tokens = decoders.kv_tokens + decoders.count
        batch.budget -= decoders.count

    def _grow_each(self, batch: Batch) -> None:
        decoding = (s for s in self.running if s.joined is not None)
        for sequence in [s for s in decoding if self.decoders.needs_block(s)]:
            while sequence.is_running and not self.pool.free:
                self._preempt(next(reversed(self.running)), batch)
            if not sequence.is_running:  # and so neither is any newer one
                return
            self.pool.allocate(1)

    def _continue(self, sequence: Sequence, batch: Batch) -> None:
        """Compute the next chunk of the prompt that was cut."""
        tokens = min(sequence.num_tokens - sequence.computed, batch.budget)
        needed = self._blocks(sequence.computed + tokens) - self._blocks(sequence.computed)
        if needed > self.pool.free:
            self._preempt(sequence, batch)
            return
        self.pool.allocate(needed)
        self._take(sequence, tokens, batch)

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        sequence.kept = self._leave(sequence, is_kept=True)
        sequence.is_running = False
        sequence.computed = 0
        self.waiting.put_back(sequence)
        batch.preempted.append(sequence.request)

    def _admit(self, batch: Batch, now: float) -> None:
        """Admit the requests that may run. Requests before the place where that ends were
        skipped.
        """
        self._is_blocked = True
        while len(self.running) < self._profile.max_num_seqs:
            if not batch.budget:
                self._is_blocked = False
                return
            is_full = len(self._num_by_adapter) >= self._max_loras
            sequence = self.waiting.first(self._num_by_adapter if is_full else None)
            if sequence is None:
                self.waiting.defer(inf)
                return
            self.waiting.defer(sequence.order)
            if not self._has_room(sequence):
                return
            self._start(sequence, batch, now)

    def _has_room(self, sequence: Sequence) -> bool:
        blocks = self._blocks(sequence.num_tokens)
        return (
            self.pool.cost(blocks, sequence.request.prefix_key(self._block_tokens))
            <= self.pool.free
        )

    def _start(self, sequence: Sequence, batch: Batch, now: float) -> None:
        self.waiting.remove(sequence)
        self.running[sequence] = None
        self.is_regrouped = True
        sequence.is_running = True
        self._find_prefix(sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now
        tokens = min(sequence.num_tokens - sequence.computed, batch.budget)
        self.pool.allocate(
            self._blocks(sequence.computed + tokens) - self._blocks(sequence.computed)
        )
        self._take(sequence, tokens, batch)
        adapter = sequence.request.adapter
        if adapter is not None:
            self._num_by_adapter[adapter] = self._num_by_adapter.get(adapter, 0) + 1

    def _find_prefix(self, sequence: Sequence) -> None:
        key = sequence.request.prefix_key(self._block_tokens)
        wanted = found = 0
        if key is not None:
            sequence.prefix = self.pool.hold(key)
            wanted, found = key[2], sequence.prefix.blocks
        if sequence.kept is not None and found == wanted:
            found += self.pool.take_back(sequence.kept)
        sequence.kept = None
        sequence.computed = found * self._block_tokens

    def _take(self, sequence: Sequence, tokens: int, batch: Batch) -> None:
        batch.add(sequence, tokens)
        if sequence.prefix is not None:
            full = (sequence.computed + tokens) // self._block_tokens
            sequence.prefix.blocks = min(sequence.prefix.key[2], full)

    def _finish(self, sequence: Sequence, batch: Batch, ended_s: float) -> None:
        batch.finished.append(sequence.timeline(ended_s))
        del self.sequences[sequence.request.id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence, *, is_kept: bool = False) -> Prefix | None:
        """Take a running sequence out of the batch, and its KV with it: `BlockPool.release`."""
        if sequence.joined is not None:
            self.decoders.leave(sequence)
        if self._cut is sequence:
            self._cut = None
        del self.running[sequence]
        self.is_regrouped = True
        self._is_blocked = False
        blocks, num_full = self._blocks(sequence.computed), sequence.computed // self._block_tokens
        kept = self.pool.release(blocks, num_full, sequence.prefix, is_kept=is_kept)
        sequence.prefix = None
        adapter = sequence.request.adapter
        if adapter is not None:
            self._num_by_adapter[adapter] -= 1
            if not self._num_by_adapter[adapter]:
                del self._num_by_adapter[adapter]
        return kept

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
