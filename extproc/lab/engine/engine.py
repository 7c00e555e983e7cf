"""A model of one vLLM engine, step by step, without a clock.

The caller keeps time. In real time it submits and aborts requests between steps, calls
`step(now=...)`, and lets `Step.duration_s` pass before it uses the step's results. In virtual
time it calls `advance(now=..., until=...)`, which takes the same steps, many at once. The rules are
those of vLLM 0.32 (`v1/core/sched/scheduler.py`):

1. A step first serves the running requests in their order, then admits waiting ones, until the
   token budget, the number of sequences or the KV cache ends it. Prefills are limited to the
   budget.
2. A running request that finds no free KV block preempts the last running one, which loses its KV
   and goes to the head of the queue. A step that preempted admits nothing.
3. At most `max_loras` distinct adapters run at once. A waiting request whose adapter does not fit
   is skipped, not blocking those behind it; the base model is never held back. Residency plays no
   part in this.
4. A waiting request is admitted only if its whole sequence so far fits into the free blocks.
5. The adapters of the batch are brought onto the GPU before the forward pass; the batch waits.

6. KV of a shared prefix is found again under the same adapter. A preempted request finds its own
   lost KV as far as nobody has allocated it (`extproc.lab.engine.caches`).

One simplification: the adapters of a batch are placed in the batch's order (vLLM iterates over a
set, an order that differs between processes).
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.lab.engine.activity import NEVER_S, Activity
from extproc.lab.engine.ahead import StepsAhead
from extproc.lab.engine.caches import AdapterCache, AdapterLoad, PrefixKey
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.records import (
    Advance,
    EngineCounters,
    EngineReport,
    EngineRequest,
    EngineStats,
    Step,
    Timeline,
)
from extproc.lab.engine.scheduler import Batch, Scheduler


class Engine:
    """One engine.

    Args:
        profile: Costs and limits.
        max_loras: Adapter slots on the GPU; 0 for an engine without LoRA.
        max_cpu_loras: Places in the CPU cache; `max_loras` by default, as in vLLM.
        max_lora_rank: The rank that every slot is allocated for.
        ranks: Rank of each adapter; `max_lora_rank` where missing.

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
        if profile.max_num_batched_tokens < profile.max_num_seqs:
            raise ValueError("max_num_batched_tokens is smaller than max_num_seqs")
        self.profile = profile
        self.max_loras = max_loras
        self.max_lora_rank = max_lora_rank
        self.kv_blocks = profile.kv_blocks(max_loras, max_lora_rank)
        self.counters = EngineCounters()
        cpu = max_loras if max_cpu_loras is None else max_cpu_loras
        self._cache = AdapterCache(max_loras, cpu) if max_loras else None
        self._ranks = dict(ranks or {})
        self._adapters: tuple[str, ...] = ()  # of the batch, in its order
        self._scheduler = Scheduler(profile, kv_blocks=self.kv_blocks, max_loras=max_loras)
        self._activity = Activity()
        self._ahead: StepsAhead | None = None

    @property
    def running(self) -> tuple[EngineRequest, ...]:
        """The running batch, oldest first."""
        return tuple(sequence.request for sequence in self._scheduler.running)

    @property
    def waiting(self) -> tuple[EngineRequest, ...]:
        """The queue, head first."""
        return tuple(sequence.request for sequence in self._scheduler.waiting)

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
        """The gauges at the end of the last step."""
        return self._scheduler.stats(self._scheduler.pool.free)

    @property
    def cached_prefixes(self) -> dict[PrefixKey, int]:
        """How many blocks of each shared prefix are in the KV cache."""
        return self._scheduler.pool.prefixes

    def generated_tokens(self, request_id: str) -> int:
        """Return how many tokens an unfinished request has generated.

        Raises:
            KeyError: It is unknown or finished.
        """
        sequence = self._scheduler.sequences[request_id]
        if sequence.joined is None:
            return sequence.generated
        return sequence.generated + self._scheduler.decoders.tick - sequence.joined

    @property
    def quiet_until_s(self) -> float:
        """Until when nothing but time, KV and blocks can change, unless something is done to it.

        Minus infinity if that is not known.
        """
        return self._ahead.begins_s[-1] if self._ahead else NEVER_S

    def change_profile(self, profile: EngineProfile) -> None:
        """Apply other costs from the next step on."""
        self.profile, self._ahead = profile, None

    def report(self, *, now: float, since_s: float = NEVER_S) -> EngineReport:
        """Return the metrics page at `now`, for an engine that has been advanced to `now`, or is
        quiet until then.

        Args:
            now: Not before the start of the last step.
            since_s: `shown_s` of a report that the reader has, whose log entries are left out.
        """
        shown = self._ahead.shown(now) if self._ahead else None
        if shown is None:
            return self._activity.report(now=now, since_s=since_s)
        shown_s, free_blocks, num_steps = shown
        stats = self._scheduler.stats(free_blocks)
        num_generated = (
            self.counters.num_generated_tokens + num_steps * self._scheduler.decoders.count
        )
        return self._activity.report_of(shown_s, stats, num_generated, since_s=since_s)

    def submit(self, request: EngineRequest, *, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: Its id is in use, it is longer than the model allows, it is empty, its
                prefix is longer than its prompt, or it names an adapter where there are no slots.
        """
        length = request.prompt_tokens + request.output_tokens
        if request.id in self._scheduler.sequences:
            raise ValueError(f"request {request.id!r} is unfinished")
        if request.prompt_tokens < 1 or request.output_tokens < 0:
            raise ValueError(f"request {request.id!r} has no prompt or a negative output")
        if not 0 <= request.prefix_tokens <= request.prompt_tokens:
            raise ValueError(f"request {request.id!r} has a prefix longer than its prompt")
        if length > self.profile.max_model_len:
            raise ValueError(f"{length} tokens exceed max_model_len")
        if request.adapter is not None and self._cache is None:
            raise ValueError("this engine has no adapter slots")
        self._ahead = None
        self._scheduler.submit(request, now=now)
        self.counters.num_submitted += 1

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is. False if it is unknown or finished."""
        sequence = self._scheduler.abort(request_id)
        if sequence is None:
            return False
        self._ahead = None
        if sequence.first_token_s is not None:
            self._activity.remove(sequence.request)
        self.counters.num_aborted += 1
        return True

    def set_rank(self, adapter: str, rank: int) -> None:
        """Set the rank of `adapter`.

        Raises:
            ValueError: `rank` exceeds `max_lora_rank`.
        """
        if rank > self.max_lora_rank:
            raise ValueError(
                f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            )
        self._ranks[adapter] = rank

    def load_adapter(self, adapter: str) -> float:
        """Load `adapter` at the operator's request, between two steps.

        Returns:
            Seconds for which the engine stops.

        Raises:
            ValueError: The engine has no adapter slots.
        """
        if self._cache is None:
            raise ValueError("this engine has no adapter slots")
        self._ahead = None
        # The batch's adapters are no longer the latest used.
        self._adapters, self._scheduler.is_regrouped = (), True
        return sum(self._load_s(load) for load in self._place((adapter,)))

    def step(self, *, now: float) -> Step | None:
        """Run one step that begins at `now`; None without work.

        Afterwards the engine is in its state at the end of the step, `duration_s` later.
        """
        if not self._scheduler.sequences:
            return None
        batch, loads, duration_s = self._take_step(now, is_detailed=True)
        return Step(
            started_s=now,
            duration_s=duration_s,
            tokens=tuple(batch.tokens),
            first_tokens=tuple(batch.first_tokens),
            finished=tuple(batch.finished),
            preempted=tuple(batch.preempted),
            adapters=self._adapters,
            loads=loads,
            prefill_tokens=batch.prefill_tokens,
            num_decoding=batch.num_decoding,
            stats=self.stats,
        )

    def advance(self, *, now: float, until: float) -> Advance:
        """Run every step that begins from `now` on and before `until`.

        Equal to repeated calls of `step`, and much faster.
        """
        first_tokens: list[Timeline] = []
        finished: list[Timeline] = []
        while now < until and self._scheduler.sequences:
            if self._scheduler.is_steady and not self._scheduler.is_regrouped:
                now = self._repeat(now, until)
                if now >= until:
                    break
            batch, _, duration_s = self._take_step(now)
            now += duration_s
            first_tokens += batch.first_tokens
            finished += batch.finished
        if not self._scheduler.sequences:
            self._activity.show_idle(now=now)
        return Advance(now, tuple(first_tokens), tuple(finished))

    def _repeat(self, now: float, until: float) -> float:
        """Run steps in which no request comes, ends or lacks a block; return the end of the last.

        Equal to single steps to the last bit.
        """
        while now < until:
            ahead = self._ahead
            if ahead is None or not ahead.num_left or ahead.begins_s[ahead.num_taken] != now:
                ahead = self._ahead = StepsAhead(
                    self._scheduler, self.profile, num_adapters=len(self._adapters), now=now
                )
                if not ahead.num_left:
                    break
            now = self._take(ahead, ahead.num_before(until))
        return now

    def _take(self, ahead: StepsAhead, num: int) -> float:
        """Take the first `num` of the steps ahead; return the end of the last."""
        scheduler, activity = self._scheduler, self._activity
        num_steps = num - ahead.num_taken
        begins_s, free_blocks, ahead.num_taken = ahead.begins_s, ahead.free_blocks, num
        scheduler.decoders.advance(num_steps)
        scheduler.pool.allocate(scheduler.pool.free - free_blocks[num])
        counters, num_decoding = self.counters, scheduler.decoders.count
        counters.num_steps += num_steps
        counters.num_generated_tokens += num_steps * num_decoding
        generated = counters.num_generated_tokens
        if num_steps > 1:
            stats, at_s = scheduler.stats(free_blocks[num - 1]), begins_s[num - 1]
            activity.show(stats, generated - num_decoding, at_s=at_s)
        activity.show(scheduler.stats(free_blocks[num]), generated, at_s=begins_s[num])
        return begins_s[num]

    def _take_step(
        self, now: float, *, is_detailed: bool = False
    ) -> tuple[Batch, tuple[AdapterLoad, ...], float]:
        """Run one step; return its batch, its adapter loads and its seconds."""
        self._ahead = None
        scheduler = self._scheduler
        batch = scheduler.schedule(now=now)
        loads: tuple[AdapterLoad, ...] = ()
        if scheduler.is_regrouped:
            scheduler.is_regrouped = False
            adapters = scheduler.adapters
            if adapters != self._adapters:  # else they are the latest used, in this order
                self._adapters = adapters
                loads = self._place(adapters)
        duration_s = sum(map(self._load_s, loads)) + self.profile.forward_s(
            num_decoding=batch.num_decoding,
            kv_tokens=batch.kv_tokens,
            prefill_tokens=batch.prefill_tokens,
            num_adapters=len(self._adapters),
        )
        scheduler.complete(batch, ended_s=now + duration_s, is_detailed=is_detailed)
        self._count(batch)
        generated = self.counters.num_generated_tokens
        self._activity.show(self.stats, generated, at_s=now + duration_s)
        return batch, loads, duration_s

    def _count(self, batch: Batch) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.num_finished += len(batch.finished)
        counters.num_generated_tokens += batch.num_generated_tokens
        for timeline in batch.first_tokens:
            self._activity.add(timeline.request)
        for timeline in batch.finished:
            self._activity.remove(timeline.request)

    def _place(self, adapters: tuple[str, ...]) -> tuple[AdapterLoad, ...]:
        if self._cache is None:
            return ()
        loads = tuple(load for load in map(self._cache.use, adapters) if load)
        self.counters.num_gpu_loads += len(loads)
        self.counters.num_disk_loads += sum(load.is_from_disk for load in loads)
        return loads

    def _load_s(self, load: AdapterLoad) -> float:
        rank = self._ranks.get(load.adapter, self.max_lora_rank)
        return self.profile.load_s(rank, is_from_disk=load.is_from_disk)
