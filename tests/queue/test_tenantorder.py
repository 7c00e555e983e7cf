"""Orders of held requests, held to what they promise by trying all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.queue.tenantorder import BACKLOG_RATIO, OrderFacts, first_come, in_time, newest_in_time
from extproc.queue.tickets import Ticket
from tests.queue.tickets import arrivals, names, ticket

NOW = 20
MAX_TICKETS = 6
ARRIVALS = st.lists(st.integers(0, NOW), max_size=MAX_TICKETS)
OBJECTIVES = st.integers(1, 24)
FACTS = st.builds(
    OrderFacts,
    now=st.just(float(NOW)),
    service_s=st.integers(0, 6).map(float),
)
Reward = Callable[[float], float]


def by_deadline(tickets: Sequence[Ticket]) -> list[Ticket]:
    return sorted(first_come(tickets), key=lambda ticket: ticket.deadline_s)


def firsts(served: Sequence[Ticket], facts: OrderFacts) -> list[float]:
    """Return when they get their first tokens, if served in this order."""
    start = facts.now
    return [start + place * facts.service_s for place in range(len(served))]


def num_in_time(served: Sequence[Ticket], facts: OrderFacts) -> int:
    times = firsts(served, facts)
    return sum(at <= each.deadline_s for at, each in zip(times, served, strict=True))


def earned(served: Sequence[Ticket], facts: OrderFacts, reward: Reward) -> float:
    """Return the sum of rewards by times to the first token."""
    times = firsts(served, facts)
    return sum(
        reward(at - each.request.arrived_at_s) for at, each in zip(times, served, strict=True)
    )


def satisfaction(objective_s: float) -> Reward:
    """S-LoRA's: 1 for no wait, 0 at the objective and beyond. Concave up to there."""
    return lambda waited_s: max(0.0, 1 - (waited_s / objective_s) ** 2)


def plans(tickets: Sequence[Ticket]) -> Iterable[tuple[Ticket, ...]]:
    """Yield all sets in all orders."""
    for size in range(len(tickets) + 1):
        yield from permutations(tickets, size)


def most_recent(tickets: Sequence[Ticket], number: int, facts: OrderFacts) -> list[Ticket]:
    """Return the last `number` to arrive, in order of arrival."""
    return first_come(tickets)[len(tickets) - number :]


mixed_tickets = st.lists(
    st.builds(ticket, st.integers(0, NOW), OBJECTIVES | st.just(inf)), max_size=MAX_TICKETS
)


# --- both orders ----------------------------------------------------------------------------


@given(tickets=mixed_tickets, facts=FACTS, is_for_late=st.booleans())
def test_an_order_has_each_ticket_once(
    tickets: list[Ticket], facts: OrderFacts, is_for_late: bool
) -> None:
    ordered, back = in_time(tickets, replace(facts, is_for_late=is_for_late))

    assert sorted(map(id, ordered)) == sorted(map(id, tickets))
    assert sorted(map(id, first_come(tickets))) == sorted(map(id, tickets))
    assert set(map(id, back)) <= set(map(id, tickets))


def test_first_come_is_by_arrival() -> None:
    assert arrivals(first_come([ticket(3), ticket(1), ticket(2)])) == [1, 2, 3]


# --- in time --------------------------------------------------------------------------------


def test_nobody_steps_back_while_all_have_a_place_within_twice_the_objective() -> None:
    """At five places a second, eight requests have theirs within 1.6 s."""
    tickets = [ticket(at / 10, 0.8) for at in range(8)]
    late = OrderFacts(1.0, service_s=0.2)
    assert len(tickets) * late.service_s == BACKLOG_RATIO * 0.8

    assert in_time(tickets, late) == (tickets, [])


def test_with_more_of_them_those_that_cannot_be_in_time_step_back_the_oldest_first() -> None:
    tickets = [ticket(at / 10, 0.8) for at in range(9)]

    ordered, back = in_time(tickets, OrderFacts(1.0, service_s=0.2))

    kept = [0.5, 0.6, 0.7, 0.8]
    assert arrivals(ordered) == [*kept, 0.0, 0.1, 0.2, 0.3, 0.4]
    assert arrivals(back) == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_a_place_for_those_that_cannot_be_in_time_goes_to_the_oldest() -> None:
    tickets = [ticket(at / 10, 0.8) for at in range(9)]

    ordered, back = in_time(tickets, OrderFacts(1.0, service_s=0.2, is_for_late=True))

    assert arrivals(ordered) == [0.0, 0.5, 0.6, 0.7, 0.8, 0.1, 0.2, 0.3, 0.4]
    assert tickets[0] not in back


def test_beside_declared_objectives_those_that_nobody_declared_step_back_at_once() -> None:
    late, declared = ticket(0, 1.0), ticket(9, 2.0)
    declared.is_refusable = True

    assert in_time([late, declared], OrderFacts(10.0, service_s=0.5)) == ([declared, late], [late])


def test_declared_ones_that_will_be_late_are_last_and_get_no_place_of_the_others() -> None:
    late = ticket(0, 1.0)
    late.is_refusable = True

    facts = OrderFacts(10.0, service_s=0.5, is_for_late=True)

    assert in_time([late, ticket(9)], facts)[1] == [late]


# --- newest in time -------------------------------------------------------------------------


@given(ARRIVALS, OBJECTIVES, FACTS)
def test_with_one_objective_the_most_recent_go_in_order_of_arrival(
    times: list[int], objective_s: int, facts: OrderFacts
) -> None:
    tickets = [ticket(at, objective_s) for at in times]

    kept, given_up = newest_in_time(tickets, facts)

    assert arrivals(kept) == arrivals(most_recent(tickets, len(kept), facts))
    assert arrivals(given_up) == sorted(arrivals(given_up))


@given(mixed_tickets, FACTS)
def test_no_set_in_any_order_has_more_in_time(tickets: list[Ticket], facts: OrderFacts) -> None:
    """Whatever the objectives are."""
    kept, _ = newest_in_time(tickets, facts)

    assert num_in_time(kept, facts) == len(kept)
    assert len(kept) == max(num_in_time(plan, facts) for plan in plans(tickets))


@given(mixed_tickets, FACTS)
def test_of_the_largest_sets_in_time_the_one_of_the_newest_is_served(
    tickets: list[Ticket], facts: OrderFacts
) -> None:
    kept, _ = newest_in_time(tickets, facts)

    others = (
        sorted(arrivals(each), reverse=True)
        for each in combinations(tickets, len(kept))
        if num_in_time(by_deadline(each), facts) == len(kept)
    )
    assert sorted(arrivals(kept), reverse=True) == max(others)


def test_a_new_request_that_is_urgent_goes_before_an_old_one_that_is_due() -> None:
    """Only one can be in time; the later deadline is the old one's."""
    old, new = ticket(0, 12.0, name="old"), ticket(9, 2.0, name="new")

    kept, given_up = newest_in_time([old, new], OrderFacts(10.0, service_s=5.0))

    assert (names(kept), names(given_up)) == (["new"], ["old"])


@given(mixed_tickets, FACTS)
def test_nobody_is_given_up_while_all_can_be_in_time(
    tickets: list[Ticket], facts: OrderFacts
) -> None:
    can_be = num_in_time(by_deadline(tickets), facts) == len(tickets)

    assert (newest_in_time(tickets, facts)[1] == []) == can_be


def test_requests_without_an_objective_are_never_given_up() -> None:
    tickets = [ticket(at) for at in range(5)]

    assert newest_in_time(tickets, OrderFacts(1e6, service_s=1e6)) == (tickets, [])


def test_with_an_unknown_service_time_those_that_are_late_already_are_given_up() -> None:
    tickets = [ticket(at, 5) for at in range(10)]

    kept, given_up = newest_in_time(tickets, OrderFacts(12.0))

    assert (arrivals(kept), arrivals(given_up)) == ([7, 8, 9], [0, 1, 2, 3, 4, 5, 6])


# --- Theorem B.1 of S-LoRA, and its conditions ----------------------------------------------

CONCAVE: dict[str, Reward] = {
    "linear": lambda waited_s: 1 - waited_s,
    "quadratic": lambda waited_s: 1 - waited_s**2,
    "flat-then-falling": lambda waited_s: min(0.0, 10 - waited_s),
}


@pytest.mark.parametrize("reward", CONCAVE.values(), ids=CONCAVE)
@given(times=ARRIVALS, facts=FACTS, data=st.data())
def test_for_a_concave_reward_no_requests_earn_more_than_as_many_of_the_most_recent(
    reward: Reward, times: list[int], facts: OrderFacts, data: st.DataObject
) -> None:
    tickets = [ticket(at) for at in times]
    number = data.draw(st.integers(0, len(tickets)))

    best = max(earned(plan, facts, reward) for plan in permutations(tickets, number))

    assert earned(most_recent(tickets, number, facts), facts, reward) == best


@given(ARRIVALS, OBJECTIVES, FACTS)
def test_for_satisfaction_no_plan_earns_more_than_some_number_of_those_kept(
    times: list[int], objective_s: int, facts: OrderFacts
) -> None:
    """It is concave among requests that are in time, and the others earn nothing."""
    tickets = [ticket(at, objective_s) for at in times]
    reward = satisfaction(objective_s)
    kept, _ = newest_in_time(tickets, facts)

    best = max(earned(plan, facts, reward) for plan in plans(tickets))

    by_number = [
        earned(most_recent(kept, number, facts), facts, reward) for number in range(len(kept) + 1)
    ]
    assert max(by_number) == pytest.approx(best)


def test_the_largest_number_in_time_need_not_be_the_most_satisfied() -> None:
    """An old request that is just in time delays all after it."""
    facts = OrderFacts(10.0, service_s=4.0)
    tickets = [ticket(0, 10.0), ticket(10, 10.0), ticket(10, 10.0)]
    reward = satisfaction(10.0)

    kept, _ = newest_in_time(tickets, facts)

    assert kept == tickets
    assert earned(kept[1:], facts, reward) > earned(kept, facts, reward) + 0.6


def test_where_a_reward_is_not_concave_the_oldest_of_those_served_may_earn_more_as_the_last() -> (
    None
):
    """Beyond the objective satisfaction is not: who is late already has nothing to lose."""
    facts = OrderFacts(10.0, service_s=4.0)
    tickets = [ticket(0, 5.0), ticket(10, 5.0)]
    reward = satisfaction(5.0)

    in_order, reverse = (earned(each, facts, reward) for each in (tickets, tickets[::-1]))

    assert reverse > in_order
    assert newest_in_time(tickets, facts) == (tickets[1:], tickets[:1])


def test_with_several_objectives_order_of_arrival_is_not_enough() -> None:
    """The theorem has one reward for all: here its plan gets one of two in time."""
    facts = OrderFacts(10.0, service_s=2.0)
    patient, hasty = ticket(8, 9.0, name="patient"), ticket(9, 2.0, name="hasty")

    kept, _ = newest_in_time([patient, hasty], facts)

    assert num_in_time([patient, hasty], facts) == 1
    assert names(kept) == ["hasty", "patient"]
    assert num_in_time(kept, facts) == 2


def test_with_several_objectives_the_most_recent_need_not_be_in_the_best_set() -> None:
    facts = OrderFacts(10.0, service_s=1.0)
    patient, hopeless = ticket(5, 20.0, name="patient"), ticket(9, 0.5, name="hopeless")

    kept, given_up = newest_in_time([patient, hopeless], facts)

    assert (names(kept), names(given_up)) == (["patient"], ["hopeless"])
