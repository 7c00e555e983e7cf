"""The search for a capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.trials.search import MAX_PROBES, STRIDE, CapacitySearch


def run(
    search: CapacitySearch,
    attainment_at: Callable[[float], float],
    rates_rps: Iterable[float],
    near_rps: float | None = None,
) -> float:
    for rate_rps in search.rates(rates_rps, near_rps):
        assert rate_rps not in search.points
        search.points[rate_rps] = attainment_at(rate_rps)
    return search.capacity_rps


def up_to(capacity_rps: float) -> Callable[[float], float]:
    """A policy that attains everything up to its capacity, and little above it."""
    return lambda rate_rps: 1.0 if rate_rps <= capacity_rps else 0.5


def capacity(points: dict[float, float]) -> float:
    return CapacitySearch(points=points).capacity_rps


def test_capacity_lies_where_the_line_crosses_the_target() -> None:
    assert capacity({10: 1.0, 20: 0.98}) == pytest.approx(15)
    assert capacity({10: 0.98}) == pytest.approx(5)
    assert capacity({10: 1.0, 20: 0.995}) == 20
    assert capacity({10: 1.0, 20: 0.9, 30: 1.0}) == pytest.approx(11)
    assert CapacitySearch(points={10: 1.0, 20: 0.98}).bracket == (10, 20)
    assert CapacitySearch(points={10: 1.0}).bracket == (10, None)


@given(true=st.floats(4, 500), near=st.none() | st.floats(4, 500), resolution=st.floats(1.02, 2))
def test_the_search_closes_in_on_the_capacity(
    true: float, near: float | None, resolution: float
) -> None:
    search = CapacitySearch(resolution=resolution)
    run(search, up_to(true), [25, 50], near)
    low, high = search.bracket

    assert len(search.points) <= 2 + 1 + MAX_PROBES
    if len(search.points) < 2 + MAX_PROBES:
        assert high is not None
        assert low <= true < high <= low * resolution * 1.0001


@given(true=st.floats(1, 500), error=st.floats(0.96, 1.04))
def test_a_good_guess_costs_two_runs(true: float, error: float) -> None:
    search = CapacitySearch()

    run(search, up_to(true), [], true * error)

    assert sorted(search.points) == pytest.approx(
        [true * error / sqrt(1.1), true * error * sqrt(1.1)]
    )


@pytest.mark.parametrize("true", [20.0, 200.0])
def test_a_bad_guess_costs_a_few_more(true: float) -> None:
    search = CapacitySearch()

    assert run(search, up_to(true), [36], 60) == pytest.approx(true, rel=0.1)
    assert len(search.points) <= 10


def test_the_search_goes_beyond_rates_that_are_all_attained_but_not_for_ever() -> None:
    endless = CapacitySearch()

    assert run(endless, lambda _: 1.0, [1, 2]) == pytest.approx(2 * STRIDE**MAX_PROBES)
    assert len(endless.points) == 2 + MAX_PROBES


def test_the_search_gives_up_on_a_hopeless_policy() -> None:
    search = CapacitySearch()

    assert 0 < run(search, lambda _: 0.5, [16, 32]) < 2
    assert 16 / 8 / STRIDE < min(search.points) <= 16 / 8


def test_the_rates_of_the_suite_are_measured_whatever_the_search_needs() -> None:
    search = CapacitySearch()

    run(search, up_to(5), [5, 5.2, 80], 5)

    assert {5, 5.2, 80} <= search.points.keys()
