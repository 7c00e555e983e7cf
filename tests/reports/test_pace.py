from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.reports.pace import (
    AGE_SHARE,
    CALM_AFTER_S,
    GROWTH,
    LATE_GROWTH,
    LATE_S,
    LIST_S,
    MAX_S,
    PAGE_S,
    RECHECK_S,
    SPREAD,
    Rest,
    ScrapePace,
)

INTERVAL_S, EXPIRY_S, DURATION_S = 1 / 16, 2.0, 1 / 1024  # whole powers of 2: exact


class Pod:
    """A pod that is asked as a loop does it: looked at after each interval."""

    def __init__(self, *, interval_s: float = INTERVAL_S, pace: ScrapePace | None = None) -> None:
        self.pace = pace or ScrapePace(interval_s, EXPIRY_S)
        self.rest = Rest(self.pace, Random(1))
        self.now = 100.0
        self.is_expected = True

    def ask(self) -> None:
        self.rest.asked(self.now)
        self.now += DURATION_S
        self.longest_s = self.rest.longest_s
        self.rest.reported(self.now, is_expected=self.is_expected)

    def next_s(self) -> float:
        """Ask, and return the time until it is to be asked again."""
        began_s = self.now
        self.ask()
        self.now = max(self.now, began_s + self.pace.interval_s)
        while (wait_s := self.rest.wait_s(self.now, is_expected=self.is_expected)) is not None:
            self.now += wait_s
        return self.now - began_s

    def ask_for(self, seconds: float) -> list[float]:
        until_s, rests = self.now + seconds, list[float]()
        while self.now < until_s:
            rests.append(self.next_s())
        return rests


def test_a_pod_that_says_what_is_expected_is_asked_less_often_up_to_the_bound() -> None:
    pod = Pod()
    pod.ask_for(CALM_AFTER_S)
    rests = pod.ask_for(60.0)

    assert len(rests) < 60
    assert rests[:6] == sorted(rests[:6])
    assert len(set(rests[:6])) == 6
    assert all(MAX_S * (1 - 2 * SPREAD) <= rest_s <= MAX_S for rest_s in rests[-10:])


def test_a_new_pod_is_asked_at_each_interval_for_a_while_whatever_it_says() -> None:
    """Routers that do not tell each other open adapters at the start, and see it by reports."""
    rests = Pod().ask_for(CALM_AFTER_S - INTERVAL_S)

    assert set(rests) == {INTERVAL_S}


def test_pods_whose_times_grow_together_are_not_asked_at_the_same_moment() -> None:
    pods, rng = [Pod() for _ in range(20)], Random(1)
    for pod in pods:
        pod.rest._rng = rng
        pod.ask_for(30.0)

    assert max(pod.now for pod in pods) - min(pod.now for pod in pods) > 0.5


@pytest.mark.parametrize("kind", ["report", "known since", "failure"])
def test_a_surprise_of_any_kind_brings_the_interval_back_until_none_has_come_for_a_while(
    kind: str,
) -> None:
    pod = Pod()
    assert pod.ask_for(20.0)[-1] > 1.0
    if kind == "report":
        pod.is_expected = False
        pod.ask()
        pod.is_expected = True
    elif kind == "known since":
        pod.ask()
        assert pod.rest.wait_s(pod.now, is_expected=False) is None
    else:
        pod.rest.surprised(pod.now)

    rests = pod.ask_for(3.0)
    assert rests[: int(CALM_AFTER_S / INTERVAL_S)] == [INTERVAL_S] * 16
    assert rests[17] > INTERVAL_S


def test_a_pod_that_surprises_each_time_is_asked_at_each_interval() -> None:
    pod = Pod()
    pod.is_expected = False

    assert pod.ask_for(10.0) == [INTERVAL_S] * 160


def test_a_report_that_is_due_sooner_is_asked_for_once_and_from_there_the_time_grows() -> None:
    pod = Pod()
    pod.ask_for(60.0)
    pod.ask()
    calm_s = pod.rest.calm_s
    pod.now += 0.25
    assert pod.rest.wait_s(pod.now, is_expected=True) is not None
    assert pod.rest.hurry()
    assert pod.rest.wait_s(pod.now, is_expected=True) is None
    rests = pod.ask_for(20.0)

    assert calm_s > 1.0
    assert 0.25 < rests[0] < 0.25 * GROWTH + RECHECK_S
    assert rests == sorted(rests[:3]) + rests[3:]
    assert rests[-1] > 1.0


def test_a_pod_that_is_asked_at_each_interval_needs_no_hurry() -> None:
    pod = Pod()
    pod.is_expected = False
    pod.ask()

    assert not pod.rest.hurry()
    assert pod.next_s() == pytest.approx(INTERVAL_S)


def test_pods_whose_reports_are_due_sooner_count_as_often_against_the_budget() -> None:
    pace = ScrapePace(INTERVAL_S, EXPIRY_S, budget=0.001)
    pod = Pod(pace=pace)
    pod.ask_for(60.0)
    pod.ask()
    before = pace._wanted_per_s
    pod.now += 0.125
    pod.rest.hurry()
    pod.rest.asked(pod.now)

    assert before < 1.0
    assert pace._wanted_per_s > 2 * before


def test_a_pod_that_waits_is_looked_at_meanwhile() -> None:
    pod = Pod()
    pod.ask_for(20.0)
    pod.ask()

    assert pod.rest.wait_s(pod.now, is_expected=True) == RECHECK_S


@given(st.lists(st.booleans(), max_size=40), st.floats(0.001, 0.1))
def test_no_report_is_awaited_for_longer_than_was_said_when_the_last_came(
    expected: list[bool], budget: float
) -> None:
    pod = Pod(pace=ScrapePace(INTERVAL_S, EXPIRY_S, budget=budget))
    for is_expected in expected:
        pod.is_expected = is_expected
        assert pod.next_s() <= max(pod.longest_s, pod.pace.interval_s) + 1e-9


def test_pods_that_join_have_no_report_awaited_for_longer_than_was_said_before() -> None:
    """Else the reports of all others would expire when many pods join."""
    pod = Pod(pace=ScrapePace(INTERVAL_S, EXPIRY_S, budget=0.05))
    pod.ask_for(60.0)
    pod.ask()
    asked_at_s = pod.rest.asked_at_s
    for number in range(1_000):
        _ = Rest(pod.pace, Random(number))
    while (wait_s := pod.rest.wait_s(pod.now, is_expected=True)) is not None:
        pod.now += wait_s

    assert pod.pace.stretch > 50
    assert pod.now - asked_at_s <= pod.longest_s


def test_beyond_the_budget_the_time_grows_by_the_same_part_each_time() -> None:
    pod = Pod(pace=ScrapePace(INTERVAL_S, EXPIRY_S, budget=0.05))
    for number in range(100):
        _ = Rest(pod.pace, Random(number))
    rests = pod.ask_for(10 * CALM_AFTER_S)

    assert pod.pace.stretch > 5
    assert all(b <= a * GROWTH * 1.1 for a, b in pairwise(rests))


def test_many_pods_that_begin_at_once_soon_want_no_more_than_pods_at_rest() -> None:
    """Each wants twenty questions a second at first, and the budget lets it have few."""
    pace = ScrapePace(INTERVAL_S, EXPIRY_S, budget=0.05)
    pods = [Pod(pace=pace) for _ in range(1_000)]
    at_once = pace.stretch
    for _ in range(2):
        for pod in pods:
            pod.next_s()

    assert at_once > 50
    assert pace._wanted_per_s <= len(pods) / (MAX_S * (1 - SPREAD))


def test_where_models_are_rarely_listed_reports_are_at_most_half_of_their_expiry_apart() -> None:
    """Then it is they that show whether a pod answers."""
    pod = Pod(pace=ScrapePace(INTERVAL_S, EXPIRY_S, models_interval_s=600.0))

    assert 0.5 < max(pod.ask_for(60.0)) <= EXPIRY_S * AGE_SHARE


# --- the budget


def cost_of(pods: list[Pod], pace: ScrapePace, models_interval_s: float) -> float:
    """Return CPU seconds a second, by what is asked within a minute, for costs as assumed."""
    reports = sum(len(pod.ask_for(60.0)) for pod in pods) / 60
    return reports * PAGE_S + len(pods) / pace.models_interval_s * LIST_S


@pytest.mark.parametrize("num_pods", [1, 16, 100, 1_000])
@pytest.mark.parametrize("is_expected", [True, False])
def test_all_pods_together_never_take_more_than_the_budget(
    num_pods: int, is_expected: bool
) -> None:
    pace = ScrapePace(0.05, EXPIRY_S, budget=0.05)
    pods = [Pod(pace=pace) for _ in range(num_pods)]
    for pod in pods:
        pod.is_expected = is_expected
        pod.ask_for(60.0)

    assert cost_of(pods, pace, 1.0) <= 0.05 * 1.1


def test_beyond_the_budget_all_pods_wait_longer_by_one_factor() -> None:
    pace = ScrapePace(0.05, EXPIRY_S, budget=0.05)
    pods = [Pod(pace=pace) for _ in range(100)]
    stretch = pace.stretch

    assert stretch == pytest.approx((100 * 20 * PAGE_S + 100 * LIST_S) / 0.05)
    assert pace.interval_s == pytest.approx(0.05 * stretch)
    assert pace.models_interval_s == pytest.approx(stretch)
    for pod in pods:
        pod.rest.close()
    assert pace.stretch == 1.0


def test_costs_are_what_was_measured_and_one_that_stands_out_changes_little() -> None:
    pace, cheap = (ScrapePace(0.05, EXPIRY_S, budget=0.001) for _ in range(2))
    _ = Rest(pace, Random(1)), Rest(cheap, Random(1))
    before = pace.stretch
    pace.read_page(60.0)
    after = pace.stretch
    for _ in range(1_000):
        cheap.read_page(PAGE_S / 100)
        cheap.read_list(LIST_S / 100)

    assert before < after < 1.1 * before
    assert cheap.stretch == 1.0


def test_another_budget_holds_at_once() -> None:
    pace = ScrapePace(0.05, EXPIRY_S, budget=1.0)
    _ = [Rest(pace, Random(1)) for _ in range(100)]
    before = pace.stretch
    pace.configure(EXPIRY_S, 0.01)

    assert before == 1.0
    assert pace.stretch > 10


# --- a late event loop


def test_a_late_event_loop_asks_all_pods_less_often_within_the_age_of_reports() -> None:
    pace, seen = ScrapePace(INTERVAL_S, EXPIRY_S), list[float]()
    for _ in range(30):
        pace.delayed(2 * LATE_S, 0.0)
        seen.append(pace.interval_s)

    assert seen == sorted(seen)
    assert seen[0] > INTERVAL_S
    assert seen[-1] == EXPIRY_S * AGE_SHARE - 2 * LATE_S


def test_a_loop_that_others_make_late_asks_as_often_as_before() -> None:
    """What it asks for is a small part of what it does: less of it would leave no time."""
    pace = ScrapePace(INTERVAL_S, EXPIRY_S)
    _ = Rest(pace, Random(1))
    for _ in range(30):
        pace.delayed(2 * LATE_S, 0.9)

    assert pace.interval_s == INTERVAL_S


def test_an_event_loop_in_time_asks_at_the_usual_interval_again() -> None:
    pace = ScrapePace(INTERVAL_S, EXPIRY_S)
    for _ in range(30):
        pace.delayed(1.0, 0.0)
    for _ in range(60):
        pace.delayed(LATE_S, 0.0)

    assert pace.interval_s == INTERVAL_S


def test_a_delay_now_and_then_changes_nothing_for_long() -> None:
    pace, seen = ScrapePace(INTERVAL_S, EXPIRY_S), list[float]()
    for number in range(300):
        pace.delayed(2 * LATE_S if number % 4 == 0 else 0.0, 0.0)
        seen.append(pace.interval_s)

    assert max(seen) == LATE_GROWTH * INTERVAL_S


def test_another_expiry_holds_at_once() -> None:
    pace = ScrapePace(INTERVAL_S, 10.0)
    for _ in range(60):
        pace.delayed(LATE_S * 2, 0.0)
    pace.configure(1.0)

    assert pace.interval_s == 0.5


def test_an_interval_that_is_configured_beyond_the_bounds_stays() -> None:
    pod = Pod(interval_s=5.0)
    pod.pace.delayed(1.0, 0.0)

    assert pod.ask_for(50.0) == [5.0] * 10


def test_a_very_late_event_loop_does_not_ask_more_often_for_it() -> None:
    pace = ScrapePace(INTERVAL_S, EXPIRY_S)
    for _ in range(60):
        pace.delayed(100.0, 0.0)

    assert pace.interval_s == EXPIRY_S * AGE_SHARE / 2
