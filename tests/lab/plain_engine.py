"""The engine's rules written out plainly: every block, every sequence, every step by itself.

Slow and simple; the oracle for `extproc.lab.engine.engine`, with which it shares the records, the
costs and the adapter cache only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.lab.engine.caches import AdapterCache, AdapterLoad
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.records import EngineRequest, EngineStats, Step, Timeline

Content = tuple[str | None, str, int, int]
"""What a block can be found by: adapter, prefix, length of the prefix in blocks, position.

What one request alone can find has the request's id behind a dash for prefix, and for length how
often it was preempted before.
"""


class PlainBlocks:
    """Numbered blocks in a queue of free ones."""

    def __init__(self, size: int) -> None:
        self.queue = deque(range(size))
        self.users = [0] * size
        self.content: dict[int, Content] = {}
        self.found: dict[Content, int] = {}

    def cached(self, contents: list[Content]) -> list[int]:
        blocks = []
        for content in contents:
            if content not in self.found:
                break
            blocks.append(self.found[content])
        return blocks

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.users[block]:
                self.queue.remove(block)
            self.users[block] += 1

    def take(self) -> int:
        block = self.queue.popleft()
        if block in self.content:
            del self.found[self.content.pop(block)]
        self.users[block] = 1
        return block

    def name(self, block: int, content: Content) -> None:
        if self.content.get(block) == content:
            return
        if block in self.content:
            del self.found[self.content.pop(block)]
        if content not in self.found:
            self.content[block] = content
            self.found[content] = block

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self.content:
                self.queue.append(block)
            else:
                self.queue.appendleft(block)


@dataclass(eq=False)
class _State:
    request: EngineRequest
    submitted_s: float
    computed: int = 0
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0
    is_deferred: bool = False

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated

    def timeline(self, finished_s: float | None = None) -> Timeline:
        assert self.scheduled_s is not None
        assert self.first_token_s is not None
        return Timeline(
            self.request, self.submitted_s, self.scheduled_s, self.first_token_s, finished_s
        )


@dataclass
class _Batch:
    budget: int
    parts: list[tuple[_State, int]] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)


class PlainEngine:
    """As `Engine`, without `advance`."""

    def __init__(
        self,
        profile: EngineProfile,
        *,
        max_loras: int,
        max_cpu_loras: int,
        ranks: Mapping[str, int],
    ) -> None:
        self.profile = profile
        self.max_loras = max_loras
        self.kv_blocks = profile.kv_blocks(max_loras, 16)
        self.cache = AdapterCache(max_loras, max_cpu_loras)
        self.ranks = ranks
        self.blocks = PlainBlocks(self.kv_blocks)
        self.running: list[_State] = []
        self.waiting: list[_State] = []

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_deferred=sum(state.is_deferred for state in self.waiting),
            kv_usage_ratio=1 - len(self.blocks.queue) / self.kv_blocks,
        )

    def submit(self, request: EngineRequest, *, now: float) -> None:
        self.waiting.append(_State(request, now))

    def abort(self, request_id: str) -> None:
        for states in (self.waiting, self.running):
            for state in [state for state in states if state.request.id == request_id]:
                states.remove(state)
                self.blocks.free(state.blocks)

    def load_adapter(self, adapter: str) -> float:
        load = self.cache.use(adapter)
        return self._load_s(load) if load else 0

    def step(self, *, now: float) -> Step | None:
        if not self.running and not self.waiting:
            return None
        batch = _Batch(self.profile.max_num_batched_tokens)
        self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, now)
        found = dict.fromkeys(state.request.adapter for state, _ in batch.parts)
        adapters = tuple(adapter for adapter in found if adapter is not None)
        loads = tuple(load for load in map(self.cache.use, adapters) if load)
        decoding = [s for s, _ in batch.parts if s.generated and s.computed + 1 == s.num_tokens]
        prefill_tokens = sum(tokens for s, tokens in batch.parts if s not in decoding)
        duration_s = sum(map(self._load_s, loads)) + self.profile.forward_s(
            num_decoding=len(decoding),
            kv_tokens=sum(state.computed + tokens for state, tokens in batch.parts),
            prefill_tokens=prefill_tokens,
            num_adapters=len(adapters),
        )
        tokens, first_tokens, finished = self._compute(batch, now + duration_s)
        return Step(
            started_s=now,
            duration_s=duration_s,
            tokens=tuple(tokens),
            first_tokens=tuple(first_tokens),
            finished=tuple(finished),
            preempted=tuple(batch.preempted),
            adapters=adapters,
            loads=loads,
            prefill_tokens=prefill_tokens,
            num_decoding=len(decoding),
            stats=self.stats,
        )

    def _schedule_running(self, batch: _Batch) -> None:
        index = 0
        while index < len(self.running) and batch.budget:
            state = self.running[index]
            tokens = min(state.num_tokens - state.computed, batch.budget)
            needed = self._num_blocks(state.computed + tokens) - len(state.blocks)
            while needed > len(self.blocks.queue):
                victim = self.running.pop()
                self._preempt(victim, batch)
                if victim is state:
                    return
            self._take(state, tokens, batch)
            index += 1

    def _preempt(self, state: _State, batch: _Batch) -> None:
        self.blocks.free(state.blocks)
        state.blocks = []
        state.computed = 0
        state.num_preemptions += 1
        state.is_deferred = False
        self.waiting.insert(0, state)
        batch.preempted.append(state.request)

    def _admit(self, batch: _Batch, now: float) -> None:
        kept: list[_State] = []
        while self.waiting:
            state = self.waiting[0]
            adapter = state.request.adapter
            adapters = {running.request.adapter for running in self.running} - {None}
            if not batch.budget or len(self.running) == self.profile.max_num_seqs:
                break
            if adapter is not None and adapter not in adapters and len(adapters) == self.max_loras:
                state.is_deferred = True
                kept.append(self.waiting.pop(0))
                continue
            cached = self.blocks.cached(self._contents(state, state.num_preemptions - 1))
            unused = sum(not self.blocks.users[block] for block in cached)
            new = self._num_blocks(state.num_tokens) - len(cached)
            if new + unused > len(self.blocks.queue):
                break
            self.waiting.pop(0)
            self._start(state, cached, batch, now)
        self.waiting = kept + self.waiting

    def _start(self, state: _State, cached: list[int], batch: _Batch, now: float) -> None:
        self.blocks.share(cached)
        state.blocks = cached
        state.computed = len(cached) * self.profile.block_tokens
        if state.scheduled_s is None:
            state.scheduled_s = now
        self.running.append(state)
        self._take(state, min(state.num_tokens - state.computed, batch.budget), batch)

    def _take(self, state: _State, tokens: int, batch: _Batch) -> None:
        while len(state.blocks) < self._num_blocks(state.computed + tokens):
            state.blocks.append(self.blocks.take())
        full = (state.computed + tokens) // self.profile.block_tokens
        contents = self._contents(state, state.num_preemptions)
        for block, content in zip(state.blocks[:full], contents, strict=False):
            self.blocks.name(block, content)
        batch.parts.append((state, tokens))
        batch.budget -= tokens

    def _contents(self, state: _State, num_preemptions: int) -> list[Content]:
        request, block_tokens = state.request, self.profile.block_tokens
        tokens = min(request.prefix_tokens, request.prompt_tokens - 1) if request.prefix else 0
        length, own = tokens // block_tokens, f"-{request.id}"
        return [
            *((request.adapter, request.prefix, length, index) for index in range(length)),
            *(
                (request.adapter, own, num_preemptions, index)
                for index in range(length, state.num_tokens // block_tokens)
            ),
        ]

    def _compute(
        self, batch: _Batch, ended_s: float
    ) -> tuple[list[EngineRequest], list[Timeline], list[Timeline]]:
        tokens: list[EngineRequest] = []
        first_tokens: list[Timeline] = []
        finished: list[Timeline] = []
        for state, computed in batch.parts:
            state.computed += computed
            if state.computed < state.num_tokens:
                continue
            if state.request.output_tokens:
                state.generated += 1
                tokens.append(state.request)
            if state.first_token_s is None:
                state.first_token_s = ended_s
                first_tokens.append(state.timeline())
            if state.generated == state.request.output_tokens:
                finished.append(state.timeline(ended_s))
                self.running.remove(state)
                self.blocks.free(state.blocks)
        return tokens, first_tokens, finished

    def _load_s(self, load: AdapterLoad) -> float:
        return self.profile.load_s(self.ranks.get(load.adapter, 16), is_from_disk=load.is_from_disk)

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)
