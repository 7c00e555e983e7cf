"""Requests of several sequences: they get a place as others do, and leave pods to other tenants."""

from __future__ import annotations

import pytest

from extproc.pods.pool import PoolSettings
from extproc.pods.tenants import LATELY_S
from extproc.queue import Ticket
from extproc.routing.router import Router
from extproc.types import Pick
from tests.builders import address, report
from tests.routing.scene import ask, routed, router

ROOM = 8


def pods(num: int) -> Router:
    """A router of the usual policy over pods that run so many sequences each."""
    numbers = range(1, num + 1)
    settings = PoolSettings(max_in_flight=ROOM)
    return router(*numbers, policy="least_harm", settings=settings)


def num_of(made: Router, tenant: str, num_sequences: int, *, now: float = 0.0) -> int:
    """How many requests of a tenant are sent at once."""
    for num in range(20):
        if isinstance(ask(made, tenant, num_sequences, now=now), Ticket):
            return num
    raise AssertionError("no end")


@pytest.mark.parametrize("num_sequences", [2, ROOM, 10 * ROOM, 1_024])
def test_a_request_that_is_more_than_any_pod_runs_gets_one(num_sequences: int) -> None:
    made = pods(1)
    first, second = ask(made, "a", num_sequences), ask(made, "b", num_sequences)

    assert isinstance(first, Pick)
    if num_sequences < ROOM:
        assert isinstance(second, Pick)
        return
    assert isinstance(second, Ticket)
    assert isinstance(ask(made, "c"), Ticket)  # there is no place left
    made.pool.flights.finish(first.id, now=1.0)
    made.offer(now=1.0)
    assert isinstance(made.resume(second, now=1.0), Pick | Ticket)


def test_requests_of_several_sequences_take_as_many_places() -> None:
    assert num_of(pods(1), "a", 4) == ROOM / 4
    assert num_of(pods(1), "a", 3) == 3  # the last with a place beyond the room


@pytest.mark.parametrize(("num_pods", "num"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_what_is_more_than_a_pod_runs_leaves_half_of_the_pods_to_other_tenants(
    num_pods: int, num: int
) -> None:
    made = pods(num_pods)
    routed(ask(made, "modest"))

    assert num_of(made, "greedy", 30) == num
    if num_pods > 1:
        assert isinstance(ask(made, "modest"), Pick)


def test_it_takes_all_pods_where_nobody_else_has_asked_lately() -> None:
    made = pods(4)
    routed(ask(made, "modest"))
    routed(ask(made, "greedy", now=1.0))

    assert num_of(made, "greedy", 30, now=1.0 + LATELY_S + 0.1) == 4


def test_who_waits_for_that_goes_on_once_a_pod_has_room_again() -> None:
    made = pods(2)
    routed(ask(made, "modest"))
    first = routed(ask(made, "greedy", 30))
    held = ask(made, "greedy", 30)
    assert isinstance(held, Ticket)

    made.pool.flights.finish(first.id, now=3.0)
    made.offer(now=3.0)

    assert routed(made.resume(held, now=3.0)).address in (address(1), address(2))


def test_a_request_of_one_sequence_is_not_held_for_one_of_several() -> None:
    """Although both are of the same tenant, and alike else."""
    made = pods(2)
    routed(ask(made, "modest"))
    routed(ask(made, "greedy", 30))
    held = [ask(made, "greedy", 30), ask(made, "greedy", 1)]
    made.queue.freed(1.0)
    made.offer(now=1.0)
    results = [made.resume(each, now=1.0) if isinstance(each, Ticket) else each for each in held]

    assert isinstance(results[0], Ticket)
    assert isinstance(results[1], Pick)


def test_a_pod_whose_room_is_not_known_is_left_to_others_too() -> None:
    made = router(1, 2, policy="least_harm")
    routed(ask(made, "modest"))
    first = routed(ask(made, "greedy", 30))
    for tick in range(1, 4):
        loaded = report(num_running=ROOM, num_waiting=22, generated_tokens=80 * tick)
        made.pool.record_report(first.address, loaded, taken_at_s=0.1 * tick)

    assert isinstance(ask(made, "greedy", 30, now=0.4), Ticket)
    other = routed(ask(made, "modest", now=0.4))
    assert other.address != first.address
    # Nor do all that wait for it go where the first one went.
    made.pool.flights.finish(first.id, now=5.0)
    made.pool.record_report(first.address, report(generated_tokens=1_000), taken_at_s=5.1)
    assert num_of(made, "greedy", 30, now=5.2) <= 1
