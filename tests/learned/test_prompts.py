"""The estimate of the prompts ahead: what adds to it, and what corrects it."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs
from extproc.learned.prompts import MAX_AGE_S, MAX_QUEUE_S, UNSEEN_S, Prompts
from tests.builders import report

COSTS = Costs(prompt_s_per_byte=0.001, cold_load_s=0.5)


def prompts(*work_s: float) -> Prompts:
    """A queue of requests of so many seconds that were sent at 10.0."""
    made = Prompts(COSTS)
    for number, each in enumerate(work_s):
        made.picked(str(number), int(1000 * each), 1, 0.0, 10.0, 10.0)
    return made


def hear(made: Prompts, at_s: float, **fields: Any) -> float:
    """Record a report; return the seconds that are ahead then."""
    made.reported(report(**fields), asked_at_s=at_s, now=at_s)
    return made.done_s - at_s


def test_work_begins_when_it_was_sent_or_after_what_is_ahead() -> None:
    made = prompts(2.0)
    made.picked("x", 1000, 1, 0.0, 9.5, 10.0)
    assert made.done_s == 13.0
    made.picked("y", 500, 1, 0.5, 19.5, 20.0)

    assert made.done_s == 20.5


@given(
    st.lists(st.tuples(st.integers(0, 10**20), st.floats(0, 1e9), st.floats(0, 100)), max_size=9),
)
def test_a_request_never_takes_work_away_and_adds_no_more_than_the_bound(
    requests: list[tuple[int, float, float]],
) -> None:
    made, now = Prompts(COSTS), 0.0
    for num_bytes, age_s, elapsed_s in requests:
        now, before_s = now + elapsed_s, made.done_s
        made.picked(str(now), num_bytes, 1, 0.0, now - age_s, now)

        assert before_s <= made.done_s <= now + MAX_QUEUE_S


def test_the_bound_is_that_of_the_moment_not_of_the_request() -> None:
    made = prompts(2 * MAX_QUEUE_S)
    made.picked("x", 1000, 1, 0.0, 10.0 - MAX_AGE_S, 10.0)

    assert made.done_s == 10.0 + MAX_QUEUE_S


@pytest.mark.parametrize(("age_s", "done_s"), [(MAX_AGE_S, 12.0), (MAX_AGE_S + 0.1, 11.0)])
def test_an_old_request_adds_nothing(age_s: float, done_s: float) -> None:
    made = prompts(1.0)
    made.picked("x", 1000, 1, 0.0, 10.0 - age_s, 10.0)

    assert made.done_s == done_s
    assert made.sent_bytes == 1000 * (done_s - 10.0)


# --- ends and first tokens --------------------------------------------------------------------


def test_what_has_ended_is_not_ahead() -> None:
    made = prompts(9.0, 0.5, 0.25)
    made.ended("unknown", True, 10.0)
    made.ended("0", False, 10.0)
    assert made.done_s == 10.75
    made.bound(20.0)

    assert made.done_s == 10.75


def test_what_was_sent_before_a_request_with_a_first_token_is_computed() -> None:
    made = prompts(5.0)
    for pick_id, at_s in (("x", 10.1), ("y", 10.1), ("z", 11.0)):
        made.picked(pick_id, 2000, 1, 0.0, at_s, at_s)
    made.ended("x", True, 10.4)
    made.had_first_token(10.1, now=10.5)

    assert made.done_s == 14.5  # y and z, one after the other


# --- reports ----------------------------------------------------------------------------------


def test_what_an_engine_counts_as_first_tokens_is_computed() -> None:
    made = prompts(1.0, 2.0, 3.0)
    assert hear(made, 10.0, num_waiting=3, num_first_tokens=70) == 6.0
    assert hear(made, 11.0, num_running=1, num_waiting=2, num_first_tokens=70) == 5.0
    assert hear(made, 11.5, num_running=2, num_waiting=1, num_first_tokens=71) == 4.5
    assert hear(made, 12.0, num_running=3, num_first_tokens=72) == 3.0

    assert hear(made, 13.0, num_running=3, num_first_tokens=73) == 0.0


def test_a_first_token_that_was_known_before_the_report_counts_once() -> None:
    made = prompts(1.0, 1.0, 1.0, 1.0)
    hear(made, 10.0, num_waiting=4, num_first_tokens=0)
    made.ended("0", True, 10.1)
    made.ended("1", False, 10.1)

    assert hear(made, 10.1, num_running=1, num_waiting=1, num_first_tokens=1) == 2.0
    assert hear(made, 10.2, num_running=1, num_first_tokens=2) == 1.0


def test_a_counter_that_falls_takes_nothing() -> None:
    made = prompts(1.0, 1.0)
    hear(made, 10.0, num_running=2, num_first_tokens=70)
    hear(made, 10.1, num_running=2, num_first_tokens=0)

    assert hear(made, 10.2, num_running=2, num_first_tokens=1) == 1.0


def test_requests_alike_are_computed_one_by_one() -> None:
    made = Prompts(COSTS)
    made.picked("x", 1000, 3, 0.0, 10.0, 10.0)
    hear(made, 10.0, num_running=3, num_first_tokens=0)
    assert made.done_s == 13.0
    hear(made, 10.1, num_running=3, num_first_tokens=2)

    assert made.done_s == pytest.approx(11.1)
    assert made.sent_bytes == 3000


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "ahead_s"), [(0, 0, 0), (1, 0, 1), (9, 0, 1), (2, 1, 2)]
)
def test_of_what_a_report_can_show_no_more_is_ahead_than_waits_and_one_that_runs(
    num_running: int, num_waiting: int, ahead_s: float
) -> None:
    made = prompts(*[1.0] * 5)

    left_s = hear(made, 10.0 + UNSEEN_S, num_running=num_running, num_waiting=num_waiting)
    assert max(0.0, left_s) == ahead_s


def test_what_a_report_need_not_show_yet_stays_ahead() -> None:
    made = prompts(1.0, 1.0)

    assert hear(made, 10.0 + 0.5 * UNSEEN_S) == 1.5


@pytest.mark.parametrize(("num_deferred", "ahead_s"), [(None, 3.0), (0, 3.0), (2, 2.0), (3, 0.0)])
def test_what_waits_is_ahead_whatever_the_clock_says_but_for_those_that_wait_for_a_slot(
    num_deferred: int | None, ahead_s: float
) -> None:
    """Three wait by a report that was asked for before the last one was sent."""
    made = prompts(0.5, 0.5, 0.5, 0.5)
    made.picked("last", 1500, 1, 0.0, 10.5, 10.5)
    made.done_s = 10.0
    told = report(num_running=1, num_waiting=3, num_deferred=num_deferred)
    made.reported(told, asked_at_s=10.25, now=10.5)

    assert made.done_s == (10.25 + ahead_s if ahead_s else 10.0)


@given(
    st.lists(st.integers(0, 10**9), max_size=9), st.integers(0, 99), st.integers(0, 99), st.data()
)
def test_an_endpoint_that_is_idle_by_its_reports_has_nothing_ahead(
    sizes: list[int], num_running: int, num_waiting: int, data: st.DataObject
) -> None:
    made = prompts(*[size / 1000 for size in sizes])
    for at_s in sorted(data.draw(st.lists(st.floats(10.0, 30.0), max_size=9))):
        running, waiting = data.draw(st.integers(0, num_running)), num_waiting
        hear(made, at_s, num_running=running, num_waiting=waiting)
        assert made.done_s <= at_s + MAX_QUEUE_S

    assert hear(made, 30.0 + UNSEEN_S) <= 0


def test_after_a_restart_nothing_is_ahead() -> None:
    made = prompts(9.0)
    hear(made, 10.0, num_running=1, num_first_tokens=7)
    made.restarted()
    assert made.done_s == -inf
    made.picked("x", 1000, 1, 0.0, 20.0, 20.0)

    assert hear(made, 20.0, num_waiting=1, num_first_tokens=9) == 1.0


def test_it_is_remembered_how_much_was_sent_by_a_time() -> None:
    prompts = Prompts(Costs())
    for number in range(3):
        prompts.picked(f"r-{number}", 100, 1, 0.0, float(number), float(number))

    assert [prompts.sent_by(at_s) for at_s in (-1.0, 0.0, 1.5, 9.0)] == [0, 100, 200, 300]
