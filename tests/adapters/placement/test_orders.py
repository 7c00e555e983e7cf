"""Rendezvous orders, and their heads kept up as endpoints come and go."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.placement.orders import Orders, order
from extproc.passes import make_all
from tests.builders import address

NUMBERS = st.sets(st.integers(1, 30), max_size=20)


def test_every_endpoint_is_in_the_order_once() -> None:
    addresses = [address(number) for number in range(20)]

    assert sorted(order("a", addresses)) == sorted(addresses)
    assert order("a", addresses) == order("a", reversed(addresses))


def test_first_homes_are_spread_evenly() -> None:
    """4,000 adapters on 4 endpoints: 1,000 each, within four standard deviations."""
    addresses = [address(number) for number in range(1, 5)]
    counts = Counter(order(f"adapter-{n}", addresses)[0] for n in range(4000))

    assert all(abs(counts[each] - 1000) < 110 for each in addresses)


@given(NUMBERS.filter(bool), st.text(max_size=8))
def test_an_endpoint_that_leaves_moves_no_other(numbers: set[int], adapter: str) -> None:
    before = order(adapter, map(address, numbers))

    assert order(adapter, before[1:]) == before[1:]


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 20)), max_size=8))
def test_heads_that_are_kept_up_are_those_of_the_whole_order(
    changes: list[tuple[set[int], int]],
) -> None:
    """Endpoints come and go; at times an order is asked for, and followed so far."""
    orders = Orders(depth=4)
    for numbers, asked in changes:
        addresses = [address(number) for number in numbers]
        make_all(orders.set_endpoints(addresses))
        for adapter in ("a", "b")[: asked % 3]:
            assert [*islice(orders.walk(adapter), asked)] == order(adapter, addresses)[:asked]


def test_an_endpoint_that_joins_goes_to_its_place_in_a_head_or_beyond_it() -> None:
    orders, addresses = Orders(depth=2), [address(number) for number in range(1, 30)]
    make_all(orders.set_endpoints(addresses[:4]))
    assert next(orders.walk("a")) == order("a", addresses[:4])[0]

    for num in range(5, 30):
        make_all(orders.set_endpoints(addresses[:num]))
        assert [*islice(orders.walk("a"), 2)] == order("a", addresses[:num])[:2]


@pytest.mark.parametrize("depth", [1, 5, 9])
def test_an_order_goes_on_beyond_its_head(depth: int) -> None:
    orders, addresses = Orders(depth=depth), [address(number) for number in range(1, 6)]
    make_all(orders.set_endpoints(addresses))

    assert [*orders.walk("a")] == [*orders.walk("a")] == order("a", addresses)


def test_as_many_heads_are_computed_at_once_as_there_are_draws_for() -> None:
    orders = Orders()
    make_all(orders.set_endpoints([address(1), address(2)]))
    learnt = []
    for _ in range(3):
        learnt.append(orders.learn("abc", max_draws=3))
        for adapter in learnt[-1]:
            next(orders.walk(adapter))

    assert learnt == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert orders.learn("bd", max_draws=3) == ["b", "d"]
    assert orders.learn("ab", max_draws=0) == ["a", "b"]


def test_without_endpoints_all_orders_are_known() -> None:
    assert Orders().learn("abc", max_draws=3) == ["a", "b", "c"]


def test_a_head_whose_endpoints_have_all_left_is_drawn_afresh() -> None:
    orders, addresses = Orders(depth=2), [address(number) for number in range(1, 9)]
    make_all(orders.set_endpoints(addresses))
    left = set(islice(orders.walk("a"), 2))

    stay = [each for each in addresses if each not in left]
    make_all(orders.set_endpoints(stay))

    assert [*orders.walk("a")] == order("a", stay)
