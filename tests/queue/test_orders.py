"""Orders of held requests, held to what they promise by trying all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.queue.orders import (
    ORDERS,
    Scene,
    clusters,
    deadline,
    first_come,
    newest,
    newest_in_time,
    running_in_clusters,
)
from extproc.queue.tickets import Ticket
from tests.builders import endpoint_view
from tests.queue.tickets import arrivals, names, ticket

NOW = 20
MAX_TICKETS = 6
ARRIVALS = st.lists(st.integers(0, NOW), max_size=MAX_TICKETS)
OBJECTIVES = st.integers(1, 24)
SCENES = st.builds(
    Scene,
    now=st.just(float(NOW)),
    service_s=st.integers(0, 6).map(float),
)
Reward = Callable[[float], float]


def firsts(served: Sequence[Ticket], scene: Scene) -> list[float]:
    """Return when they get their first tokens, if served in this order."""
    start = scene.now
    return [start + place * scene.service_s for place in range(len(served))]


def num_in_time(served: Sequence[Ticket], scene: Scene) -> int:
    times = firsts(served, scene)
    return sum(at <= each.deadline_s for at, each in zip(times, served, strict=True))


def earned(served: Sequence[Ticket], scene: Scene, reward: Reward) -> float:
    """Return the sum of rewards by times to the first token."""
    times = firsts(served, scene)
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


def most_recent(tickets: Sequence[Ticket], number: int, scene: Scene) -> list[Ticket]:
    """Return the last `number` to arrive, in order of arrival."""
    return first_come(tickets, scene)[len(tickets) - number :]


mixed_tickets = st.lists(
    st.builds(ticket, st.integers(0, NOW), OBJECTIVES | st.just(inf)), max_size=MAX_TICKETS
)


# --- all orders -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
@given(tickets=mixed_tickets, scene=SCENES)
def test_an_order_has_each_ticket_once(name: str, tickets: list[Ticket], scene: Scene) -> None:
    ordered = ORDERS[name](tickets, scene)

    assert sorted(map(id, ordered)) == sorted(map(id, tickets))


def test_first_come_is_by_arrival() -> None:
    assert arrivals(first_come([ticket(3), ticket(1), ticket(2)], Scene(5.0))) == [1, 2, 3]


def test_last_come_is_the_reverse() -> None:
    tickets = [ticket(1.0), ticket(3.0), ticket(2.0)]

    assert ORDERS["last_come"](tickets, Scene(5.0)) == [tickets[1], tickets[2], tickets[0]]


def test_the_earliest_deadline_is_first_then_the_earliest_arrival() -> None:
    tickets = [ticket(1), ticket(4, 1), ticket(3, 9), ticket(2, 3), ticket(0)]

    assert arrivals(deadline(tickets, Scene(5.0))) == [2, 4, 3, 0, 1]


# --- clusters -------------------------------------------------------------------------------


def test_requests_for_running_adapters_are_first_and_each_part_by_arrival() -> None:
    tickets = [ticket(at, adapter=adapter) for at, adapter in enumerate("cbacb")]

    ordered = clusters(tickets, Scene(9.0, running=frozenset("ab")))

    assert arrivals(ordered) == [1, 2, 4, 0, 3]


def test_requests_for_a_base_model_keep_nobody_s_adapter_out() -> None:
    tickets = [ticket(0, adapter="c"), ticket(1, adapter=None), ticket(2, adapter="a")]

    assert arrivals(clusters(tickets, Scene(9.0, running=frozenset("a")))) == [1, 2, 0]


def test_adapters_run_under_the_names_that_endpoints_know_them_by() -> None:
    tickets = [ticket(0.0, adapter="a"), ticket(1.0, adapter="b")]
    served = {"a": "a@2", "b": "b@1"}.__getitem__
    scene = Scene(9.0, running=frozenset({"a", "b@1"}), served=served)
    assert arrivals(clusters(tickets, scene)) == [1, 0]


def test_without_clusters_the_order_is_by_arrival() -> None:
    tickets = [ticket(1, adapter="c"), ticket(2, adapter=None), ticket(0, adapter="a")]

    assert arrivals(clusters(tickets, Scene(9.0))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("size", "expected"), [(0, ""), (1, "abc"), (2, "ab"), (3, "")], ids=lambda value: f"{value}"
)
def test_adapters_are_preferred_where_as_many_run_as_a_cluster_has(
    size: int, expected: str
) -> None:
    views = [
        endpoint_view(1, pending_by_adapter={"a": 3, "b": 1}),
        endpoint_view(2, pending_by_adapter={"c": 9}),
        endpoint_view(3),
    ]

    assert running_in_clusters(views, size) == frozenset(expected)


# --- newest in time -------------------------------------------------------------------------


@given(ARRIVALS, OBJECTIVES, SCENES)
def test_with_one_objective_the_most_recent_go_in_order_of_arrival(
    times: list[int], objective_s: int, scene: Scene
) -> None:
    tickets = [ticket(at, objective_s) for at in times]

    kept, given_up = newest_in_time(tickets, scene)

    assert arrivals(kept) == arrivals(most_recent(tickets, len(kept), scene))
    assert arrivals(given_up) == sorted(arrivals(given_up), reverse=True)
    assert newest(tickets, scene) == kept + given_up


@given(mixed_tickets, SCENES)
def test_no_set_in_any_order_has_more_in_time(tickets: list[Ticket], scene: Scene) -> None:
    """Whatever the objectives are."""
    kept, _ = newest_in_time(tickets, scene)

    assert num_in_time(kept, scene) == len(kept)
    assert len(kept) == max(num_in_time(plan, scene) for plan in plans(tickets))


@given(mixed_tickets, SCENES)
def test_of_the_largest_sets_in_time_the_one_of_the_newest_is_served(
    tickets: list[Ticket], scene: Scene
) -> None:
    kept, _ = newest_in_time(tickets, scene)

    others = (
        sorted(arrivals(each), reverse=True)
        for each in combinations(tickets, len(kept))
        if num_in_time(deadline(each, scene), scene) == len(kept)
    )
    assert sorted(arrivals(kept), reverse=True) == max(others)


def test_a_new_request_that_is_urgent_goes_before_an_old_one_that_is_due() -> None:
    """Only one can be in time; the later deadline is the old one's."""
    old, new = ticket(0, 12.0, name="old"), ticket(9, 2.0, name="new")

    kept, given_up = newest_in_time([old, new], Scene(10.0, service_s=5.0))

    assert (names(kept), names(given_up)) == (["new"], ["old"])


@given(mixed_tickets, SCENES)
def test_nobody_is_given_up_while_all_can_be_in_time(tickets: list[Ticket], scene: Scene) -> None:
    can_be = num_in_time(deadline(tickets, scene), scene) == len(tickets)

    assert (newest_in_time(tickets, scene)[1] == []) == can_be


def test_requests_without_an_objective_are_never_given_up() -> None:
    tickets = [ticket(at) for at in range(5)]

    assert newest_in_time(tickets, Scene(1e6, service_s=1e6)) == (tickets, [])


def test_with_an_unknown_service_time_those_that_are_late_already_are_given_up() -> None:
    tickets = [ticket(at, 5) for at in range(10)]

    kept, given_up = newest_in_time(tickets, Scene(12.0))

    assert (arrivals(kept), arrivals(given_up)) == ([7, 8, 9], [6, 5, 4, 3, 2, 1, 0])


# --- Theorem B.1 of S-LoRA, and its conditions ----------------------------------------------

CONCAVE: dict[str, Reward] = {
    "linear": lambda waited_s: 1 - waited_s,
    "quadratic": lambda waited_s: 1 - waited_s**2,
    "flat-then-falling": lambda waited_s: min(0.0, 10 - waited_s),
}


@pytest.mark.parametrize("reward", CONCAVE.values(), ids=CONCAVE)
@given(times=ARRIVALS, scene=SCENES, data=st.data())
def test_for_a_concave_reward_no_requests_earn_more_than_as_many_of_the_most_recent(
    reward: Reward, times: list[int], scene: Scene, data: st.DataObject
) -> None:
    tickets = [ticket(at) for at in times]
    number = data.draw(st.integers(0, len(tickets)))

    best = max(earned(plan, scene, reward) for plan in permutations(tickets, number))

    assert earned(most_recent(tickets, number, scene), scene, reward) == best


@given(ARRIVALS, OBJECTIVES, SCENES)
def test_for_satisfaction_no_plan_earns_more_than_some_number_of_those_kept(
    times: list[int], objective_s: int, scene: Scene
) -> None:
    """It is concave among requests that are in time, and the others earn nothing."""
    tickets = [ticket(at, objective_s) for at in times]
    reward = satisfaction(objective_s)
    kept, _ = newest_in_time(tickets, scene)

    best = max(earned(plan, scene, reward) for plan in plans(tickets))

    by_number = [
        earned(most_recent(kept, number, scene), scene, reward) for number in range(len(kept) + 1)
    ]
    assert max(by_number) == pytest.approx(best)


def test_the_largest_number_in_time_need_not_be_the_most_satisfied() -> None:
    """An old request that is just in time delays all after it."""
    scene = Scene(10.0, service_s=4.0)
    tickets = [ticket(0, 10.0), ticket(10, 10.0), ticket(10, 10.0)]
    reward = satisfaction(10.0)

    kept, _ = newest_in_time(tickets, scene)

    assert kept == tickets
    assert earned(kept[1:], scene, reward) > earned(kept, scene, reward) + 0.6


def test_where_a_reward_is_not_concave_the_oldest_of_those_served_may_earn_more_as_the_last() -> (
    None
):
    """Beyond the objective satisfaction is not: who is late already has nothing to lose."""
    scene = Scene(10.0, service_s=4.0)
    tickets = [ticket(0, 5.0), ticket(10, 5.0)]
    reward = satisfaction(5.0)

    in_order, reverse = (earned(each, scene, reward) for each in (tickets, tickets[::-1]))

    assert reverse > in_order
    assert newest_in_time(tickets, scene) == (tickets[1:], tickets[:1])


def test_with_several_objectives_order_of_arrival_is_not_enough() -> None:
    """The theorem has one reward for all: here its plan gets one of two in time."""
    scene = Scene(10.0, service_s=2.0)
    patient, hasty = ticket(8, 9.0, name="patient"), ticket(9, 2.0, name="hasty")

    kept, _ = newest_in_time([patient, hasty], scene)

    assert num_in_time([patient, hasty], scene) == 1
    assert names(kept) == ["hasty", "patient"]
    assert num_in_time(kept, scene) == 2


def test_with_several_objectives_the_most_recent_need_not_be_in_the_best_set() -> None:
    scene = Scene(10.0, service_s=1.0)
    patient, hopeless = ticket(5, 20.0, name="patient"), ticket(9, 0.5, name="hopeless")

    kept, given_up = newest_in_time([patient, hopeless], scene)

    assert (names(kept), names(given_up)) == (["patient"], ["hopeless"])
