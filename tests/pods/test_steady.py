"""The least value of a while, and what has begun since some time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pods.foreign import STEADY_S, ForeignRequests, SteadyMinimum


def recorded(*values: int, every_s: float = 1.0) -> SteadyMinimum:
    made = SteadyMinimum()
    for number, value in enumerate(values):
        made.record(value, now=number * every_s)
    return made


def test_a_value_counts_once_it_has_been_there_long_enough() -> None:
    length = int(STEADY_S)

    assert recorded(*[7] * length).low == 0
    assert recorded(*[7] * (length + 1)).low == 7


def test_a_lower_value_counts_at_once_and_the_rise_after_it_does_not() -> None:
    steady = [7] * (int(STEADY_S) + 1)

    assert recorded(*steady, 3).low == 3
    assert recorded(*steady, 3, 9).low == 3


@pytest.mark.parametrize("num_later", [1, int(STEADY_S), 3 * int(STEADY_S)])
def test_what_rises_stays_risen_while_the_values_are(num_later: int) -> None:
    made = recorded(*[2] * 20)
    made.rise(5)
    assert made.low == 7
    for number in range(num_later):
        made.record(7, now=20.0 + number)
    assert made.low == 7
    made.record(4, now=20.0 + num_later)

    assert made.low == 4


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.none() | st.integers(0, 9))),
    st.integers(-1, 40),
)
def test_what_was_told_long_ago_need_not_be_counted_again(
    told: list[tuple[int, int, int | None]], at_s: int
) -> None:
    """Each is told so long after the last: a beginning, or an end with how long it took."""
    others, now, begun = ForeignRequests(), 0, list[tuple[int, int]]()
    for passed_s, num, took_s in told:
        now += passed_s
        if took_s is None:
            others.picked(num, num, now)
            begun.append((now, num))
        elif num <= others.num_from_peers:
            others.ended(num, num, now - took_s, now)
            begun.append((now - took_s, -num))

    num_since = sum(num for began_s, num in begun if began_s > at_s)
    assert others.num_since(at_s) == min(max(0, num_since), others.num_from_peers)
