from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.pace import (
    AGE_SHARE,
    LATE_GROWTH,
    LATE_S,
    MAX_QUIET_S,
    QUIET_AFTER_S,
    Pace,
    Quiet,
)
from extproc.types import LoadReport

INTERVAL_S, EXPIRY_S, DURATION_S = 1 / 16, 2.0, 1 / 1024  # whole powers of 2: exact
EMPTY = LoadReport(work_tokens=7)


class Pod:
    """A pod that is asked as a loop does it: looked at after each interval."""

    def __init__(self, *, interval_s: float = INTERVAL_S, expiry_s: float = EXPIRY_S) -> None:
        self.pace = Pace(interval_s, expiry_s)
        self.quiet = Quiet(self.pace)
        self.now = 100.0
        self.num_picks: int | None = 0
        self.report = EMPTY
        self.duration_s = DURATION_S

    def ask(self) -> None:
        asked_at_s = self.now
        self.quiet.asked()
        self.now += self.duration_s
        self.quiet.reported(self.report, self.num_picks, asked_at_s=asked_at_s, taken_at_s=self.now)

    def next_s(self) -> float:
        """Ask, and return the time until it is to be asked again."""
        began_s = self.now
        self.ask()
        self.now = max(self.now, began_s + self.pace.interval_s)
        while self.quiet.can_wait(self.num_picks, now=self.now):
            self.now += self.pace.interval_s
        return self.now - began_s

    def ask_for(self, seconds: float) -> list[float]:
        until_s, rests = self.now + seconds, list[float]()
        while self.now < until_s:
            rests.append(self.next_s())
        return rests


def test_a_quiet_pod_is_asked_step_by_step_less_often_up_to_the_bound() -> None:
    rests = Pod(expiry_s=60.0).ask_for(30.0)

    assert rests[: int(QUIET_AFTER_S / INTERVAL_S)] == [INTERVAL_S] * 16
    assert rests == sorted(rests)
    assert len(set(rests)) > 4
    assert rests[-1] == MAX_QUIET_S


@given(
    interval_s=st.floats(0.01, 3.0),
    expiry_s=st.floats(0.02, 10.0),
    duration_s=st.floats(0.0, 0.005),
    delays_s=st.lists(st.floats(0.0, 0.3)),
)
def test_no_report_gets_older_by_it_than_half_of_its_expiry(
    interval_s: float, expiry_s: float, duration_s: float, delays_s: list[float]
) -> None:
    pod = Pod(interval_s=interval_s, expiry_s=expiry_s)
    pod.duration_s = duration_s
    for delay_s in delays_s:
        pod.pace.delayed(delay_s)
    taken_at_s, ages = None, list[float]()
    for _ in range(60):
        pod.next_s()
        if taken_at_s is not None:
            ages.append(pod.now + duration_s - taken_at_s)
        taken_at_s = pod.now + duration_s
    most_s = max(interval_s, duration_s, expiry_s * AGE_SHARE)

    assert max(ages) <= most_s + 1e-6


def test_news_of_any_kind_brings_the_usual_interval_back_at_once() -> None:
    for change in range(5):
        pod = Pod()
        assert pod.ask_for(10.0)[-1] > 0.5
        if change == 0:
            pod.report = LoadReport(work_tokens=8)
        elif change == 1:
            pod.report = LoadReport(num_running=1, work_tokens=7)
        elif change == 2:
            pod.num_picks = 1
        elif change == 3:
            pod.num_picks = None
        else:
            pod.quiet.asked()  # and no report comes

        assert pod.next_s() == INTERVAL_S
        assert pod.next_s() == INTERVAL_S


@pytest.mark.parametrize("num_picks", [1, None])
def test_a_pick_ends_a_long_rest_even_if_its_request_has_ended(num_picks: int | None) -> None:
    pod = Pod()
    pod.ask_for(10.0)
    pod.ask()

    assert pod.quiet.can_wait(0, now=pod.now)
    assert not pod.quiet.can_wait(num_picks, now=pod.now)


@pytest.mark.parametrize(
    "report",
    [
        LoadReport(num_running=1),
        LoadReport(num_waiting=1),
        LoadReport(has_counts=False),
    ],
)
def test_a_pod_that_may_have_requests_is_never_quiet(report: LoadReport) -> None:
    pod = Pod()
    pod.report = report

    assert pod.ask_for(10.0) == [INTERVAL_S] * 160


def test_a_pod_is_not_quiet_between_a_question_and_its_report() -> None:
    pod = Pod()
    pod.ask_for(10.0)
    pod.quiet.asked()

    assert not pod.quiet.can_wait(0, now=pod.now)


def test_a_late_event_loop_asks_all_pods_less_often_within_the_age_of_reports() -> None:
    pace, seen = Pace(INTERVAL_S, EXPIRY_S), list[float]()
    for _ in range(30):
        pace.delayed(2 * LATE_S)
        seen.append(pace.interval_s)

    assert seen == sorted(seen)
    assert seen[0] > INTERVAL_S
    assert seen[-1] == EXPIRY_S * AGE_SHARE - 2 * LATE_S


def test_an_event_loop_in_time_asks_at_the_usual_interval_again() -> None:
    pace = Pace(INTERVAL_S, EXPIRY_S)
    for _ in range(30):
        pace.delayed(1.0)
    for _ in range(60):
        pace.delayed(LATE_S)

    assert pace.interval_s == INTERVAL_S


def test_a_delay_now_and_then_changes_nothing_for_long() -> None:
    pace, seen = Pace(INTERVAL_S, EXPIRY_S), list[float]()
    for number in range(300):
        pace.delayed(2 * LATE_S if number % 4 == 0 else 0.0)
        seen.append(pace.interval_s)

    assert max(seen) == LATE_GROWTH * INTERVAL_S


def test_another_expiry_holds_at_once() -> None:
    pace = Pace(INTERVAL_S, 10.0)
    for _ in range(60):
        pace.delayed(LATE_S * 2)
    pace.configure(1.0)

    assert pace.interval_s == 0.5


def test_an_interval_that_is_configured_beyond_the_bounds_stays() -> None:
    pod = Pod(interval_s=5.0, expiry_s=6.0)
    pod.pace.delayed(1.0)

    assert pod.ask_for(50.0) == [5.0] * 10


def test_a_very_late_event_loop_does_not_ask_more_often_for_it() -> None:
    pace = Pace(INTERVAL_S, EXPIRY_S)
    for _ in range(60):
        pace.delayed(100.0)

    assert pace.interval_s == EXPIRY_S * AGE_SHARE / 2
