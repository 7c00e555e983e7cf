"""When a router that has just started is ready, and that it always gets there."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from extproc.reports.readiness import Readiness
from extproc.types import Endpoint

LIMIT_S = 5.0
ADDRESSES = ("a:1", "b:1", "c:1")


def endpoints(addresses: Iterable[str]) -> list[Endpoint]:
    return [Endpoint(address) for address in addresses]


def started_with(*addresses: str) -> Readiness:
    readiness = Readiness(LIMIT_S)
    readiness.set_endpoints(endpoints(addresses), now=0.0)
    return readiness


def test_before_the_first_list_it_does_not_even_begin() -> None:
    readiness = Readiness(LIMIT_S)

    assert readiness.problems(now=1e9) == ["discovery has not synced"]


def test_a_pool_that_is_known_to_be_empty_is_ready() -> None:
    assert started_with().problems(now=0.0) == []


def test_endpoints_that_are_not_up_are_not_waited_for() -> None:
    readiness = Readiness(LIMIT_S)
    readiness.set_endpoints([Endpoint("a:1", is_ready=False)], now=0.0)

    assert readiness.problems(now=0.0) == []


def test_it_is_over_when_each_endpoint_was_asked() -> None:
    readiness = started_with("a:1", "b:1")
    readiness.record_asked("a:1", has_listed=True)
    before = readiness.problems(now=0.0)
    readiness.record_asked("b:1", has_listed=False)

    assert before == ["pods not asked yet: 1"]
    assert readiness.problems(now=0.0) == []


def test_where_all_are_silent_they_are_asked_again() -> None:
    readiness = started_with("a:1", "b:1")
    readiness.record_asked("a:1", has_listed=False)
    readiness.record_asked("b:1", has_listed=False)
    before = readiness.problems(now=0.0)
    readiness.record_asked("a:1", has_listed=True)

    assert before == ["no pod has answered yet"]
    assert readiness.problems(now=0.0) == []


def test_silence_ends_it_after_the_limit() -> None:
    readiness = started_with("a:1", "b:1")
    readiness.record_asked("a:1", has_listed=True)

    assert readiness.problems(now=LIMIT_S - 0.1) == ["pods not asked yet: 1"]
    assert readiness.problems(now=LIMIT_S) == []


def test_one_that_goes_is_not_waited_for_and_one_that_comes_neither() -> None:
    readiness = started_with("a:1", "b:1")
    readiness.set_endpoints(endpoints(["b:1", "c:1"]), now=1.0)
    readiness.record_asked("b:1", has_listed=True)

    assert readiness.problems(now=1.0) == []


def test_when_the_last_one_goes_nobody_is_waited_for() -> None:
    readiness = started_with("a:1")
    readiness.set_endpoints([], now=1.0)

    assert readiness.problems(now=1.0) == []


_LISTS = st.lists(st.builds(Endpoint, st.sampled_from(ADDRESSES), is_ready=st.booleans()))
_EVENTS = st.lists(
    st.one_of(
        _LISTS,
        st.tuples(st.sampled_from(ADDRESSES), st.booleans()),
        st.floats(0.0, LIMIT_S),
    )
)


@given(_EVENTS)
def test_once_over_it_stays_so_whatever_comes(events: list[object]) -> None:
    """Listed, asked, or time passed, in any order; and after the limit it is over."""
    readiness, now, synced_at_s, was_over = Readiness(LIMIT_S), 0.0, float("inf"), False
    for event in events:
        if isinstance(event, float):
            now += event
        elif isinstance(event, tuple):
            readiness.record_asked(event[0], has_listed=event[1])
        elif isinstance(event, list):
            readiness.set_endpoints(event, now=now)
            synced_at_s = min(synced_at_s, now)
        is_over = not readiness.problems(now=now)
        assert is_over or not was_over
        assert is_over or now < synced_at_s + LIMIT_S
        was_over = is_over
