"""The first look at the endpoints: when it is over, and that it always ends."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.readiness import FirstLook
from extproc.core.types import Endpoint

LIMIT_S = 5.0
ADDRESSES = ("a:1", "b:1", "c:1")


def endpoints(addresses: Iterable[str]) -> list[Endpoint]:
    return [Endpoint(address) for address in addresses]


def looking_at(*addresses: str) -> FirstLook:
    look = FirstLook(LIMIT_S)
    look.set_endpoints(endpoints(addresses), now=0.0)
    return look


def test_before_the_first_list_it_does_not_even_begin() -> None:
    look = FirstLook(LIMIT_S)

    assert look.why_not_over(now=1e9) == ["discovery has not synced"]


def test_a_pool_that_is_known_to_be_empty_needs_no_look() -> None:
    assert looking_at().why_not_over(now=0.0) == []


def test_endpoints_that_are_not_up_are_not_waited_for() -> None:
    look = FirstLook(LIMIT_S)
    look.set_endpoints([Endpoint("a:1", is_ready=False)], now=0.0)

    assert look.why_not_over(now=0.0) == []


def test_it_is_over_when_each_endpoint_was_asked() -> None:
    look = looking_at("a:1", "b:1")
    look.asked("a:1", has_told=True)
    before = look.why_not_over(now=0.0)
    look.asked("b:1", has_told=False)

    assert before == ["endpoints not asked yet: 1"]
    assert look.why_not_over(now=0.0) == []


def test_where_all_are_silent_they_are_asked_again() -> None:
    look = looking_at("a:1", "b:1")
    look.asked("a:1", has_told=False)
    look.asked("b:1", has_told=False)
    before = look.why_not_over(now=0.0)
    look.asked("a:1", has_told=True)

    assert before == ["no endpoint has answered yet"]
    assert look.why_not_over(now=0.0) == []


def test_silence_ends_it_after_the_limit() -> None:
    look = looking_at("a:1", "b:1")
    look.asked("a:1", has_told=True)

    assert look.why_not_over(now=LIMIT_S - 0.1) == ["endpoints not asked yet: 1"]
    assert look.why_not_over(now=LIMIT_S) == []


def test_one_that_goes_is_not_waited_for_and_one_that_comes_neither() -> None:
    look = looking_at("a:1", "b:1")
    look.set_endpoints(endpoints(["b:1", "c:1"]), now=1.0)
    look.asked("b:1", has_told=True)

    assert look.why_not_over(now=1.0) == []


def test_when_the_last_one_goes_nobody_is_waited_for() -> None:
    look = looking_at("a:1")
    look.set_endpoints([], now=1.0)

    assert look.why_not_over(now=1.0) == []


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
    look, now, synced_at_s, was_over = FirstLook(LIMIT_S), 0.0, float("inf"), False
    for event in events:
        if isinstance(event, float):
            now += event
        elif isinstance(event, tuple):
            look.asked(event[0], has_told=event[1])
        elif isinstance(event, list):
            look.set_endpoints(event, now=now)
            synced_at_s = min(synced_at_s, now)
        is_over = not look.why_not_over(now=now)
        assert is_over or not was_over
        assert is_over or now < synced_at_s + LIMIT_S
        was_over = is_over
