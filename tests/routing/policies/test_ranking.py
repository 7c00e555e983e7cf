"""Ties are broken in one way: uniformly, by the rng that was handed in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.opponents.ties import least
from tests.builders import endpoint_view


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 99))
def test_the_least_key_wins_and_the_same_seed_gives_the_same_endpoint(
    pending: list[int], seed: int
) -> None:
    views = [endpoint_view(number + 1, num_pending=n) for number, n in enumerate(pending)]

    def choose() -> int:
        return least(views, lambda view: view.num_pending, random.Random(seed)).num_pending

    assert choose() == min(pending)
    assert choose() == choose()


def test_one_best_endpoint_takes_nothing_from_the_rng() -> None:
    views = [endpoint_view(1, num_pending=1), endpoint_view(2)]
    rng = random.Random(1)
    state = rng.getstate()
    least(views, lambda view: view.num_pending, rng)

    assert rng.getstate() == state


def test_ties_are_uniform() -> None:
    """3 of 5 tie; 3,000 draws: each within 1,000 ± 110, four standard deviations."""
    views = [endpoint_view(number, num_pending=number % 2) for number in range(1, 6)]
    tied = views[1::2]
    rng = random.Random(3)
    counts = {view.address: 0 for view in views}
    for _ in range(3000):
        counts[least(views, lambda view: view.num_pending, rng).address] += 1

    epsilon = 130
    expected = 3000 / len(tied)
    assert all(abs(counts[view.address] - expected) < epsilon for view in tied)
    assert sum(counts.values()) == sum(counts[view.address] for view in tied)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        least([], lambda view: view.num_pending, random.Random(0))
