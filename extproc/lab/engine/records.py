"""The inputs and outputs of the engine model, as values.

Times are the caller's seconds, virtual or real.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from extproc.lab.engine.caches import AdapterLoad, PrefixKey
from extproc.lab.workload.requests import Arrival


class EngineRequest(Struct, frozen=True, gc=False):
    """A request as the engine sees it.

    Attributes:
        id: Unique among unfinished requests.
        prompt_tokens: At least 1.
        output_tokens: Tokens to generate; 0 for a request that ends with its prefill (embeddings).
        adapter: None for the base model.
        prefix: Id of the prefix that its prompt shares with other prompts; "" for none. Its KV is
            shared only under the same adapter, as in vLLM.
        prefix_tokens: Length of that prefix, at most `prompt_tokens`.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    adapter: str | None = None
    prefix: str = ""
    prefix_tokens: int = 0

    @classmethod
    def of(cls, arrival: Arrival, id: str) -> EngineRequest:
        """Return the engine's view of a workload's request."""
        return cls(
            id,
            arrival.prompt_tokens,
            arrival.output_tokens,
            arrival.adapter,
            arrival.prefix,
            arrival.prefix_tokens,
        )

    def prefix_key(self, block_tokens: int) -> PrefixKey | None:
        """The blocks of its prompt that can be shared: whole ones, and at least one token less
        than the prompt, whose last token is always computed."""
        if not self.prefix:
            return None
        blocks = min(self.prefix_tokens, self.prompt_tokens - 1) // block_tokens
        return (self.adapter, self.prefix, blocks) if blocks else None


class Timeline(Struct, frozen=True, gc=False):
    """The times of a request, in the caller's seconds.

    Attributes:
        scheduled_s: Start of the first step that ran it.
        first_token_s: End of the step that produced its first token; for a request without output
            the end of its prefill.
        finished_s: End of its last step; None while it runs.
    """

    request: EngineRequest
    submitted_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float | None


class EngineStats(Struct, frozen=True, gc=False):
    """Gauges at the end of a step, as the engine's scheduler counts them.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests in the queue, deferred ones included.
        num_deferred: Queued requests that were skipped for want of an adapter slot.
        kv_usage_ratio: Part of the KV blocks in use, 0 to 1.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it took and what it produced. It counts from `started_s + duration_s` on.

    Attributes:
        started_s: The `now` it was called with.
        duration_s: How long it takes, adapter loads included.
        tokens: Requests that got a token.
        first_tokens: Those of them that got their first one, and finished prefills without output.
        finished: Requests that are done.
        preempted: Requests that lost their KV and went back to the queue.
        adapters: Distinct adapters of the batch, in its order.
        loads: Adapters that had to be moved for it.
        prefill_tokens: Prompt tokens computed.
        num_decoding: Sequences that computed one token after their prefill.
        stats: The gauges after the step.
    """

    started_s: float
    duration_s: float
    tokens: tuple[EngineRequest, ...]
    first_tokens: tuple[Timeline, ...]
    finished: tuple[Timeline, ...]
    preempted: tuple[EngineRequest, ...]
    adapters: tuple[str, ...]
    loads: tuple[AdapterLoad, ...]
    prefill_tokens: int
    num_decoding: int
    stats: EngineStats

    @property
    def ended_s(self) -> float:
        """When its results count."""
        return self.started_s + self.duration_s


class Advance(Struct, frozen=True, gc=False):
    """The results of a run of steps, each in the order it happened.

    Attributes:
        ended_s: When the last step ends, which may be after `until`, and the
            engine begins the next; the time of the call if there was nothing to do.
        first_tokens: As in `Step`.
        finished: As in `Step`.
    """

    ended_s: float
    first_tokens: tuple[Timeline, ...] = ()
    finished: tuple[Timeline, ...] = ()


class EngineReport(Struct, frozen=True, gc=False):
    """The engine's metrics page at a moment: the end of the last step that has ended.

    Attributes:
        shown_s: The end of that step; minus infinity before the first.
        stats: The gauges.
        num_generated_tokens: Since the engine was made, as `EngineCounters` has them.
        num_first_tokens: Requests that have had one since then.
        active_adapters: Adapters with a request between its first and its last token.
        adapter_log: (adapter, seconds when it was last reported active), latest first; those of
            one moment in no order to rely on.
    """

    shown_s: float
    stats: EngineStats = EngineStats()
    num_generated_tokens: int = 0
    num_first_tokens: int = 0
    active_adapters: frozenset[str] = frozenset()
    adapter_log: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was made (or since `Engine.counters` was replaced)."""

    num_submitted: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_steps: int = 0
    num_disk_loads: int = 0
    num_gpu_loads: int = 0
    num_generated_tokens: int = 0
