"""Strict priorities with ageing: who is at which level, and how long the lowest wait."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from extproc.queue.plan import QueuePlan
from extproc.queue.tenantorder import first_come
from extproc.queue.tickets import QueueSettings, Ticket, level
from tests.queue.tickets import arrivals, ticket

LOWEST, HIGHEST = 0, 5
AGEING_S = 4.0
FULL_AGE_S = (HIGHEST - LOWEST) * AGEING_S
BOUND_S = FULL_AGE_S + AGEING_S
PRIORITIES = st.integers(LOWEST, HIGHEST)


def test_the_highest_level_is_first_and_tickets_of_one_keep_their_order() -> None:
    tickets = [ticket(at, priority=each) for at, each in enumerate((0, 2, -1, 2, 0))]

    ordered, _ = QueuePlan(QueueSettings("first_come")).make(tickets, 9.0, 0.0)

    assert arrivals(ordered) == [1, 3, 0, 4, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(-2, 1), st.sampled_from([0.5, inf])), max_size=8
    ),
    st.integers(0, 12),
    st.sampled_from([AGEING_S, inf]),
)
def test_all_are_at_their_own_level(
    held: Sequence[tuple[int, int, float]], now: int, ageing_s: float
) -> None:
    tickets = [ticket(at, objective_s, priority=each) for at, each, objective_s in held]
    settings = QueueSettings("first_come", fair=False, ageing_s=ageing_s)

    ordered = list(QueuePlan(settings).make(tickets, now, 0.0)[0])

    assert ordered == sorted(
        tickets, key=lambda each: (-level(each, now, ageing_s), each.arrived_at_s)
    )


@given(PRIORITIES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_without_ageing_a_level_is_the_priority(
    priority: int, arrived_at_s: float, now: float
) -> None:
    assert level(ticket(arrived_at_s, priority=priority), now) == priority
    assert level(ticket(arrived_at_s, priority=priority), now, inf) == priority


def test_each_age_is_one_priority_more() -> None:
    held = ticket(10.0, priority=1)

    levels = [level(held, now, 5.0) for now in (9.0, 10.0, 14.9, 15.0, 20.0)]

    assert levels == [1, 1, 1, 2, 3]


@given(st.integers(-9, -1), st.floats(0, 1e6))
def test_those_below_0_stay_below_0(priority: int, now: float) -> None:
    found = level(ticket(0.0, priority=priority), now, AGEING_S)

    assert priority <= found <= -1


@given(PRIORITIES, st.floats(0, 100))
def test_the_lowest_priority_is_at_the_top_after_the_full_age(priority: int, more_s: float) -> None:
    held = ticket(0.0, priority=priority)

    assert level(held, FULL_AGE_S + more_s, AGEING_S) >= HIGHEST


@given(PRIORITIES, PRIORITIES, st.integers(0, 50), st.integers(0, 100))
def test_who_arrives_the_bound_later_is_always_at_a_lower_level(
    early: int, late: int, more_s: int, waited_s: int
) -> None:
    arrived_at_s = BOUND_S + more_s
    now = arrived_at_s + waited_s

    overtaken = level(ticket(0.0, priority=early), now, AGEING_S)

    assert overtaken > level(ticket(arrived_at_s, priority=late), now, AGEING_S)


def served(tickets: list[Ticket], service_s: float) -> list[tuple[float, Ticket]]:
    """Return each with its time, of a server that takes one each `service_s`.

    Within a level the newest goes first, which is worst for those that wait.
    """
    left, now, found = first_come(tickets), 0.0, list[tuple[float, Ticket]]()
    while left:
        held = [each for each in left if each.request.arrived_at_s <= now]
        if held:
            first = max(held, key=lambda each: (level(each, now, AGEING_S), held.index(each)))
            left.remove(first)
            found.append((now, first))
        now += service_s
    return found


TICKETS = st.builds(
    lambda at, priority: ticket(at, priority=priority), st.integers(0, 60), PRIORITIES
)


@given(st.lists(TICKETS, max_size=40), st.integers(1, 4))
def test_a_request_waits_only_for_those_that_arrive_before_the_bound(
    tickets: list[Ticket], service_s: int
) -> None:
    times = served(tickets, service_s)

    for at, each in times:
        arrived_at_s = each.request.arrived_at_s
        before = [other for when, other in times if arrived_at_s <= when < at]
        assert all(other.request.arrived_at_s < arrived_at_s + BOUND_S for other in before)
        assert at - arrived_at_s < (len(before) + 1) * service_s
