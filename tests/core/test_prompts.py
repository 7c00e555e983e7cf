"""The estimate of the prompts ahead: what adds to it, and what takes it back."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.costs import Costs
from extproc.core.prompts import MAX_AGE_S, MAX_QUEUE_S, Prompts

COSTS = Costs(prompt_s_per_byte=0.001, cold_load_s=0.5)


def prompts(work_s: float = 0.0) -> Prompts:
    """A queue of so many seconds at 10.0."""
    made = Prompts(COSTS)
    made.add(work_s, at_s=10.0, now=10.0)
    return made


def test_work_begins_when_it_was_sent_or_after_what_is_ahead() -> None:
    made = prompts(2.0)
    made.add(1.0, at_s=9.5, now=10.0)
    assert made.done_s == 13.0
    made.add(1.0, at_s=19.5, now=20.0)

    assert made.done_s == 20.5


@given(
    st.lists(st.tuples(st.floats(0, 1e20), st.floats(0, 1e9), st.floats(0, 100)), max_size=9),
)
def test_a_request_never_takes_work_away_and_adds_no_more_than_the_bound(
    requests: list[tuple[float, float, float]],
) -> None:
    made, now = Prompts(COSTS), 0.0
    for work_s, age_s, elapsed_s in requests:
        now, before_s = now + elapsed_s, made.done_s
        made.add(work_s, at_s=now - age_s, now=now)

        assert before_s <= made.done_s <= now + MAX_QUEUE_S


def test_the_bound_is_that_of_the_moment_not_of_the_request() -> None:
    made = prompts(2 * MAX_QUEUE_S)
    made.add(1.0, at_s=10.0 - MAX_AGE_S, now=10.0)

    assert made.done_s == 10.0 + MAX_QUEUE_S


@pytest.mark.parametrize(("age_s", "done_s"), [(MAX_AGE_S, 12.0), (MAX_AGE_S + 0.1, 11.0)])
def test_an_old_request_adds_nothing(age_s: float, done_s: float) -> None:
    made = prompts(1.0)
    made.add(1.0, at_s=10.0 - age_s, now=10.0)

    assert made.done_s == done_s


@pytest.mark.parametrize(("num_alike", "done_s"), [(1, 10.7), (3, 11.1)])
def test_what_has_ended_bounds_it_to_the_unfinished(num_alike: int, done_s: float) -> None:
    made = prompts(9.0)
    made.unfinished_bytes, made.num_alike = 200, num_alike
    made.bound(10.0)
    assert made.done_s == pytest.approx(done_s)
    made.bound(20.0)

    assert made.done_s == pytest.approx(done_s)


def test_after_a_restart_nothing_is_ahead() -> None:
    made = prompts(9.0)
    made.forget()

    assert made.done_s == -inf
