"""The rate of offered work that forgets."""

from __future__ import annotations

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.placement.levels import DECAY_S, MIN_RATE, Demand

WORK = st.tuples(st.sampled_from("abc"), st.floats(0.001, 1), st.floats(0, 1000))


@given(st.lists(WORK, max_size=30))
def test_the_rate_is_the_work_weighted_by_its_age(told: list[tuple[str, float, float]]) -> None:
    now = max([at_s for _, _, at_s in told], default=0.0)
    demand = Demand()
    expected = dict.fromkeys("abc", 0.0)
    for adapter, work_s, at_s in sorted(told, key=lambda each: each[2]):
        demand.add(adapter, work_s, at_s=at_s)
        expected[adapter] += work_s * exp((at_s - now) / DECAY_S) / DECAY_S

    rates = demand.rates(now)

    for adapter, rate in expected.items():
        assert rates.get(adapter, 0.0) == pytest.approx(rate, abs=MIN_RATE)


@given(st.lists(WORK, max_size=30), st.integers(0, 99))
def test_routers_that_hear_of_the_same_in_another_order_have_the_same(
    told: list[tuple[str, float, float]], seed: int
) -> None:
    here, there = Demand(), Demand()
    for adapter, work_s, at_s in told:
        here.add(adapter, work_s, at_s=at_s % 60)
    random.Random(seed).shuffle(told)
    for adapter, work_s, at_s in told:
        there.add(adapter, work_s, at_s=at_s % 60)

    assert here.rates(60.0) == pytest.approx(dict(there.rates(60.0)))


def test_a_steady_adapter_has_the_work_that_it_brings() -> None:
    demand = Demand()
    for tick in range(1000):
        demand.add("a", 0.02, at_s=tick / 10)

    assert demand.rates(100.0)["a"] == pytest.approx(0.2, rel=0.02)


def test_how_often_rates_are_read_does_not_change_them() -> None:
    """Each request alone is below the least rate."""
    often, once = Demand(), Demand()
    for at_s in range(60):
        for demand in (often, once):
            demand.add("a", 0.9 * MIN_RATE * DECAY_S, at_s=at_s)
        often.rates(at_s)

    assert often.rates(60.0) == pytest.approx(dict(once.rates(60.0)))
    assert once.rates(60.0)["a"] > MIN_RATE


def test_what_is_wanted_no_more_is_forgotten() -> None:
    demand = Demand()
    demand.add("a", 1.0, at_s=0.0)

    assert set(demand.rates(5.0)) == {"a"}
    assert not demand.rates(60.0)
    assert not demand.rates(1e9)


def test_work_told_late_or_with_a_clock_that_goes_wrong_costs_no_more_than_accuracy() -> None:
    demand = Demand()
    demand.add("a", 1.0, at_s=1e9)
    demand.add("a", 1.0, at_s=0.0)
    demand.add("b", 1.0, at_s=1e12)

    assert set(demand.rates(0.0)) <= {"a", "b"}
