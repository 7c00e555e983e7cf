"""The homes of all adapters, kept up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.placement.homes import MAX_DRAWS, Capacity, Placement
from extproc.adapters.placement.levels import COOL_S, Demand
from extproc.passes import make_all
from tests.builders import address

FLEET = [Capacity(address(number), 8, 32) for number in range(1, 9)]
RATES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 3))
FLEETS = st.lists(st.sampled_from(FLEET), unique=True)


@given(st.lists(st.tuples(RATES, FLEETS), min_size=1, max_size=5))
def test_homes_do_not_depend_on_how_they_came_about(
    past: list[tuple[dict[str, float], list[Capacity]]],
) -> None:
    kept = Placement()
    for number, (rates, fleet) in enumerate(past):
        make_all(kept.update(rates, fleet, now=number * 2 * COOL_S))
        make_all(kept.update(rates, fleet, now=number * 2 * COOL_S + COOL_S))
    anew = Placement()
    make_all(anew.update(rates, fleet, now=0.0))

    assert kept.homes == anew.homes
    assert [list(kept.walk(name)) for name in "abcdef"] == [
        list(anew.walk(name)) for name in "abcdef"
    ]


def test_while_nothing_changes_the_mapping_stays_the_same_object() -> None:
    placement = Placement()
    make_all(placement.update({"a": 1.0}, FLEET, now=0.0))
    before = placement.homes

    make_all(placement.update({"a": 0.99}, FLEET[::-1], now=1.0))

    assert placement.homes is before


def test_homes_come_first_and_then_the_rest_of_the_order() -> None:
    placement = Placement()
    make_all(placement.update({"a": 1.2, "b": 0.0}, FLEET, now=0.0))

    for adapter in ("a", "b", "unknown"):
        own = placement.homes.get(adapter, ())
        assert list(placement.walk(adapter))[: len(own)] == list(own)
        assert sorted(placement.walk(adapter)) == [each.address for each in FLEET]
    assert [len(placement.homes[adapter]) for adapter in ("a", "b")] == [3, 1]


def test_adapters_that_are_new_by_the_thousand_are_placed_in_turn_the_most_wanted_first() -> None:
    placement = Placement()
    fleet = [Capacity(address(number)) for number in range(MAX_DRAWS // 50)]
    rates = {f"adapter-{number}": number / 1000 for number in range(120)}

    placed: list[int] = []
    while not placement.is_settled or not placed:
        make_all(placement.update(rates, fleet, now=0.0))
        placed.append(len(placement.homes))

    assert placed == [50, 100, 120]
    assert placement.homes.keys() == rates.keys()
    make_all(placement.update(rates, fleet[1:], now=1.0))
    assert placement.is_settled


def test_without_endpoints_there_are_no_homes() -> None:
    placement = Placement()
    make_all(placement.update({"a": 1.0}, [], now=0.0))

    assert placement.homes == {"a": ()}
    assert list(placement.walk("a")) == []


def test_an_adapter_that_becomes_popular_has_its_homes_in_seconds_and_keeps_them_for_a_minute() -> (
    None
):
    """Nothing for 10 s, then for 20 s 100 requests a second of 20 ms: 2 s/s, 4 homes."""
    demand, placement = Demand(), Placement()
    num_homes = []
    for tick in range(1500):
        now = tick / 10
        if 10 <= now < 30:
            for _ in range(10):
                demand.add("a", 0.02, at_s=now)
        if tick % 10 == 0:
            make_all(placement.update({"a": 0.0, **demand.rates(now)}, FLEET, now=now))
            num_homes.append(len(placement.homes["a"]))

    assert num_homes[9] == 1
    assert num_homes[13] >= 2
    assert num_homes[25] >= 4
    assert num_homes[30:80] == [num_homes[30]] * 50
    assert num_homes[-1] == 1
    up_down = [b - a for a, b in pairwise(num_homes) if a != b]
    assert sorted(up_down, reverse=True) == up_down  # first up, then down, and never again
