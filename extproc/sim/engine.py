"""A model of one vLLM engine, step by step, without a clock.

The caller owns time: it submits and aborts requests between steps, calls `step(now=...)`, and lets
`Step.duration_s` pass before it uses what the step answered. So one class serves virtual time and
real time. The rules are those of vLLM 0.32 (`v1/core/sched/scheduler.py`):

1. A step first serves the running requests in their order, then admits waiting ones, until the
   token budget, the number of sequences or the KV cache ends it. Prefills are cut to the budget.
2. A running request that finds no free KV block preempts the last running one, which loses its KV
   and goes to the head of the queue. A step that preempted admits nothing.
3. At most `max_loras` distinct adapters run at once. A waiting request whose adapter does not fit
   is skipped, not blocking those behind it; the base model is never held back. What is resident
   plays no part in this.
4. A waiting request is admitted only if its whole sequence so far fits into the free blocks.
5. The adapters of the batch are brought onto the GPU before the forward pass; the batch waits.

Two simplifications: there is no prefix cache, and the adapters of a batch are placed in the
batch's order (vLLM iterates over a set, an order that differs between processes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.sim.lru import AdapterCache, AdapterLoad
from extproc.sim.profiles import EngineProfile
from extproc.sim.records import EngineCounters, EngineRequest, EngineStats, Step, Timeline


@dataclass(slots=True, eq=False)
class _State:
    """A request inside the engine. `computed` tokens have their KV in `blocks` blocks."""

    request: EngineRequest
    submitted_s: float
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0
    is_deferred: bool = False

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


@dataclass(slots=True)
class _Batch:
    """One step while it is being put together."""

    budget: int
    parts: list[tuple[_State, int]] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    prefill_tokens: int = 0
    num_decoding: int = 0
    kv_tokens: int = 0

    def add(self, state: _State, tokens: int) -> None:
        if state.generated and state.computed + 1 == state.num_tokens:
            self.num_decoding += 1
        else:
            self.prefill_tokens += tokens
        self.kv_tokens += state.computed + tokens
        self.budget -= tokens
        self.parts.append((state, tokens))


class Engine:
    """One engine.

    Args:
        profile: Costs and limits.
        max_loras: Adapter slots on the GPU; 0 for an engine without LoRA.
        max_cpu_loras: Places in the CPU cache; `max_loras` by default, as in vLLM.
        max_lora_rank: The rank that every slot is allocated for.
        ranks: Rank of each adapter; one that is not named has `max_lora_rank`.

    Raises:
        ValueError: vLLM would not start with these sizes.
    """

    def __init__(
        self,
        profile: EngineProfile,
        *,
        max_loras: int = 4,
        max_cpu_loras: int | None = None,
        max_lora_rank: int = 16,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        self.profile = profile
        self.max_loras = max_loras
        self.max_lora_rank = max_lora_rank
        self.kv_blocks = profile.kv_blocks(max_loras, max_lora_rank)
        self.counters = EngineCounters()
        cpu = max_loras if max_cpu_loras is None else max_cpu_loras
        self._cache = AdapterCache(max_loras, cpu) if max_loras else None
        self._ranks = dict(ranks or {})
        self._free_blocks = self.kv_blocks
        self._running: list[_State] = []
        self._waiting: list[_State] = []
        self._states: dict[str, _State] = {}
        self._num_deferred = 0

    @property
    def running(self) -> tuple[EngineRequest, ...]:
        """The running batch, oldest first."""
        return tuple(state.request for state in self._running)

    @property
    def waiting(self) -> tuple[EngineRequest, ...]:
        """The queue, head first."""
        return tuple(state.request for state in self._waiting)

    @property
    def gpu_adapters(self) -> tuple[str, ...]:
        """Adapters in GPU slots, most recently used first."""
        return self._cache.gpu if self._cache else ()

    @property
    def cpu_adapters(self) -> tuple[str, ...]:
        """Adapters in the CPU cache, most recently used first."""
        return self._cache.cpu if self._cache else ()

    @property
    def stats(self) -> EngineStats:
        """The gauges now."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_deferred=self._num_deferred,
            kv_usage_ratio=1 - self._free_blocks / self.kv_blocks,
        )

    def submit(self, request: EngineRequest, *, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: Its id is in use, it is longer than the model allows, it is empty, or it
                names an adapter where there are no slots.
        """
        length = request.prompt_tokens + request.output_tokens
        if request.id in self._states:
            raise ValueError(f"request {request.id!r} is unfinished")
        if request.prompt_tokens < 1 or request.output_tokens < 0:
            raise ValueError(f"request {request.id!r} has no prompt or a negative output")
        if length > self.profile.max_model_len:
            raise ValueError(f"{length} tokens exceed max_model_len")
        if request.adapter is not None and self._cache is None:
            raise ValueError("this engine has no adapter slots")
        state = _State(request, now)
        self._states[request.id] = state
        self._waiting.append(state)
        self.counters.num_submitted += 1

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is. False if it is unknown or finished."""
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        (self._waiting if state in self._waiting else self._running).remove(state)
        self._undefer(state)
        self._free(state)
        self.counters.num_aborted += 1
        return True

    def set_rank(self, adapter: str, rank: int) -> None:
        """Say which rank `adapter` has.

        Raises:
            ValueError: `rank` exceeds `max_lora_rank`.
        """
        if rank > self.max_lora_rank:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}")
        self._ranks[adapter] = rank

    def load_adapter(self, adapter: str, *, is_reload: bool = False) -> float:
        """Load `adapter` at the operator's request, between two steps.

        Args:
            adapter: Which.
            is_reload: Read it from disk again even if it is here.

        Returns:
            Seconds that the engine stands still for it.

        Raises:
            ValueError: The engine has no adapter slots.
        """
        if self._cache is None:
            raise ValueError("this engine has no adapter slots")
        if is_reload:
            self._cache.drop(adapter)
        return sum(self._load_s(load) for load in self._place([adapter]))

    def step(self, *, now: float) -> Step | None:
        """Run one step that begins at `now`. None if there is nothing to do.

        Afterwards the engine is in its state at the end of the step, `duration_s` later.
        """
        if not self._states:
            return None
        batch = _Batch(self.profile.max_num_batched_tokens)
        self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, now)
        found = {state.request.adapter: None for state, _ in batch.parts}
        adapters = tuple(adapter for adapter in found if adapter is not None)
        loads = self._place(adapters)
        duration_s = sum(map(self._load_s, loads)) + self.profile.forward_s(
            num_decoding=batch.num_decoding,
            kv_tokens=batch.kv_tokens,
            prefill_tokens=batch.prefill_tokens,
            num_adapters=len(adapters),
        )
        tokens, first_tokens, finished = self._advance(batch, now + duration_s)
        self.counters.num_steps += 1
        return Step(
            started_s=now,
            duration_s=duration_s,
            tokens=tokens,
            first_tokens=first_tokens,
            finished=finished,
            admitted=tuple(batch.admitted),
            preempted=tuple(batch.preempted),
            adapters=adapters,
            loads=loads,
            prefill_tokens=batch.prefill_tokens,
            num_decoding=batch.num_decoding,
            stats=self.stats,
        )

    def _schedule_running(self, batch: _Batch) -> None:
        index = 0
        while index < len(self._running) and batch.budget:
            state = self._running[index]
            tokens = min(state.num_tokens - state.computed, batch.budget)
            if not self._make_room(state, tokens, batch):
                return
            batch.add(state, tokens)
            index += 1

    def _make_room(self, state: _State, tokens: int, batch: _Batch) -> bool:
        """Allocate for `tokens` more. False if `state` itself had to be preempted."""
        needed = self._blocks(state.computed + tokens) - state.blocks
        while needed > self._free_blocks:
            victim = self._running.pop()
            self._preempt(victim)
            batch.preempted.append(victim.request)
            if victim is state:
                return False
        self._free_blocks -= needed
        state.blocks += needed
        return True

    def _preempt(self, state: _State) -> None:
        self._free(state)
        state.computed = 0
        state.num_preemptions += 1
        self._waiting.insert(0, state)
        self.counters.num_preemptions += 1

    def _admit(self, batch: _Batch, now: float) -> None:
        adapters = {s.request.adapter for s in self._running} - {None}
        kept: list[_State] = []
        index = 0
        for index, state in enumerate(self._waiting):  # noqa: B007 - read after the loop
            adapter = state.request.adapter
            if not batch.budget or len(self._running) == self.profile.max_num_seqs:
                break
            if adapter is not None and adapter not in adapters and len(adapters) == self.max_loras:
                self._defer(state)
                kept.append(state)
                continue
            if self._blocks(state.num_tokens) > self._free_blocks:
                break
            self._start(state, batch, now)
            if adapter is not None:
                adapters.add(adapter)
        else:
            index = len(self._waiting)
        if batch.admitted:
            self._waiting = kept + self._waiting[index:]

    def _start(self, state: _State, batch: _Batch, now: float) -> None:
        tokens = min(state.num_tokens, batch.budget)
        self._undefer(state)
        self._make_room(state, tokens, batch)
        self._running.append(state)
        if state.scheduled_s is None:
            state.scheduled_s = now
        batch.add(state, tokens)
        batch.admitted.append(state.request)

    def _place(self, adapters: tuple[str, ...] | list[str]) -> tuple[AdapterLoad, ...]:
        if self._cache is None:
            return ()
        loads = tuple(load for load in map(self._cache.use, adapters) if load)
        self.counters.num_gpu_loads += len(loads)
        self.counters.num_disk_loads += sum(load.is_from_disk for load in loads)
        return loads

    def _load_s(self, load: AdapterLoad) -> float:
        rank = self._ranks.get(load.adapter, self.max_lora_rank)
        return self.profile.load_s(rank, is_from_disk=load.is_from_disk)

    def _advance(
        self, batch: _Batch, ended_s: float
    ) -> tuple[tuple[EngineRequest, ...], tuple[Timeline, ...], tuple[Timeline, ...]]:
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
                first_tokens.append(_timeline(state))
            if state.generated == state.request.output_tokens:
                finished.append(_timeline(state, ended_s))
                self._finish(state)
        if finished:
            self._running = [s for s in self._running if s.request.id in self._states]
        return tuple(tokens), tuple(first_tokens), tuple(finished)

    def _finish(self, state: _State) -> None:
        del self._states[state.request.id]
        self._free(state)
        self.counters.num_finished += 1

    def _free(self, state: _State) -> None:
        self._free_blocks += state.blocks
        state.blocks = 0

    def _defer(self, state: _State) -> None:
        self._num_deferred += not state.is_deferred
        state.is_deferred = True

    def _undefer(self, state: _State) -> None:
        self._num_deferred -= state.is_deferred
        state.is_deferred = False

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)


def _timeline(state: _State, finished_s: float | None = None) -> Timeline:
    assert state.scheduled_s is not None
    assert state.first_token_s is not None
    return Timeline(
        request=state.request,
        submitted_s=state.submitted_s,
        scheduled_s=state.scheduled_s,
        first_token_s=state.first_token_s,
        finished_s=finished_s,
        num_preemptions=state.num_preemptions,
    )
