"""Blocks: slices, turns, and fleets that are used again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.loadtest.blocks import by_fleet, rotated, sliced
from extproc.lab.trials.suites import PlanError
from extproc.lab.workload.requests import Tenant
from tests.lab.loadtest.builders import block


@given(
    times_s=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60),
    num_slices=st.integers(1, 6),
)
def test_slices_hold_every_request_once_and_in_order(times_s: list[float], num_slices: int) -> None:
    whole = block(sorted(times_s))
    try:
        slices = sliced(whole, num_slices)
    except PlanError:
        return

    width_s = whole.workload.duration_s / num_slices
    back = [
        number * width_s + arrival.at_s
        for number, part in enumerate(slices)
        for arrival in part.workload.arrivals
    ]
    assert back == pytest.approx(sorted(times_s))
    assert all(part.num_counted for part in slices)
    assert len({part.name for part in slices}) == num_slices


def test_slices_without_a_request_are_refused() -> None:
    with pytest.raises(PlanError, match="5 slices are too many for 4 requests"):
        sliced(block(), 5)


def test_requests_count_from_the_end_of_the_warm_up_on() -> None:
    assert block([0.5, 1.0, 1.5], warm_up_s=1.0).num_counted == 2


@given(st.lists(st.text(), min_size=1, max_size=6, unique=True), st.integers(0, 50))
def test_in_each_block_every_target_has_one_turn(labels: list[str], number: int) -> None:
    assert sorted(rotated(labels, number)) == sorted(labels)


@given(st.integers(1, 6), st.integers(1, 5))
def test_every_target_begins_equally_often(num_targets: int, times: int) -> None:
    targets = list(range(num_targets))

    firsts = Counter(rotated(targets, number)[0] for number in range(num_targets * times))

    assert firsts == dict.fromkeys(targets, times)


def test_a_running_fleet_is_used_again_as_long_as_it_is_the_same() -> None:
    blocks = [
        block(warm_up_s=1.0),
        block(seed=2, warm_up_s=2.0),
        block(adapters=("a", "b")),
        block(),
    ]

    assert [len(group) for group in by_fleet(blocks)] == [2, 1, 1]


def test_other_tenants_get_another_fleet_because_routers_know_their_claims() -> None:
    plain = block()
    urgent = replace(plain.workload, tenants={"people": Tenant(priority=1)})

    assert len(by_fleet([plain, replace(plain, workload=urgent)])) == 2
