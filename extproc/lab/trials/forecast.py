"""The forecast of one pod without further requests, for the informed bounds.

It knows more than any router: the responses' remaining lengths and the engine's constants. It is
coarser than the engine model: between two ends of responses every step takes the same time, and
requests that are admitted together are computed in one prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from extproc.lab.engine.caches import PrefixKey
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.records import EngineRequest
from extproc.lab.workload.judge import Slo

if TYPE_CHECKING:
    from extproc.lab.fleet.virtualpod import FleetPod
    from extproc.lab.workload.requests import Arrival


@dataclass(frozen=True, slots=True)
class Running:
    """A request in the batch."""

    remaining_tokens: int
    output_tokens: int
    kv_tokens: int
    adapter: str | None
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Queued:
    """A request that has no token yet."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class PodForecast:
    """The state of a pod at one moment.

    Attributes:
        free_at_s: When its step in progress ends.
        queued: Its queue, prefills in progress included, head first.
        cached: Blocks of each shared prefix in its KV cache.
    """

    free_at_s: float
    profile: EngineProfile
    max_loras: int
    kv_capacity_tokens: int
    gpu_adapters: frozenset[str]
    cpu_adapters: frozenset[str]
    ranks: Mapping[str, int]
    running: tuple[Running, ...]
    queued: tuple[Queued, ...]
    cached: Mapping[PrefixKey, int]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The consequences of a state.

    Attributes:
        num_misses: Requests in the pod that will miss the SLO.
        total_s: Sum of the times at which they end.
        slot_s: Seconds for which slots are in use, summed over slots.
    """

    num_misses: int
    total_s: float
    slot_s: float


def state_of(pod: FleetPod, ranks: Mapping[str, int]) -> PodForecast:
    """Read a pod's state, as if its step in progress were done."""
    engine = pod.engine
    running, queued, cached = [], [], engine.cached_prefixes
    for request in engine.running:
        generated = engine.generated_tokens(request.id)
        if not generated:
            queued.append(queued_at(pod.flights[request.id].arrival, cached, engine.profile))
            continue
        first_token_s = pod.flights[request.id].first_token_s
        running.append(
            Running(
                request.output_tokens - generated,
                request.output_tokens,
                request.prompt_tokens + generated,
                request.adapter,
                pod.free_at_s if first_token_s is None else first_token_s,
            )
        )
    queued += [
        queued_at(pod.flights[request.id].arrival, cached, engine.profile)
        for request in engine.waiting
    ]
    return PodForecast(
        pod.free_at_s,
        engine.profile,
        engine.max_loras,
        engine.kv_blocks * engine.profile.block_tokens,
        frozenset(engine.gpu_adapters),
        frozenset(engine.cpu_adapters),
        ranks,
        tuple(running),
        tuple(queued),
        cached,
    )


def queued_at(arrival: Arrival, cached: Mapping[PrefixKey, int], profile: EngineProfile) -> Queued:
    """Return a request that is not running yet, without the part of its prompt that is cached."""
    prompt_tokens = arrival.prompt_tokens
    if key := shared_part(arrival, profile):
        prompt_tokens -= cached.get(key, 0) * profile.block_tokens
    return Queued(arrival.at_s, prompt_tokens, arrival.output_tokens, arrival.adapter)


def shared_part(arrival: Arrival, profile: EngineProfile) -> PrefixKey | None:
    """Return what of a prompt can be found in a KV cache; None for nothing."""
    if not arrival.prefix:
        return None
    return EngineRequest.of(arrival, "").prefix_key(profile.block_tokens)


def forecast(state: PodForecast, slo: Slo, *, now: float, extra: Queued | None = None) -> Forecast:
    """Simulate a pod until it is empty, with one more request at the end of its queue."""
    return _Run(state, slo, now, extra).finish()


_End = tuple[int, float, int, int, str]
"""Of one response: the step of its end, its first token's time, tokens, KV at its end, and adapter,
"" for none, so that they can be sorted."""


class _Run:
    __slots__ = (
        "_active",
        "_batch",
        "_kv",
        "_may_admit",
        "_misses",
        "_now",
        "_num_decoding",
        "_queue",
        "_slo",
        "_slot_s",
        "_state",
        "_step",
    )

    def __init__(self, state: PodForecast, slo: Slo, now: float, extra: Queued | None) -> None:
        self._state = state
        self._slo = slo
        self._now = max(now, state.free_at_s)
        self._step = 0  # tokens that a request running from the start would have
        self._misses = 0
        self._slot_s = 0.0
        self._may_admit = True
        self._kv = 0
        self._active: dict[str, int] = {}
        self._queue = [*state.queued, extra] if extra else list(state.queued)
        self._batch: list[_End] = []
        for each in state.running:
            self._enter(each.adapter, each.kv_tokens)
            kv_at_end = each.kv_tokens + each.remaining_tokens
            entry = (each.remaining_tokens, each.first_token_s, each.output_tokens, kv_at_end)
            self._batch.append((*entry, each.adapter or ""))
        heapify(self._batch)
        self._num_decoding = len(self._batch)

    def finish(self) -> Forecast:
        total_s = 0.0
        while self._queue:
            while self._queue and self._may_admit and self._admit():
                pass
            if self._queue:
                total_s += self._run_to(heappop(self._batch))
        for end in sorted(self._batch):
            total_s += self._run_to(end)
        return Forecast(self._misses, total_s, self._slot_s)

    def _enter(self, adapter: str | None, kv_tokens: int) -> None:
        self._kv += kv_tokens
        if adapter is not None:
            self._active[adapter] = self._active.get(adapter, 0) + 1

    def _run_to(self, end: _End) -> float:
        """Decode until the next response ends, and return when that is."""
        end_step, first_token_s, tokens, kv_tokens, adapter = end
        profile, active, num_decoding = self._state.profile, self._active, self._num_decoding
        steps = end_step - self._step
        if steps > 0:
            # `forward_s` inlined: most of a forecast's time is spent here. The cache grows by a
            # token per sequence and step: its mean is at half the way.
            step_s = profile.step_s + profile.step_per_decode_s * num_decoding
            step_s += profile.step_per_kv_token_s * (self._kv + num_decoding * steps // 2)
            duration_s = steps * step_s * profile.lora_factor(len(active))
            self._step = end_step
            self._now += duration_s
            self._slot_s += duration_s * len(active)
            self._kv += num_decoding * steps
        self._kv -= kv_tokens
        self._num_decoding -= 1
        if adapter:
            active[adapter] -= 1
            if not active[adapter]:
                del active[adapter]
                self._may_admit = True
        if self._now - first_token_s > self._slo.tpot_s * max(1, tokens - 1):
            self._misses += 1
        return self._now

    def _admit(self) -> bool:
        """Prefill the requests that may start now, at most one step's; False without any."""
        admitted: list[Queued] = []
        kept: list[Queued] = []
        load_s = 0.0
        self._may_admit = False  # until an adapter leaves or KV becomes free
        state = self._state
        budget = state.profile.max_num_batched_tokens - len(self._batch)
        for index, each in enumerate(self._queue):
            adapter = each.adapter
            is_new = adapter is not None and adapter not in self._active
            if is_new and len(self._active) >= state.max_loras:
                kept.append(each)
                continue
            is_full = self._kv + each.prompt_tokens > state.kv_capacity_tokens
            if (self._num_decoding and is_full) or (admitted and each.prompt_tokens > budget):
                kept += self._queue[index:]
                self._may_admit = True
                break
            if is_new and adapter not in state.gpu_adapters:
                load_s += self._load_s(adapter)
            budget -= each.prompt_tokens
            self._enter(adapter, each.prompt_tokens)
            admitted.append(each)
        self._queue = kept
        if admitted:
            self._prefill(admitted, load_s)
        return bool(admitted)

    def _load_s(self, adapter: str | None) -> float:
        state = self._state
        rank = state.ranks.get(adapter or "", 0)
        return state.profile.load_s(rank, is_from_disk=adapter not in state.cpu_adapters)

    def _prefill(self, admitted: list[Queued], load_s: float) -> None:
        self._now += load_s + self._state.profile.forward_s(
            num_decoding=len(self._batch),
            kv_tokens=self._kv,
            prefill_tokens=sum(each.prompt_tokens for each in admitted),
            num_adapters=len(self._active),
        )
        self._step += 1  # the batch gets a token in the same step
        self._kv += len(self._batch)
        for each in admitted:
            if self._now - each.arrived_s > self._slo.ttft_s:
                self._misses += 1
            end_step = self._step + max(0, each.output_tokens - 1)
            kv_at_end = each.prompt_tokens + each.output_tokens
            entry = (end_step, self._now, each.output_tokens, kv_at_end, each.adapter or "")
            heappush(self._batch, entry)
        self._num_decoding = len(self._batch)
