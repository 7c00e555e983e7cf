"""The engine model: what vLLM's scheduler promises, as properties over random workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.caches import AdapterCache
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import H100_8B, INSTANT, PROFILES, EngineProfile
from extproc.lab.engine.records import EngineRequest, EngineStats, Step

TINY = replace(
    H100_8B,
    kv_capacity_tokens=96,
    block_tokens=4,
    max_model_len=48,
    max_num_batched_tokens=24,
    max_num_seqs=5,
    slot_tokens_per_rank=0.5,
)


class Shared(TypedDict):
    prefix: str
    prefix_tokens: int


@dataclass(frozen=True)
class Submit:
    prompt_tokens: int
    output_tokens: int
    adapter: str | None


@dataclass(frozen=True)
class Abort:
    index: int


@dataclass(frozen=True)
class Run:
    steps: int


_EVENTS = st.lists(
    st.one_of(
        st.builds(
            Submit,
            st.integers(1, 28),
            st.integers(0, 20),
            st.one_of(st.none(), st.sampled_from("abcdef")),
        ),
        st.builds(Abort, st.integers(0, 30)),
        st.builds(Run, st.integers(1, 6)),
    ),
    max_size=60,
)


def _apply(engine: Engine, event: Submit | Abort | Run, *, now: float) -> list[Step]:
    """Apply one event; the steps that ran."""
    if isinstance(event, Submit):
        number = engine.counters.num_submitted
        engine.submit(
            EngineRequest(str(number), event.prompt_tokens, event.output_tokens, event.adapter),
            now=now,
        )
        return []
    if isinstance(event, Abort):
        engine.abort(str(event.index))
        return []
    steps = []
    for _ in range(event.steps):
        if step := engine.step(now=now):
            steps.append(step)
            now = step.ended_s
    return steps


def _play(engine: Engine, events: list[Submit | Abort | Run]) -> list[Step]:
    """Apply `events` in virtual time; the steps that ran."""
    now = 0.0
    steps: list[Step] = []
    for event in events:
        steps += _apply(engine, event, now=now)
        now = steps[-1].ended_s if steps else 0.0
    return steps


def _drain(engine: Engine, now: float = 0.0) -> list[Step]:
    steps = []
    while step := engine.step(now=now):
        steps.append(step)
        now = step.ended_s
        assert len(steps) < 10_000
    return steps


@given(_EVENTS, st.integers(1, 3))
def test_every_request_is_in_exactly_one_place(
    events: list[Submit | Abort | Run], max_loras: int
) -> None:
    """Conservation: submitted = finished + aborted + running + waiting, at each moment."""
    engine = Engine(TINY, max_loras=max_loras)
    counters = engine.counters
    for end in range(len(events)):
        _apply(engine, events[end], now=float(end))
        unfinished = len(engine.running) + len(engine.waiting)

        assert counters.num_submitted == counters.num_finished + counters.num_aborted + unfinished
    _drain(engine)

    assert counters.num_submitted == counters.num_finished + counters.num_aborted
    assert engine.stats == EngineStats()


@given(_EVENTS)
def test_each_finished_request_got_its_tokens_once(events: list[Submit | Abort | Run]) -> None:
    """Preemption recomputes the KV; it neither repeats nor loses a token."""
    engine = Engine(TINY, max_loras=2)
    steps = _play(engine, events)
    steps += _drain(engine, steps[-1].ended_s if steps else 0.0)
    tokens: dict[str, int] = {}
    for step in steps:
        for request in step.tokens:
            tokens[request.id] = tokens.get(request.id, 0) + 1
    finished = [timeline.request for step in steps for timeline in step.finished]

    assert all(tokens.get(request.id, 0) == request.output_tokens for request in finished)
    assert len(finished) == len({request.id for request in finished})


@given(_EVENTS, st.integers(1, 3))
def test_no_step_exceeds_slots_sequences_tokens_or_kv(
    events: list[Submit | Abort | Run], max_loras: int
) -> None:
    engine = Engine(TINY, max_loras=max_loras)
    for step in _play(engine, events) + _drain(engine):
        assert len(step.adapters) <= max_loras
        assert step.stats.num_running <= TINY.max_num_seqs
        assert step.prefill_tokens <= TINY.max_num_batched_tokens
        assert 0 <= step.stats.kv_usage_ratio <= 1
        assert step.stats.num_deferred <= step.stats.num_waiting


@given(_EVENTS, st.integers(1, 3), st.integers(0, 2))
def test_residency_is_the_lru_of_the_adapters_that_ran(
    events: list[Submit | Abort | Run], max_loras: int, extra_cpu: int
) -> None:
    """Oracle: a cache of its own, fed with the adapters that each step reports."""
    engine = Engine(TINY, max_loras=max_loras, max_cpu_loras=max_loras + extra_cpu)
    oracle = AdapterCache(max_loras, max_loras + extra_cpu)
    loads = 0
    for step in _play(engine, events) + _drain(engine):
        expected = [load for adapter in step.adapters if (load := oracle.use(adapter))]
        loads += len(expected)

        assert tuple(expected) == step.loads
    assert oracle.gpu == engine.gpu_adapters
    assert oracle.cpu == engine.cpu_adapters
    assert loads == engine.counters.num_gpu_loads


@given(_EVENTS, st.integers(1, 3))
def test_nothing_waits_that_could_run(events: list[Submit | Abort | Run], max_loras: int) -> None:
    """Work conservation: after a step that neither preempted nor finished anything, the first
    waiting request that has its slot finds too little KV, unless sequences or tokens ran out."""
    engine = Engine(TINY, max_loras=max_loras)
    produced: Counter[str] = Counter()
    for event in [*events, Run(10_000)]:
        for step in _apply_one_by_one(engine, event):
            produced.update(request.id for request in step.tokens)
            tokens = step.prefill_tokens + step.num_decoding
            assert tokens > 0

            if (
                step.preempted
                or step.finished
                or step.stats.num_running == TINY.max_num_seqs
                or tokens == TINY.max_num_batched_tokens
            ):
                continue
            free_blocks = round((1 - step.stats.kv_usage_ratio) * engine.kv_blocks)
            first = next((r for r in engine.waiting if _has_slot(engine, r)), None)
            if first:
                length = first.prompt_tokens + produced[first.id]
                assert -(-length // TINY.block_tokens) > free_blocks


def _apply_one_by_one(engine: Engine, event: Submit | Abort | Run) -> Iterator[Step]:
    """The steps of `event`, each while the engine is in its state right after it."""
    if not isinstance(event, Run):
        _apply(engine, event, now=0.0)
        return
    for _ in range(event.steps):
        step = engine.step(now=0.0)
        if step is None:
            return
        yield step


def _has_slot(engine: Engine, request: EngineRequest) -> bool:
    adapters = {running.adapter for running in engine.running if running.adapter}
    return (
        request.adapter is None or request.adapter in adapters or len(adapters) < engine.max_loras
    )


@given(_EVENTS)
def test_the_same_events_give_the_same_steps(events: list[Submit | Abort | Run]) -> None:
    assert _play(Engine(TINY, max_loras=2), events) == _play(Engine(TINY, max_loras=2), events)


def _run_to_end(engine: Engine, *requests: EngineRequest) -> list[Step]:
    for request in requests:
        engine.submit(request, now=0.0)
    return _drain(engine)


def test_a_request_without_a_slot_is_skipped_and_does_not_block_those_behind_it() -> None:
    engine = Engine(INSTANT, max_loras=1)
    for name, adapter in [("first", "a"), ("gated", "b"), ("same", "a"), ("base", None)]:
        engine.submit(EngineRequest(name, 10, 5, adapter), now=0.0)
    step = engine.step(now=0.0)

    assert step is not None
    assert [request.id for request in engine.running] == ["first", "same", "base"]
    assert (step.stats.num_waiting, step.stats.num_deferred) == (1, 1)


def test_a_slot_frees_when_the_last_request_of_an_adapter_ends() -> None:
    engine = Engine(INSTANT, max_loras=1)
    steps = _run_to_end(
        engine, EngineRequest("short", 10, 2, "a"), EngineRequest("gated", 10, 1, "b")
    )

    assert [step.adapters for step in steps] == [("a",), ("a",), ("b",)]


def test_residency_plays_no_part_in_the_gate() -> None:
    """An adapter in a GPU slot is gated as long as the running adapters fill the limit."""
    engine = Engine(INSTANT, max_loras=2)
    _run_to_end(engine, EngineRequest("warm", 1, 1, "resident"))
    for name, adapter in [("1", "x"), ("2", "y"), ("3", "resident")]:
        engine.submit(EngineRequest(name, 10, 5, adapter), now=0.0)
    engine.step(now=0.0)

    assert [request.id for request in engine.waiting] == ["3"]


def test_a_long_prompt_is_computed_in_chunks_with_running_requests() -> None:
    profile = replace(INSTANT, max_num_batched_tokens=100, max_num_seqs=50)
    engine = Engine(profile, max_loras=1)
    engine.submit(EngineRequest("running", 10, 50), now=0.0)
    engine.step(now=0.0)
    engine.submit(EngineRequest("long", 250, 1), now=0.0)
    steps = _drain(engine)

    assert [step.prefill_tokens for step in steps[:3]] == [99, 99, 52]
    assert all("running" in {r.id for r in step.tokens} for step in steps[:3])
    assert [t.request.id for step in steps[:3] for t in step.first_tokens] == ["long"]


def test_a_full_kv_cache_preempts_the_newest_which_recomputes() -> None:
    profile = replace(INSTANT, kv_capacity_tokens=64, max_model_len=40)
    engine = Engine(profile, max_loras=0)
    steps = _run_to_end(engine, EngineRequest("old", 30, 10), EngineRequest("new", 30, 10))
    finished = [timeline for step in steps for timeline in step.finished]

    assert [timeline.request.id for timeline in finished] == ["old", "new"]
    assert [[r.id for r in step.preempted] for step in steps if step.preempted] == [["new"]]


def test_a_preempted_request_computes_only_what_was_taken_from_it() -> None:
    """As seen on vLLM 0.32: its full blocks are found again where nobody has allocated them. The
    older request allocates two of the four, the last ones first.
    """
    profile = replace(INSTANT, kv_capacity_tokens=128, max_model_len=128)
    engine = Engine(profile, max_loras=0)
    steps = _run_to_end(engine, EngineRequest("old", 63, 22), EngineRequest("new", 62, 10))
    (preempting,) = (number for number, step in enumerate(steps) if step.preempted)
    (resuming,) = (step for step in steps[preempting:] if step.prefill_tokens)

    num_generated = preempting
    assert resuming.prefill_tokens == 62 + num_generated - 2 * profile.block_tokens


def test_a_request_without_output_ends_with_its_prefill() -> None:
    engine = Engine(H100_8B)
    (step,) = _run_to_end(engine, EngineRequest("embedding", 100, 0))

    assert step.tokens == ()
    assert step.first_tokens[0].first_token_s == step.finished[0].finished_s == step.duration_s


def test_slots_take_their_kv_from_the_cache() -> None:
    """Derived figure: 4 slots of rank 16 at 40 KV tokens a rank cost 2,560 tokens, 160 blocks."""
    with_slots = Engine(H100_8B, max_loras=4, max_lora_rank=16)

    assert Engine(H100_8B, max_loras=0).kv_blocks - with_slots.kv_blocks == 160


def test_loads_stall_the_step_by_rank_and_by_where_the_adapter_was() -> None:
    profile = replace(
        INSTANT,
        disk_load_s=1.0,
        disk_load_per_rank_s=0.125,
        gpu_load_s=0.25,
        gpu_load_per_rank_s=0.5,
    )
    engine = Engine(profile, max_loras=1, max_cpu_loras=2, ranks={"a": 8, "b": 2})
    from_disk = profile.load_s(8, is_from_disk=True)
    runs = [
        _run_to_end(engine, EngineRequest(name, 1, 1, name[0]))[0].duration_s
        for name in ("a1", "a2", "b1", "a3")
    ]

    assert from_disk == 1.0 + 8 * 0.125 + 0.25 + 8 * 0.5
    assert [from_disk, 0.0, 1.0 + 2 * 0.125 + 0.25 + 2 * 0.5, 0.25 + 8 * 0.5] == runs
    assert (engine.counters.num_disk_loads, engine.counters.num_gpu_loads) == (2, 3)


def test_an_explicit_load_takes_a_slot_and_says_how_long_it_stalls() -> None:
    engine = Engine(H100_8B, max_loras=1, max_lora_rank=16)
    duration_s = engine.load_adapter("a")

    assert duration_s == H100_8B.load_s(16, is_from_disk=True)
    assert engine.gpu_adapters == ("a",)
    assert engine.load_adapter("a") == 0


def test_step_time_follows_the_formula() -> None:
    profile = replace(
        INSTANT,
        step_s=1.0,
        step_per_decode_s=0.5,
        step_per_kv_token_s=0.25,
        step_per_prefill_token_s=0.125,
        lora_ratio=1.0,
        lora_per_adapter_ratio=0.5,
    )
    engine = Engine(profile, max_loras=2)
    steps = _run_to_end(
        engine, EngineRequest("base", 4, 2), EngineRequest("1", 4, 3, "a"), EngineRequest("2", 4, 3)
    )

    assert steps[0].duration_s == (1 + 12 * 0.25 + 12 * 0.125) * 2
    assert steps[1].duration_s == (1 + 3 * 0.5 + 15 * 0.25) * 2
    assert steps[2].duration_s == (1 + 2 * 0.5 + 12 * 0.25) * 2
    assert profile.forward_s(num_decoding=0, kv_tokens=0, prefill_tokens=0, num_adapters=3) == 1 * (
        1 + 1 + 2 * 0.5
    )


def test_times_are_those_of_the_steps() -> None:
    profile = replace(INSTANT, step_s=1.0)
    engine = Engine(profile)
    engine.submit(EngineRequest("r", 5, 3), now=9.0)
    steps = _drain(engine, now=10.0)
    (timeline,) = steps[-1].finished

    assert (timeline.submitted_s, timeline.scheduled_s) == (9.0, 10.0)
    assert (timeline.first_token_s, timeline.finished_s) == (11.0, 13.0)
    assert engine.step(now=20.0) is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EngineRequest("known", 1, 1), "unfinished"),
        (EngineRequest("r", 0, 1), "no prompt"),
        (EngineRequest("r", 1, -1), "negative"),
        (EngineRequest("r", 8000, 193), "max_model_len"),
        (EngineRequest("r", 1, 1, "a"), "no adapter slots"),
    ],
)
def test_impossible_requests_are_refused(request_: EngineRequest, message: str) -> None:
    engine = Engine(H100_8B, max_loras=0)
    engine.submit(EngineRequest("known", 1, 1), now=0.0)

    with pytest.raises(ValueError, match=message):
        engine.submit(request_, now=0.0)


def test_engines_that_vllm_would_not_start_are_refused() -> None:
    with pytest.raises(ValueError, match="KV blocks"):
        Engine(H100_8B, max_loras=200, max_lora_rank=64)
    with pytest.raises(ValueError, match="max_cpu_loras"):
        Engine(H100_8B, max_loras=4, max_cpu_loras=2)
    with pytest.raises(ValueError, match="no adapter slots"):
        Engine(H100_8B, max_loras=0).load_adapter("a")
    with pytest.raises(ValueError, match="greater than max_lora_rank"):
        Engine(H100_8B).set_rank("a", 17)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_profile_serves_a_request_with_the_default_slots(profile: EngineProfile) -> None:
    engine = Engine(profile)
    steps = _run_to_end(engine, EngineRequest("r", 1000, 100, "a"))

    assert len(steps) == -(-1000 // profile.max_num_batched_tokens) + 99
    assert PROFILES[profile.name] is profile


def test_a_request_behind_one_too_long_runs_once_that_one_is_aborted() -> None:
    engine = Engine(replace(INSTANT, kv_capacity_tokens=64, max_model_len=60), max_loras=0)
    for name, length in [("old", 17), ("long", 33), ("short", 10)]:
        engine.submit(EngineRequest(name, length, 20), now=0.0)
    engine.step(now=0.0)
    assert [request.id for request in engine.waiting] == ["long", "short"]
    engine.abort("long")
    engine.step(now=0.0)

    assert [request.id for request in engine.running] == ["old", "short"]


def test_a_shared_beginning_is_computed_once_for_each_adapter() -> None:
    engine = Engine(INSTANT, max_loras=2)
    shared: Shared = {"prefix": "system", "prefix_tokens": 100}
    steps = [
        _run_to_end(engine, EngineRequest(name, 150, 1, adapter, **shared))[0].prefill_tokens
        for name, adapter in [("1", "a"), ("2", "a"), ("3", "b"), ("4", None), ("5", "b")]
    ]

    assert steps == [150, 54, 150, 150, 54]  # 6 whole blocks of 16 tokens are found


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_shared() -> None:
    engine = Engine(INSTANT, max_loras=0)
    shared: Shared = {"prefix": "system", "prefix_tokens": 32}
    steps = [
        _run_to_end(engine, EngineRequest(name, 32, 1, None, **shared))[0].prefill_tokens
        for name in "12"
    ]

    assert steps == [32, 16]


def test_requests_that_run_together_share_the_kv_of_their_beginning() -> None:
    engine = Engine(replace(INSTANT, kv_capacity_tokens=1600, max_model_len=1600), max_loras=0)
    for number in range(10):
        engine.submit(EngineRequest(str(number), 816, 5, None, "system", 800), now=0.0)
    step = engine.step(now=0.0)

    assert step is not None
    assert step.prefill_tokens == 816 + 9 * 16
    assert step.stats.kv_usage_ratio == 60 / 100  # 50 shared blocks, and 10 of their own


def test_a_step_must_have_room_for_a_token_of_every_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(replace(INSTANT, max_num_batched_tokens=10, max_num_seqs=11))
    with pytest.raises(ValueError, match="prefix"):
        Engine(INSTANT).submit(EngineRequest("r", 5, 1, None, "p", 6), now=0.0)
