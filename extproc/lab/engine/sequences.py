"""Requests inside the engine, and the decoding ones among them kept as sums.

A sequence that decodes does the same in every step: one more token of KV and of output. So the
engine does not touch it: it counts ticks (steps), and a sequence has the tick at which it began to
decode. `Decoders` maintains the totals that a step needs: their number, their KV, how many need a
new block now, and which end now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from extproc.lab.engine.caches import Prefix
from extproc.lab.engine.records import EngineRequest, Timeline


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine.

    Attributes:
        order: Its place: in the queue while it waits, in the batch while it runs.
        computed: Tokens that have their KV; while it decodes, those at tick `joined`.
        generated: Tokens of output; while it decodes, those at tick `joined`.
        joined: Tick at which it began to decode; None while it does not.
        prefix: The shared part of its KV; None while it holds none.
        kept: The rest of its KV if it was preempted.
        is_running: In the batch, not in the queue.
        is_deferred: It was skipped for want of a slot since it was queued.
        scheduled_s: Start of the first step that ran it.
        first_token_s: End of the step with its first token.
    """

    request: EngineRequest
    submitted_s: float
    order: int = 0
    computed: int = 0
    generated: int = 0
    joined: int | None = None
    prefix: Prefix | None = None
    kept: Prefix | None = None
    is_running: bool = False
    is_deferred: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far; not valid while it decodes."""
        return self.request.prompt_tokens + self.generated

    def timeline(self, finished_s: float | None = None) -> Timeline:
        """Return its times; it has its first token."""
        assert self.scheduled_s is not None
        assert self.first_token_s is not None
        return Timeline(
            self.request, self.submitted_s, self.scheduled_s, self.first_token_s, finished_s
        )


class Decoders:
    """The decoding sequences of a batch.

    Attributes:
        count: Number of sequences.
        kv_tokens: Their KV, tokens.
        tick: Steps so far.
        residues: How many sequences have `computed - tick` equal to each value modulo the block:
            constant while they decode.
    """

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.kv_tokens = 0
        self.tick = 0
        self._block_tokens = block_tokens
        self.residues = [0] * block_tokens
        self._ending: dict[int, list[Sequence]] = {}
        self._ends: list[int] = []

    @property
    def blocks_needed(self) -> int:
        """The number of blocks that the next tick allocates."""
        return self.residues[-self.tick % self._block_tokens]

    @property
    def next_end(self) -> int:
        """The tick of the next end; there is at least one sequence."""
        return self._ends[0]

    def needs_block(self, sequence: Sequence) -> bool:
        """Return whether the next tick allocates a block for `sequence`."""
        assert sequence.joined is not None
        return (sequence.computed - sequence.joined + self.tick) % self._block_tokens == 0

    def join(self, sequence: Sequence) -> None:
        """Let `sequence` decode from the next tick on."""
        sequence.joined = self.tick
        self.count += 1
        self.kv_tokens += sequence.computed
        self.residues[(sequence.computed - self.tick) % self._block_tokens] += 1
        end = self._end(sequence)
        if end not in self._ending:
            self._ending[end] = []
            heappush(self._ends, end)
        self._ending[end].append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove `sequence` and update its counts."""
        assert sequence.joined is not None
        end = self._end(sequence)
        if end in self._ending:
            self._ending[end].remove(sequence)
        passed = self.tick - sequence.joined
        self.residues[(sequence.computed - sequence.joined) % self._block_tokens] -= 1
        sequence.computed += passed
        sequence.generated += passed
        sequence.joined = None
        self.count -= 1
        self.kv_tokens -= sequence.computed

    def advance(self, ticks: int = 1) -> list[Sequence]:
        """Let `ticks` pass, of which only the last may end sequences; return those in order."""
        self.tick += ticks
        self.kv_tokens += self.count * ticks
        while self._ends and self._ends[0] <= self.tick:
            heappop(self._ends)
        ended = self._ending.pop(self.tick, None)
        return sorted(ended, key=lambda sequence: sequence.order) if ended else []

    def _end(self, sequence: Sequence) -> int:
        assert sequence.joined is not None
        return sequence.joined + sequence.request.output_tokens - sequence.generated


# --- The queue of one engine, in front of its gate of adapter slots.
#
# The queue is kept by adapter, so that finding the first request that may run takes time
# proportional to the running adapters, however many requests wait.


class WaitingQueue:
    """Sequences in order: `size` of them, of whom `num_deferred` were skipped since they came."""

    def __init__(self) -> None:
        self.num_deferred = 0
        self._queues: dict[str | None, deque[Sequence]] = {}
        self.size = 0
        self._first = 0
        self._last = 0
        # Both may hold sequences that have left (`_is_here` says so): the order over all adapters,
        # and those not yet marked as deferred, in order.
        self._heap: list[tuple[int, Sequence]] = []
        self._unmarked: deque[tuple[int, Sequence]] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        every = [sequence for queue in self._queues.values() for sequence in queue]
        return iter(sorted(every, key=lambda sequence: sequence.order))

    def append(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._last += 1
        sequence.order = self._last
        self._queues.setdefault(sequence.request.adapter, deque()).append(sequence)
        self._unmarked.append((sequence.order, sequence))
        self._enter(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence at the head."""
        self._first -= 1
        sequence.order = self._first
        self._queues.setdefault(sequence.request.adapter, deque()).appendleft(sequence)
        self._unmarked.appendleft((sequence.order, sequence))
        self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence` from anywhere."""
        adapter = sequence.request.adapter
        queue = self._queues[adapter]
        queue.remove(sequence)
        if not queue:
            del self._queues[adapter]
        self.size -= 1
        self.num_deferred -= sequence.is_deferred
        sequence.order = 0
        if not self.size:
            self._heap.clear()
            self._unmarked.clear()

    def first(self, passing: Collection[str] | None) -> Sequence | None:
        """Return the first sequence that may run.

        Args:
            passing: Adapters that pass the gate like the base model; None for every one.
        """
        if passing is None:
            while self._heap and not _is_here(*self._heap[0]):
                heappop(self._heap)
            return self._heap[0][1] if self._heap else None
        found = self._queues.get(None)
        best = found[0] if found else None
        for adapter in passing:
            queue = self._queues.get(adapter)
            if queue and (best is None or queue[0].order < best.order):
                best = queue[0]
        return best

    def defer(self, before: float) -> None:
        """Mark as skipped what stands before place `before`, which may be infinite."""
        unmarked = self._unmarked
        while unmarked and unmarked[0][0] < before:
            order, sequence = unmarked.popleft()
            if _is_here(order, sequence):
                sequence.is_deferred = True
                self.num_deferred += 1

    def _enter(self, sequence: Sequence) -> None:
        sequence.is_deferred = False
        self.size += 1
        heappush(self._heap, (sequence.order, sequence))


def _is_here(order: int, sequence: Sequence) -> bool:
    return not sequence.is_running and sequence.order == order
