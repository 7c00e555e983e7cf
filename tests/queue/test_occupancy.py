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


def ticket(
    num_bytes: int = 0, *, route: str = "r", tenant: str = "", priority: int = 0, **limits: Any
) -> Ticket:
    request = RequestInfo("m", claim=Claim(route, tenant, priority=priority, **limits))
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
    assert set(occupancy.below_zero()) == {each for each in held if each.priority < 0}


def test_what_is_not_held_any_more_takes_no_memory() -> None:
    gone = ticket(5)
    occupancy = holding(gone)
    occupancy.remove(gone)

    assert {name for name, value in vars(occupancy).items() if value} == set()


def test_a_route_is_full_at_its_number_of_requests() -> None:
    occupancy = holding(ticket(), ticket(priority=1), ticket(route="s"))

    assert not occupancy.is_route_full(ticket(max_held=3))
    assert occupancy.is_route_full(ticket(max_held=2))
    assert not occupancy.is_route_full(ticket(route="s", max_held=2))


def test_a_route_is_full_where_a_request_s_bytes_do_not_fit() -> None:
    occupancy = holding(ticket(10), ticket(10, route="s"))

    assert not occupancy.is_route_full(ticket(5, max_held_bytes=15))
    assert occupancy.is_route_full(ticket(6, max_held_bytes=15))


def test_a_route_without_bounds_is_never_full() -> None:
    assert not holding(*[ticket(10)] * 9).is_route_full(ticket(10))


# --- who makes way in a full queue ------------------------------------------------------------

HELD = st.lists(
    st.builds(
        lambda size, tenant, priority: ticket(size, tenant=tenant, priority=priority),
        st.integers(0, 3),
        st.sampled_from("rst"),
        st.integers(-1, 1),
    ),
    max_size=12,
)


@given(HELD, st.integers(-1, 1), st.sampled_from("rstu"), st.integers(1, 9), st.booleans())
def test_nobody_makes_way_for_a_lower_priority_or_for_a_tenant_that_holds_as_many(
    held: list[Ticket], priority: int, tenant: str, num: int, is_fair: bool
) -> None:
    occupancy, newcomer = holding(*held), ticket(tenant=tenant, priority=priority)
    found = occupancy.to_displace(newcomer, num=num, num_bytes=0, is_fair=is_fair)

    def left(flow: str) -> int:
        assert found is not None
        gone = set(found)
        return sum(each.priority == priority and each.flow == flow for each in set(held) - gone)

    lower = sum(each.priority < priority for each in held)
    if found is None:
        of_own = Counter(each.flow for each in held if each.priority == priority)
        own = of_own[newcomer.flow] + 1
        room = sum(max(0, each - own) for each in of_own.values()) if is_fair else 0
        assert num > lower + room
        return
    assert len(found) == num == len(set(found))
    assert all(each.priority <= priority for each in found)
    if not is_fair:
        assert all(each.priority < priority for each in found)
    for flow in {each.flow for each in found if each.priority == priority}:
        assert left(flow) >= left(newcomer.flow) + 1


def test_of_the_lowest_priority_the_newest_of_the_tenant_that_holds_most_goes() -> None:
    greedy = [ticket(tenant="greedy") for _ in range(3)]
    occupancy = holding(*greedy, ticket(tenant="modest"), ticket(tenant="other"))

    found = occupancy.to_displace(ticket(tenant="modest"), num=1, num_bytes=0, is_fair=True)

    assert found == [greedy[-1]]


def test_where_it_is_full_of_bytes_the_tenant_with_most_bytes_goes() -> None:
    few, many = ticket(90, tenant="few"), [ticket(1, tenant="many") for _ in range(9)]
    occupancy = holding(few, *many)

    assert occupancy.to_displace(ticket(10, tenant="new"), num=0, num_bytes=10, is_fair=True) == [
        few
    ]


def test_bytes_are_not_made_room_for_by_those_that_have_none() -> None:
    occupancy = holding(ticket(priority=-1), ticket(9))

    assert occupancy.to_displace(ticket(5), num=0, num_bytes=5, is_fair=False) is None
