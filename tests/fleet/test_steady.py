"""The least value of a while."""

from __future__ import annotations

import pytest

from extproc.fleet.foreign import STEADY_S, SteadyMinimum


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
