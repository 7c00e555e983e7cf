from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.pods.foreign import STILL_S, ReportTrust
from extproc.types import LoadReport
from tests.builders import report

FROZEN = report(
    num_running=26,
    num_waiting=4,
    num_deferred=1,
    kv_usage_ratio=0.9,
    active_adapters=frozenset("ab"),
    work_tokens=500,
    generated_tokens=300,
)


def believed(*steps: tuple[float, LoadReport], num_known: int = 0) -> tuple[LoadReport, bool]:
    """The last of some reports as it is believed, and whether it is old."""
    belief = ReportTrust()
    for now, each in steps:
        seen = belief.of(each, num_known, {"b": 1}, now=now)
    return seen, belief.is_old


def test_requests_that_nobody_has_there_and_that_move_nothing_are_no_requests() -> None:
    before, was_old = believed((0.0, FROZEN), (STILL_S - 0.1, FROZEN))
    after, is_old = believed((0.0, FROZEN), (STILL_S, FROZEN))

    assert (before, was_old) == (FROZEN, False)
    assert is_old
    assert (after.num_running, after.num_waiting, after.num_deferred) == (0, 0, None)
    assert (after.kv_usage_ratio, after.active_adapters) == (None, frozenset("b"))
    assert (after.work_tokens, after.generated_tokens) == (500, 300)


@pytest.mark.parametrize("num_known", [1, 26, 29])
def test_as_many_as_routers_know_of_are_believed(num_known: int) -> None:
    seen, is_old = believed((0.0, FROZEN), (STILL_S, FROZEN), num_known=num_known)

    assert is_old
    assert seen.num_running + seen.num_waiting == num_known
    assert (seen.num_running, seen.num_waiting) <= (FROZEN.num_running, FROZEN.num_waiting)


def test_a_long_step_with_requests_of_routers_alone_is_believed() -> None:
    assert believed((0.0, FROZEN), (99.0, FROZEN), num_known=30) == (FROZEN, False)


@pytest.mark.parametrize(
    "moved",
    [{"work_tokens": 501}, {"kv_usage_ratio": 0.8}, {"num_waiting": 5}, {"num_deferred": 2}],
)
def test_whatever_changes_with_work_makes_it_new(moved: dict[str, float]) -> None:
    moving = replace(FROZEN, **moved)
    steps = (0.0, FROZEN), (STILL_S - 1, moving)

    assert believed(*steps, (STILL_S + 1, moving)) == (moving, False)
    assert believed(*steps, (2 * STILL_S, moving))[1]


def test_an_engine_that_does_not_count_step_by_step_is_believed() -> None:
    slow = report(num_running=3, generated_tokens=300)
    assert believed((0.0, slow), (99.0, slow)) == (slow, False)


def test_an_idle_engine_that_stands_still_is_idle() -> None:
    idle = report(work_tokens=500)
    assert believed((0.0, idle), (99.0, idle)) == (idle, False)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_where_the_numbers_cannot_be_read_routers_counts_are_the_numbers(
    num_running: int, num_waiting: int, num_known: int
) -> None:
    unread = report(
        num_running=num_running, num_waiting=num_waiting, has_counts=False, kv_usage_ratio=0.5
    )
    seen, is_old = believed((0.0, unread), num_known=num_known)

    assert (seen.num_running, seen.num_waiting, is_old) == (num_known, 0, False)
    assert seen.kv_usage_ratio == 0.5
