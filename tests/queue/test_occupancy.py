"""How much is held: the counts are those of what is there, and routes have bounds of their own."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.queue.tickets import Occupancy, Ticket
from extproc.tenancy import Claim
from extproc.types import RequestInfo


def ticket(num_bytes: int = 0, *, route: str = "r", priority: int = 0, **limits: Any) -> Ticket:
    request = RequestInfo("m", claim=Claim(route, priority=priority, **limits))
    return Ticket(request, lambda: None, inf, num_bytes=num_bytes)


def holding(*tickets: Ticket) -> Occupancy:
    occupancy = Occupancy()
    for each in tickets:
        occupancy.add(each)
    return occupancy


TICKETS = st.lists(
    st.builds(
        lambda size, route, priority: ticket(size, route=route, priority=priority),
        st.integers(0, 3),
        st.sampled_from("rs"),
        st.integers(-1, 1),
    )
)


@given(TICKETS, TICKETS)
def test_the_counts_are_those_of_what_is_held(gone: list[Ticket], held: list[Ticket]) -> None:
    occupancy = holding(*gone, *held)
    for each in gone:
        occupancy.remove(each)

    claims = [each.request.claim for each in held]
    assert occupancy.num_by_claim == Counter((each.route, each.priority) for each in claims)
    assert occupancy.num_bytes == sum(each.num_bytes for each in held)
    if held:
        *_, last = sorted(held, key=lambda each: -each.request.claim.priority)
        assert occupancy.last is last


def test_what_is_not_held_any_more_takes_no_memory() -> None:
    gone = ticket(5)
    occupancy = holding(gone)
    occupancy.remove(gone)

    assert {name for name, value in vars(occupancy).items() if value} == set()


def test_a_route_is_full_at_its_number_of_requests() -> None:
    occupancy = holding(ticket(), ticket(priority=1), ticket(route="s"))

    assert not occupancy.is_route_full(ticket(_max_held=3))
    assert occupancy.is_route_full(ticket(_max_held=2))
    assert not occupancy.is_route_full(ticket(route="s", _max_held=2))


def test_a_route_is_full_where_a_request_s_bytes_do_not_fit() -> None:
    occupancy = holding(ticket(10), ticket(10, route="s"))

    assert not occupancy.is_route_full(ticket(5, _max_held_bytes=15))
    assert occupancy.is_route_full(ticket(6, _max_held_bytes=15))


def test_a_route_without_bounds_is_never_full() -> None:
    assert not holding(*[ticket(10)] * 9).is_route_full(ticket(10))
