"""Which endpoints are the homes of which adapters, in bounds, and what moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.placement.homes import CARRIED, Capacity, place
from extproc.adapters.placement.levels import level_of, rate_of
from extproc.adapters.placement.orders import DEPTH, order
from extproc.passes import last
from tests.builders import address

NAMES = [f"adapter-{number}" for number in range(100)]

Homes = dict[str, tuple[str, ...]]
LEVELS = st.dictionaries(st.sampled_from(NAMES[:30]), st.integers(0, 45), max_size=30)


@st.composite
def fleets(draw: st.DrawFn, *, least: int = 0) -> list[Capacity]:
    def capacity(number: int) -> Capacity:
        slots = draw(st.none() | st.integers(0, 4))
        places = draw(st.none() | st.integers(slots or 0, 8))
        return Capacity(address(number), slots, places)

    return [capacity(number) for number in draw(st.sets(st.integers(1, 9), min_size=least))]


def homes(levels: dict[str, int], fleet: list[Capacity]) -> Homes:
    addresses = [each.address for each in fleet]
    return last(place(levels, fleet, partial(order, addresses=addresses)))


def fleet_of(num: int, slots: int | None = 8, places: int | None = 32) -> list[Capacity]:
    return [Capacity(address(number), slots, places) for number in range(1, num + 1)]


def zipf(num_endpoints: int, seed: int = 0) -> dict[str, int]:
    """100 adapters by Zipf's law, with half the work that the endpoints can do; others' names for
    each seed."""
    rng = random.Random(seed)
    total = sum(1 / rank for rank in range(1, 101))
    names = rng.sample([f"{seed}-{name}" for name in NAMES], 100)
    return {
        name: level_of(num_endpoints / 2 / total / rank) for rank, name in enumerate(names, start=1)
    }


# --- always ----------------------------------------------------------------------------------


@given(LEVELS, fleets(), st.integers(0, 9))
def test_routers_that_see_the_same_arrive_at_the_same(
    levels: dict[str, int], fleet: list[Capacity], seed: int
) -> None:
    rng = random.Random(seed)
    others = dict(rng.sample(sorted(levels.items()), len(levels)))

    assert homes(levels, fleet) == homes(others, rng.sample(fleet, len(fleet)))


@given(LEVELS, fleets())
def test_no_endpoint_gets_more_than_its_host_memory_holds(
    levels: dict[str, int], fleet: list[Capacity]
) -> None:
    counts = Counter(each for own in homes(levels, fleet).values() for each in own)

    for each in fleet:
        assert each.max_cpu_loras is None or counts[each.address] <= each.max_cpu_loras


@given(LEVELS, fleets())
def test_every_adapter_has_a_home_wherever_there_is_room_and_the_most_wanted_first(
    levels: dict[str, int], fleet: list[Capacity]
) -> None:
    placed = homes(levels, fleet)

    assert placed.keys() == levels.keys()
    without = [levels[adapter] for adapter, own in placed.items() if not own]
    counts = Counter(each for own in placed.values() for each in own)
    if without:
        assert all(counts[each.address] == each.max_cpu_loras for each in fleet)
        assert max(without) <= min((levels[a] for a, own in placed.items() if own), default=99)
        assert all(len(own) <= 1 for own in placed.values())


@given(LEVELS, fleets(least=1))
def test_an_adapter_has_as_few_homes_as_carry_its_work(
    levels: dict[str, int], fleet: list[Capacity]
) -> None:
    for adapter, own in homes(levels, fleet).items():
        assert len(set(own)) == len(own)
        if len(own) > 1:
            assert CARRIED * (len(own) - 1) < rate_of(levels[adapter])


@given(st.dictionaries(st.sampled_from(NAMES[:30]), st.integers(0, 12)), st.integers(1, 9))
def test_where_nothing_is_scarce_each_adapter_has_the_head_of_its_own_order(
    levels: dict[str, int], num: int
) -> None:
    fleet = fleet_of(num, None, None)
    addresses = [each.address for each in fleet]

    for adapter, own in homes(levels, fleet).items():
        assert sum(map(rate_of, levels.values())) > CARRIED or own == (
            order(adapter, addresses)[0],
        )


# --- even ------------------------------------------------------------------------------------


def test_adapters_that_fit_the_fleet_s_slots_fit_each_endpoint_s() -> None:
    """64 slots for 60 adapters; by their order alone up to 14 would be on one."""
    counts = Counter(own[0] for own in homes(dict.fromkeys(NAMES[:60], 1), fleet_of(8)).values())

    assert max(counts.values()) <= 8


def test_no_endpoint_gets_much_more_than_its_part() -> None:
    """100 adapters on 64 slots, in 20 ways: homes and work, within slack and one step."""
    for seed in range(20):
        levels = zipf(8, seed)
        placed = homes(levels, fleet_of(8))
        num, work = Counter[str](), Counter[str]()
        for adapter, own in placed.items():
            for each in own:
                num[each] += 1
                work[each] += rate_of(levels[adapter]) / len(own)  # type: ignore[assignment]
        assert max(num.values()) <= 1.25**2 * sum(num.values()) / 8 + 1
        assert max(work.values()) <= 1.25**2 * sum(work.values()) / 8 + CARRIED / 4


def test_a_large_endpoint_gets_more_than_a_small_one() -> None:
    fleet = [Capacity(address(1), 16, 64), Capacity(address(2), 4, 16)]
    counts = Counter(own[0] for own in homes(dict.fromkeys(NAMES[:40], 1), fleet).values())

    assert counts[address(1)] > 2 * counts[address(2)]


def test_without_slots_host_memory_will_do() -> None:
    assert homes({"a": 1, "b": 0}, [Capacity(address(1), 0, 1)]) == {"a": (address(1),), "b": ()}


def test_an_adapter_is_not_sent_far_down_its_order_for_the_sake_of_evenness() -> None:
    """Of 40 endpoints one alone has a slot; without one they have host memory."""
    fleet = [Capacity(address(number), number // 40, 8) for number in range(1, 41)]
    addresses = [each.address for each in fleet]
    orders = {name: order(name, addresses) for name in NAMES}
    near, far = (
        next(name for name, own in orders.items() if own.index(address(40)) == place)
        for place in (DEPTH - 1, DEPTH)
    )

    assert homes({near: 1}, fleet) == {near: (address(40),)}
    assert homes({far: 1}, fleet) == {far: (orders[far][0],)}


def test_an_adapter_that_has_room_in_the_head_of_its_order_asks_no_further() -> None:
    fleet = [Capacity(address(number), 0, 8) for number in range(1, 41)]
    asked: list[str] = []

    def ask(adapter: str) -> Iterator[str]:
        for each in order(adapter, [each.address for each in fleet]):
            asked.append(each)
            yield each

    last(place({"a": 1}, fleet, ask))

    assert len(asked) == DEPTH


# --- movement --------------------------------------------------------------------------------


def test_an_endpoint_that_leaves_or_joins_moves_little_else() -> None:
    """Of 100 adapters, in 20 ways: those on it, and at most as many again."""
    moved = on_it = 0
    for seed in range(20):
        levels, fleet = zipf(8, seed), fleet_of(8)
        before, after = homes(levels, fleet), homes(levels, fleet[1:])
        on_it += sum(address(1) in own for own in before.values())
        moved += sum(before[adapter] != after[adapter] for adapter in levels)

    assert on_it <= moved <= 2 * on_it


def test_one_adapter_s_work_moves_few_others() -> None:
    """In 20 ways, the twentieth of 100 adapters becomes as popular as the first."""
    moved = 0
    for seed in range(20):
        levels = zipf(8, seed)
        hot, *_ = levels
        wanted = sorted(levels, key=lambda name: -levels[name])[20]
        before, after = (
            homes(levels, fleet_of(8)),
            homes({**levels, wanted: levels[hot]}, fleet_of(8)),
        )
        moved += sum(before[adapter] != after[adapter] for adapter in levels if adapter != wanted)

    assert moved <= 20 * 10


@given(st.integers(0, 45), st.integers(0, 45), st.sampled_from(NAMES))
def test_homes_are_added_to_those_that_an_adapter_has(one: int, other: int, name: str) -> None:
    few, many = (homes({name: each}, fleet_of(20))[name] for each in sorted((one, other)))

    assert many[: len(few)] == few


def test_routers_whose_rates_differ_a_little_mostly_agree() -> None:
    """Every level is one higher with a chance of a fifth, which is what 4 % make."""
    same = total = 0
    for seed in range(20):
        rng, levels = random.Random(seed), zipf(8, seed)
        others = {name: level + (rng.random() < 0.2) for name, level in levels.items()}
        here, there = homes(levels, fleet_of(8)), homes(others, fleet_of(8))
        same += sum(here[name][0] == there[name][0] for name in levels)
        total += len(levels)

    assert same >= 0.9 * total
