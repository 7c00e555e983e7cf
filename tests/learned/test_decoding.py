"""What a token costs each running request, learned from an endpoint's reports."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, inf
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs, Decode
from extproc.learned.decoding import MAX_INTERVAL_S, MAX_TOKEN_S, Decoding
from extproc.pods.pool import Pool
from tests.builders import address, endpoint, report

STEP_S, PER_REQUEST_S = 0.01, 0.0005
SCRAPE_S = 0.1


class Engine:
    """An engine whose step takes `step_s` and `per_request_s` for each request that runs."""

    def __init__(self, step_s: float = STEP_S, per_request_s: float = PER_REQUEST_S) -> None:
        self.step_s, self.per_request_s = step_s, per_request_s
        self.now, self.ended_s, self.tokens = 0.0, 0.0, 0
        self.decoding = Decoding()

    def run(self, running: int, seconds: float = SCRAPE_S) -> None:
        """Run steps of so many requests, and let the last page be read."""
        self.now += seconds
        while running and self.ended_s + self.token_s(running) <= self.now:
            self.ended_s += self.token_s(running)
            self.tokens += running
        self.ended_s = self.ended_s if running else self.now
        self.read(running)

    def token_s(self, running: float) -> float:
        return self.step_s + self.per_request_s * running

    def read(self, running: int) -> None:
        made = report(num_running=running, generated_tokens=self.tokens)
        self.decoding.reported(made, now=self.now)

    def serve(self, batches: Iterable[int], seconds: float = 2.0) -> Costs:
        """Run each of `batches` for some seconds; return the costs that are learned."""
        for running in batches:
            for _ in range(round(seconds / SCRAPE_S)):
                self.run(running)
        return Costs(decode=self.decoding.decode)


@given(st.floats(0.005, 0.03), st.floats(0.00005, 0.0005), st.integers(1, 60))
def test_it_settles_at_what_a_token_takes(
    step_s: float, per_request_s: float, running: int
) -> None:
    engine = Engine(step_s, per_request_s)
    learned = engine.serve([running], seconds=4.0).decode

    assert learned is not None
    assert learned.token_s == pytest.approx(engine.token_s(running), rel=0.1)
    assert learned.num_running == pytest.approx(running)


@pytest.mark.parametrize("running", [10, 20, 50])
def test_it_follows_a_batch_that_doubles_within_about_a_second(running: int) -> None:
    engine = Engine()
    engine.serve([running] * 10)
    first, second = engine.token_s(running), engine.token_s(2 * running)
    soon = engine.serve([2 * running], seconds=1.2).decode
    later = engine.serve([2 * running], seconds=1.8).decode

    assert soon is not None
    assert later is not None
    assert soon.token_s > (first + second) / 2
    assert soon.num_running > 1.5 * running
    assert later.token_s == pytest.approx(second, rel=0.05)
    assert later.num_running == pytest.approx(2 * running, rel=0.1)


def test_nothing_is_known_before_the_reports_show_it() -> None:
    assert Costs().most_running(0.01) == inf
    assert Engine().serve([0]).decode is None
    assert Engine().serve([8], seconds=0.2).decode is None


def test_an_engine_that_does_not_count_tokens_teaches_nothing() -> None:
    decoding = Decoding()
    for tick in range(100):
        decoding.reported(report(num_running=8), now=tick * SCRAPE_S)

    assert decoding.decode is None


def test_only_what_is_too_slow_has_a_bound() -> None:
    costs = Costs(decode=Decode(40, 0.03))

    assert costs.most_running(0.03) == inf
    assert costs.most_running(0.02) == pytest.approx(40 * 2 / 3)
    assert costs.most_running(0.0001) == 1.0


def test_what_nobody_has_even_alone_is_known_once_one_was_alone() -> None:
    engine = Engine()
    before, after = engine.serve([40]), engine.serve([1, 40])
    alone_s = engine.token_s(1)

    assert Costs().can_have(0.0001)
    assert before.can_have(0.9 * alone_s)
    assert not before.can_have(0.9 * engine.token_s(40) / 40)
    assert after.can_have(1.1 * alone_s)
    assert not after.can_have(0.9 * alone_s)


@given(st.floats(0.005, 0.02), st.floats(0.0002, 0.0005), st.integers(20, 60), st.floats(1.3, 3))
def test_an_engine_held_at_the_bound_becomes_as_fast_as_it_has_to_be(
    step_s: float, per_request_s: float, most: int, excess: float
) -> None:
    engine = Engine(step_s, per_request_s)
    tpot_s, running = engine.token_s(most), round(most * excess)
    held = []
    for _ in range(300):
        bound = engine.serve([running], seconds=SCRAPE_S).most_running(tpot_s)
        running = running + 1 if running < bound else min(running, floor(bound))
        held.append(running)

    assert mean(held[150:]) == pytest.approx(most, rel=0.1)


def test_time_without_work_makes_nothing_forgotten() -> None:
    engine = Engine()
    before = engine.serve([5, 60] * 4)

    assert engine.serve([0] * 1000) == before


def test_a_restart_of_the_counter_teaches_nothing() -> None:
    engine = Engine()
    before = engine.serve([5, 60] * 4)
    engine.tokens = 3
    engine.read(60)

    assert engine.decoding.decode == before.decode
    after = engine.serve([5, 60] * 4)
    assert after.most_running(0.03) == pytest.approx(before.most_running(0.03), rel=0.1)


def test_a_gap_without_reports_teaches_nothing() -> None:
    engine = Engine()
    before = engine.serve([5, 60] * 4)
    engine.now += MAX_INTERVAL_S + 1
    engine.read(60)

    assert engine.decoding.decode == before.decode


def test_a_stall_counts_little_and_is_soon_forgotten() -> None:
    engine = Engine()
    before = engine.serve([60] * 10).decode
    for _ in range(10):
        engine.now += 1.0
        engine.read(60)
    engine.ended_s = engine.now
    just_after = engine.serve([60], seconds=SCRAPE_S).decode
    later = engine.serve([60], seconds=4.0).decode

    assert before is not None
    assert just_after is not None
    assert later is not None
    assert before.token_s < just_after.token_s < 3 * before.token_s
    assert later.token_s == pytest.approx(before.token_s, rel=0.1)


def test_a_hang_that_makes_a_token_impossibly_slow_is_left_out() -> None:
    engine = Engine()
    for _ in range(round(2 * MAX_TOKEN_S)):
        engine.now += 1.0
        engine.read(60)
    engine.tokens += 60
    engine.now += 1.0
    engine.read(60)

    assert engine.decoding.decode is None


@given(
    st.lists(
        st.tuples(
            st.floats(-1, 10), st.integers(0, 10**6), st.one_of(st.none(), st.integers(0, 10**15))
        ),
        max_size=60,
    ),
    st.floats(1e-6, 10.0),
)
def test_whatever_endpoints_report_the_bound_is_at_least_one(
    reports: list[tuple[float, int, int | None]], tpot_s: float
) -> None:
    decoding, now = Decoding(), 0.0
    for seconds, running, tokens in reports:
        now += seconds
        decoding.reported(report(num_running=running, generated_tokens=tokens), now=now)

    assert Costs(decode=decoding.decode).most_running(tpot_s) >= 1


@pytest.mark.parametrize("since_s", [12.3, 20.0, 33.3])
@pytest.mark.parametrize("seconds", [0.7, 5.0, 20.0])
def test_each_running_request_gets_its_share_of_the_tokens(since_s: float, seconds: float) -> None:
    engine = Engine()
    engine.serve([20] * 40)
    tokens = engine.decoding.tokens_between(since_s, since_s + seconds)

    assert tokens == pytest.approx(seconds / engine.token_s(20), rel=0.02, abs=2)


def test_an_engine_that_begins_with_a_report_gives_each_request_its_share() -> None:
    engine = Engine()
    engine.serve([0] * 5 + [8] * 5 + [0])
    tokens = engine.decoding.tokens_between(10.5, 19.5)

    assert tokens == pytest.approx(9 / engine.token_s(8), rel=0.05)


def test_the_tokens_of_the_last_minutes_are_known_and_no_others() -> None:
    engine = Engine()
    assert engine.decoding.tokens_between(0.0, 0.0) is None
    engine.serve([8] * 100)  # 200 seconds

    assert engine.decoding.tokens_between(20.0, 199.0) is None
    assert engine.decoding.tokens_between(100.0, 199.0) is not None
    # Its report is under way, for which nobody may have asked yet.
    at_once, later = (engine.decoding.tokens_between(100.0, at_s) for at_s in (200.5, 202.0))
    assert at_once is not None
    assert later is not None
    assert later - at_once == pytest.approx(1.5 / engine.token_s(8), rel=0.1)
    assert engine.decoding.tokens_between(100.0, 203.0) is None


def test_tokens_before_a_restart_are_not_mixed_with_those_after_it() -> None:
    engine = Engine()
    engine.serve([8] * 10)
    engine.tokens = 0
    engine.serve([8] * 10)

    assert engine.decoding.tokens_between(10.0, 30.0) is None
    assert engine.decoding.tokens_between(25.0, 30.0) is not None


def test_the_view_of_an_endpoint_has_what_was_learned_of_it_beside_its_other_costs() -> None:
    pool, engine = Pool(), Engine()
    pool.set_endpoints([endpoint(1), endpoint(2)])
    for tick in range(1, 100):
        engine.run(30)
        made = report(num_running=30, generated_tokens=engine.tokens)
        pool.record_report(address(1), made, taken_at_s=tick * SCRAPE_S)
    busy, new = pool.snapshot(now=9.9).endpoints

    assert busy.costs.most_running(engine.token_s(30) / 2) == pytest.approx(15, rel=0.1)
    assert new.costs.most_running(engine.token_s(30) / 2) == inf
    assert busy.costs.cold_load_s == new.costs.cold_load_s


@pytest.mark.parametrize("has_run_through", [True, False])
def test_a_long_interval_counts_if_a_request_ran_through_it_as_the_engine_may_have_been_idle(
    has_run_through: bool,
) -> None:
    decoding = Decoding()
    for number in range(20):
        made = report(num_running=1, generated_tokens=100 * number)
        decoding.reported(made, now=2.0 * number, has_run_through=has_run_through)

    learned = decoding.decode
    assert (learned is not None and learned.token_s == pytest.approx(0.02)) == has_run_through
    assert (learned is None) != has_run_through
    assert (decoding.unseen_s > 0) != has_run_through

    for number in range(40, 50):
        made = report(num_running=1, generated_tokens=100 * number)
        decoding.reported(made, now=2.0 * number, has_run_through=True)
    assert decoding.unseen_s == 0
