"""Rates in steps: up at once, down after a while."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.placement.levels import COOL_S, LEAST, MOST, STEP, Levels, level_of, rate_of
from extproc.passes import make_all

RATES = st.floats(0, 1e6)


@given(RATES)
def test_a_level_s_rate_is_at_least_the_rate_and_at_most_a_step_more(rate: float) -> None:
    level = level_of(rate)

    assert rate <= rate_of(level) * (1 + 1e-9) or rate <= LEAST
    assert rate_of(level) <= max(rate * STEP, LEAST * STEP) * (1 + 1e-9)


@given(RATES, RATES)
def test_more_work_is_no_lower_level(one: float, other: float) -> None:
    assert level_of(min(one, other)) <= level_of(max(one, other))


def test_a_level_rises_at_once() -> None:
    levels = Levels()
    make_all(levels.update({"a": 0.1}, now=0.0))
    make_all(levels.update({"a": 1.0}, now=0.1))

    assert levels.by_adapter == {"a": level_of(1.0)}


def test_a_level_falls_once_it_has_been_lower_for_long_and_to_the_highest_of_late() -> None:
    levels = Levels()
    make_all(levels.update({"a": 1.0}, now=0.0))
    for now, rate in [(1.0, 0.7), (30.0, 0.4), (50.0, 0.5), (COOL_S + 0.9, 0.2)]:
        make_all(levels.update({"a": rate}, now=now))
        assert levels.by_adapter == {"a": level_of(1.0)}

    make_all(levels.update({"a": 0.2}, now=COOL_S + 1.0))

    assert levels.by_adapter == {"a": level_of(0.5)}


def test_a_rate_that_swings_changes_nothing() -> None:
    """Between two levels, every second for ten minutes."""
    levels = Levels()
    make_all(levels.update({"a": 1.0}, now=0.0))
    before = levels.by_adapter

    for now in range(1, 600):
        make_all(levels.update({"a": (1.0, 0.3)[now % 2]}, now=now))

    assert levels.by_adapter is before


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 10), min_size=1))
def test_the_mapping_stays_the_same_object_while_nothing_changes(rates: dict[str, float]) -> None:
    levels = Levels()
    make_all(levels.update(rates, now=0.0))
    before = levels.by_adapter

    make_all(levels.update(rates, now=1e6))

    assert levels.by_adapter is before
    assert before == {adapter: level_of(rate) for adapter, rate in rates.items()}


def test_an_adapter_that_is_gone_is_forgotten() -> None:
    levels = Levels()
    make_all(levels.update({"a": 1.0, "b": 1.0}, now=0.0))
    make_all(levels.update({"a": 0.0, "b": 0.0}, now=1.0))
    make_all(levels.update({"b": 0.0}, now=2.0))
    assert levels.by_adapter == {"b": level_of(1.0)}

    make_all(levels.update({"a": 0.1, "b": 0.0}, now=3.0))
    make_all(levels.update({"a": 0.0, "b": 0.0}, now=COOL_S + 2.0))
    assert levels.by_adapter == {"a": level_of(0.1), "b": 0}


@pytest.mark.parametrize(("rate", "level"), [(nan, 0), (-1.0, 0), (inf, level_of(MOST))])
def test_what_is_no_rate_has_a_level_all_the_same(rate: float, level: int) -> None:
    assert level_of(rate) == level
