"""Some places of pods that have theirs taken for long are left to other tenants."""

from __future__ import annotations

import pytest

from extproc.learned.concurrency import LONG_S, MANY
from extproc.pods.pool import PoolSettings
from extproc.pods.tenants import LATELY_S
from extproc.queue import Ticket
from extproc.routing.router import Router
from extproc.types import Pick
from tests.builders import report
from tests.routing.scene import ask, routed, router

ROOM = MANY + 1
NOW = 100.0


def pods(num: int, *, room: int = ROOM, took_s: float = 20.0, policy: str = "least_harm") -> Router:
    """A router over pods that run so many sequences each, and have served one each for so long."""
    made = router(*range(1, num + 1), policy=policy, settings=PoolSettings(max_in_flight=room))
    first = [routed(ask(made, "greedy", now=NOW - took_s)) for _ in range(num)]
    for each in first:
        made.pool.flights.finish(each.id, now=NOW)
    return made


def seen(made: Router) -> Router:
    """Have another tenant come and go."""
    made.pool.flights.finish(routed(ask(made, "modest", now=NOW)).id, now=NOW)
    return made


def fill(made: Router, tenant: str, *, now: float = NOW) -> list[Pick]:
    """Send a tenant's requests until one has to wait."""
    picks = []
    while isinstance(found := ask(made, tenant, now=now), Pick):
        picks.append(found)
    assert isinstance(found, Ticket)
    return picks


@pytest.mark.parametrize("num_pods", [1, 2, 5])
def test_who_runs_many_leaves_one_place_to_others_where_responses_are_long(num_pods: int) -> None:
    made = seen(pods(num_pods))

    assert len(fill(made, "greedy")) == num_pods * ROOM - 1
    assert isinstance(ask(made, "modest", now=NOW), Pick)


def test_where_responses_are_short_nothing_is_left() -> None:
    made = seen(pods(2, took_s=LONG_S / 2))
    assert len(fill(made, "greedy")) == 2 * ROOM


def test_one_that_leaves_a_place_goes_on_once_a_place_more_is_free() -> None:
    made = seen(pods(2))
    picks = fill(made, "greedy")
    [waits] = made.queue

    made.pool.flights.finish(picks[0].id, now=NOW + 1.0)
    made.offer(now=NOW + 1.0)

    assert isinstance(made.resume(waits, now=NOW + 1.0), Pick)


def test_the_last_place_is_taken_once_nobody_else_has_come_for_long() -> None:
    made = seen(pods(2))
    fill(made, "greedy")
    [waits] = made.queue

    later_s = NOW + LATELY_S + 1.0
    made.offer(now=later_s)
    assert isinstance(made.resume(waits, now=later_s), Pick)


def test_of_few_places_none_is_left() -> None:
    """It would be too many of them."""
    made = seen(pods(2, room=MANY // 2 - 1))
    assert len(fill(made, "greedy")) == 2 * (MANY // 2 - 1)


def test_the_first_long_responses_leave_a_place_before_any_has_ended() -> None:
    made = router(1, 2, settings=PoolSettings(max_in_flight=ROOM))
    for number in range(MANY):
        routed(ask(made, "greedy", now=NOW - MANY - 1 + number))
    seen(made)

    assert len(fill(made, "greedy")) == 2 * ROOM - 1 - MANY
    assert isinstance(ask(made, "modest", now=NOW), Pick)


def test_of_pods_of_which_nothing_is_known_one_is_tried_and_the_others_keep_a_place() -> None:
    """Once the first is full, others are taken to be alike."""
    made = router(1, 2)
    for number in range(2 * ROOM):
        routed(ask(made, "greedy", now=NOW + number))
        made.pool.flights.finish(routed(ask(made, "modest", now=NOW + number)).id, now=NOW + number)
    now = NOW + 2 * ROOM
    views = made.pool.snapshot(now=now).endpoints
    (few, spared), (many, full) = sorted((view.num_pending, view.address) for view in views)

    assert few < many
    for page in range(3):
        now += 1
        waits = report(num_running=many - 1, num_waiting=1, work_tokens=page)
        made.pool.record_report(full, waits, taken_at_s=now)
        made.pool.record_report(spared, report(num_running=few, work_tokens=page), taken_at_s=now)
    assert isinstance(ask(made, "greedy", now=now), Ticket)
    assert routed(ask(made, "modest", now=now)).address == spared
