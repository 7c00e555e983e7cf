"""Requests inside the engine, and the decoding ones among them kept as sums.

A sequence that decodes does the same in every step: one token more of KV and of answer. So the
engine does not touch it: it counts ticks (steps), and a sequence knows the tick at which it began
to decode. What a step must know of all of them together, how many there are, how much KV they
have, how many need a new block now and who ends now, is kept up to date in `Decoders`.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from extproc.sim.engine.blocks import FreeRun
from extproc.sim.engine.records import EngineRequest, Timeline


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. `computed` tokens have their KV.

    Attributes:
        request: What was submitted.
        submitted_s: When.
        order: Its place: in the queue while it waits, in the batch while it runs.
        computed: Tokens that have their KV; while it decodes, those at tick `joined`.
        generated: Tokens of the answer; while it decodes, those at tick `joined`.
        joined: Tick at which it began to decode; None while it does not.
        kept: Its KV when it was preempted, as far as it is still there; None if it was not.
        is_running: In the batch, not in the queue.
        is_deferred: Skipped for want of a slot since it was queued.
        scheduled_s: Start of the first step that ran it.
        first_token_s: End of the step with its first token.
    """

    request: EngineRequest
    submitted_s: float
    order: int = 0
    computed: int = 0
    generated: int = 0
    joined: int | None = None
    kept: FreeRun | None = None
    is_running: bool = False
    is_deferred: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far; not to be asked while it decodes."""
        return self.request.prompt_tokens + self.generated

    def timeline(self, finished_s: float | None = None) -> Timeline:
        """What happened to it; it has its first token."""
        assert self.scheduled_s is not None
        assert self.first_token_s is not None
        return Timeline(
            self.request, self.submitted_s, self.scheduled_s, self.first_token_s, finished_s
        )


class Decoders:
    """The decoding sequences of a batch.

    Attributes:
        count: How many.
        kv_tokens: Their KV, tokens.
        tick: Steps so far.
    """

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.kv_tokens = 0
        self.tick = 0
        self._block_tokens = block_tokens
        # How many sequences have `computed - tick` equal to each value modulo the block: constant
        # while they decode.
        self.residues = [0] * block_tokens
        self._ending: dict[int, list[Sequence]] = {}
        self._ends: list[int] = []

    @property
    def blocks_needed(self) -> int:
        """Blocks that the next tick allocates."""
        return self.residues[-self.tick % self._block_tokens]

    @property
    def next_end(self) -> int:
        """No sequence ends before this tick; there is at least one."""
        return self._ends[0]

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the next tick allocates one for `sequence`."""
        assert sequence.joined is not None
        return (sequence.computed - sequence.joined + self.tick) % self._block_tokens == 0

    def join(self, sequence: Sequence) -> None:
        """`sequence` decodes from the next tick on."""
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
        """Take `sequence` out, its counts brought up to date."""
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
        """Let `ticks` pass, of which only the last may end sequences; those, in batch order."""
        self.tick += ticks
        self.kv_tokens += self.count * ticks
        ended = self._ending.pop(self.tick, [])
        while self._ends and self._ends[0] <= self.tick:
            heappop(self._ends)
        return sorted(ended, key=lambda sequence: sequence.order)

    def _end(self, sequence: Sequence) -> int:
        assert sequence.joined is not None
        return sequence.joined + sequence.request.output_tokens - sequence.generated
