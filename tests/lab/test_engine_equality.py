"""The fast engine against the plain one, and many steps at once against single ones: to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import A100_8B, EngineProfile
from extproc.lab.engine.records import EngineRequest, EngineStats, Step, Timeline
from tests.lab.plain_engine import PlainEngine

SMALL = replace(
    A100_8B,
    kv_capacity_tokens=128,
    block_tokens=4,
    max_model_len=60,
    max_num_batched_tokens=24,
    max_num_seqs=7,
    slot_tokens_per_rank=0.25,
)
RANKS = {"a": 8, "b": 4, "c": 16}


@dataclass(frozen=True)
class Submit:
    prompt_tokens: int
    output_tokens: int
    adapter: str | None
    prefix: str
    prefix_part: float

    def request(self, number: int) -> EngineRequest:
        prefix_tokens = round(self.prompt_tokens * self.prefix_part) if self.prefix else 0
        return EngineRequest(
            str(number),
            self.prompt_tokens,
            self.output_tokens,
            self.adapter,
            self.prefix,
            prefix_tokens,
        )


@dataclass(frozen=True)
class Abort:
    index: int


@dataclass(frozen=True)
class Load:
    adapter: str


@dataclass(frozen=True)
class Pass:
    """Let the engine run this much virtual time, in seconds."""

    time_s: float


_SUBMITS = st.builds(
    Submit,
    st.integers(1, 30),
    st.one_of(st.integers(0, 3), st.integers(0, 30)),
    st.sampled_from([None, *"abcdef"]),
    st.sampled_from(["", "", "p", "q"]),
    st.sampled_from([0.25, 0.5, 1.0]),
)
_PREFIXED = st.builds(
    Submit,
    st.integers(12, 30),
    st.integers(0, 12),
    st.sampled_from([None, "a"]),
    st.sampled_from(["p", "q", "r"]),
    st.just(0.8),
)
_EVENTS = st.lists(
    st.one_of(
        _SUBMITS,
        _SUBMITS,
        st.builds(Abort, st.integers(0, 40)),
        st.builds(Load, st.sampled_from("abz")),
        st.builds(Pass, st.sampled_from([0.001, 0.03, 0.1, 0.3, 1.0])),
    ),
    max_size=80,
)
_MAX_LORAS = st.integers(1, 4)
_END_S = 1e6


class _Single:
    """Takes one step after the other, with an engine that has `step`."""

    def __init__(self, engine: Engine | PlainEngine) -> None:
        self.engine = engine
        self.free_s = 0.0
        self.steps: list[Step] = []

    def advance(self, until: float) -> None:
        while self.free_s < until and (step := self.engine.step(now=self.free_s)):
            self.steps.append(step)
            self.free_s = step.ended_s


class _Many:
    """Takes many at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.free_s = 0.0
        self.first_tokens: list[Timeline] = []
        self.finished: list[Timeline] = []

    def advance(self, until: float) -> None:
        result = self.engine.advance(now=self.free_s, until=until)
        self.free_s = result.ended_s
        self.first_tokens += result.first_tokens
        self.finished += result.finished


Event = Submit | Abort | Load | Pass


def _play(driver: _Single | _Many, events: list[Event]) -> None:
    now = 0.0
    for number, event in enumerate([*events, Pass(_END_S)]):
        match event:
            case Pass():
                now += event.time_s
                driver.advance(now)
                driver.free_s = max(driver.free_s, now)
            case Submit():
                driver.engine.submit(event.request(number), now=now)
            case Abort():
                driver.engine.abort(str(event.index))
            case Load():
                driver.free_s += driver.engine.load_adapter(event.adapter)


def _engine(max_loras: int, profile: EngineProfile = SMALL) -> Engine:
    return Engine(profile, max_loras=max_loras, max_cpu_loras=max_loras + 1, ranks=RANKS)


@settings(max_examples=3 * settings().max_examples)
@given(_EVENTS, _MAX_LORAS)
def test_each_step_is_that_of_the_rules_written_out(events: list[Event], max_loras: int) -> None:
    fast = _Single(_engine(max_loras))
    plain = _Single(
        PlainEngine(SMALL, max_loras=max_loras, max_cpu_loras=max_loras + 1, ranks=RANKS)
    )
    _play(plain, events)
    _play(fast, events)

    assert plain.steps == fast.steps


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.one_of(_PREFIXED, st.just(Pass(0.1)), st.just(Pass(1.0))), max_size=60))
def test_shared_beginnings_are_found_and_evicted_as_single_blocks_are(events: list[Event]) -> None:
    profile = replace(SMALL, kv_capacity_tokens=70)
    fast = _Single(_engine(2, profile))
    plain = _Single(PlainEngine(profile, max_loras=2, max_cpu_loras=3, ranks=RANKS))
    _play(plain, events)
    _play(fast, events)

    assert plain.steps == fast.steps


@settings(max_examples=3 * settings().max_examples)
@given(_EVENTS, _MAX_LORAS)
def test_many_steps_at_once_are_equal_to_single_steps(events: list[Event], max_loras: int) -> None:
    single, many = _Single(_engine(max_loras)), _Many(_engine(max_loras))
    _play(single, events)
    _play(many, events)
    assert isinstance(single.engine, Engine)

    assert many.first_tokens == [t for step in single.steps for t in step.first_tokens]
    assert many.finished == [t for step in single.steps for t in step.finished]
    assert many.free_s == single.free_s
    assert many.engine.stats == single.engine.stats == EngineStats()
    assert many.engine.counters == single.engine.counters
    assert many.engine.gpu_adapters == single.engine.gpu_adapters
    assert many.engine.cpu_adapters == single.engine.cpu_adapters


@settings(max_examples=2 * settings().max_examples)
@given(_EVENTS, _MAX_LORAS, st.integers(1, 40))
def test_in_the_middle_too_the_state_and_the_page_are_those_of_single_steps(
    events: list[Event], max_loras: int, cut: int
) -> None:
    single, many = _Single(_engine(max_loras)), _Many(_engine(max_loras))
    now = sum(event.time_s for event in events[:cut] if isinstance(event, Pass)) + 0.25
    for driver in (single, many):
        for number, event in enumerate(events[:cut]):
            if isinstance(event, Submit):
                driver.engine.submit(event.request(number), now=0.0)
        driver.advance(now)
    assert isinstance(single.engine, Engine)

    assert many.engine.stats == single.engine.stats
    assert many.engine.running == single.engine.running
    assert many.engine.waiting == single.engine.waiting
    assert many.engine.report(now=now) == single.engine.report(now=now)
    for request in single.engine.running + single.engine.waiting:
        assert many.engine.generated_tokens(request.id) == single.engine.generated_tokens(
            request.id
        )


@given(_EVENTS, _MAX_LORAS)
def test_the_page_says_what_held_at_the_end_of_the_last_step(
    events: list[Event], max_loras: int
) -> None:
    """Oracle: the steps themselves, and a count of requests between first and last token."""
    driver = _Single(_engine(max_loras))
    assert isinstance(driver.engine, Engine)
    for number, event in enumerate(events):
        if isinstance(event, Submit):
            driver.engine.submit(event.request(number), now=0.0)
    active: set[str] = set()
    shown: dict[str, float] = {}
    read, read_s, num_steps = dict[str, float](), float("-inf"), count()  # a reader now and then
    stats, num_generated = EngineStats(), 0
    open_requests: dict[str, str] = {}
    while step := driver.engine.step(now=driver.free_s):
        before = driver.engine.report(now=step.ended_s - 1e-9)

        assert before.stats == stats
        assert before.num_generated_tokens == num_generated
        assert before.active_adapters == active
        assert dict(before.adapter_log) == shown
        driver.free_s = step.ended_s
        stats = step.stats
        num_generated += len(step.tokens)
        open_requests |= {t.request.id: t.request.adapter or "" for t in step.first_tokens}
        for timeline in step.finished:
            del open_requests[timeline.request.id]
        active = set(open_requests.values()) - {""}
        shown |= dict.fromkeys(active, step.ended_s)
        after = driver.engine.report(now=step.ended_s)

        assert after.stats == stats
        assert after.num_generated_tokens == num_generated
        assert after.active_adapters == active
        times = [seen_s for _, seen_s in after.adapter_log]

        assert dict(after.adapter_log) == shown
        assert times == sorted(times, reverse=True)
        if next(num_steps) % 3 == 0:
            news = driver.engine.report(now=step.ended_s, since_s=read_s)
            read |= dict(news.adapter_log)
            read_s = news.shown_s
            assert read == shown


@pytest.mark.parametrize("until", [0.0, 5.0])
def test_an_engine_without_work_stays_where_it_is(until: float) -> None:
    engine = _engine(1)

    assert engine.advance(now=3.0, until=until).ended_s == 3.0
    assert engine.counters.num_steps == 0


def test_a_step_that_began_before_the_end_is_taken_whole() -> None:
    engine = _engine(1)
    engine.submit(EngineRequest("r", 10, 2), now=0.0)
    result = engine.advance(now=0.0, until=1e-9)

    assert engine.counters.num_steps == 1
    assert result.ended_s > 1e-9
    assert engine.report(now=1e-9).stats == EngineStats()
    assert engine.report(now=result.ended_s).stats.num_running == 1


def test_an_engine_whose_last_request_was_aborted_reports_that_it_is_idle() -> None:
    engine = _engine(1)
    engine.submit(EngineRequest("r", 10, 20, "a"), now=0.0)
    first = engine.advance(now=0.0, until=0.05)
    engine.abort("r")
    engine.advance(now=first.ended_s, until=1.0)
    report = engine.report(now=1.0)

    assert report.stats == EngineStats()
    assert report.active_adapters == frozenset()
    assert [adapter for adapter, _ in report.adapter_log] == ["a"]
