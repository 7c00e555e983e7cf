"""Who waits at another router goes first at this one, too."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.phrases import FOR_SLOT
from extproc.queue import QueueSettings, Waiting
from extproc.queue.destinations import ALL
from extproc.queue.waiting import NOBODY, Ahead
from extproc.tenancy import Claim
from extproc.types import EndpointView, RequestInfo
from tests.builders import endpoint_view
from tests.queue.scene import Scene

GREEDY, MODEST, GOLD = "greedy", "modest", 10
SLOT_HOLD_S = QueueSettings().slot_hold_s


def pods(*numbers: int) -> list[EndpointView]:
    return [endpoint_view(number, registered=frozenset({"m"})) for number in numbers]


def waits(priority: int = GOLD, *, at: Sequence[EndpointView] | None = None) -> Scene:
    """A router at which one waits, in vain so far."""
    scene = Scene(endpoints=pods(1, 2) if at is None else at, reason=FOR_SLOT)
    scene.hold("first", "m", priority=priority)
    scene.free(0)
    return scene


def other(told: Scene, *, at: Sequence[EndpointView] | None = None) -> Scene:
    """A router that was told who waits at `told`."""
    scene = Scene(endpoints=pods(1, 2) if at is None else at, now=told.now)
    tell(told, scene)
    return scene


def tell(told: Scene, scene: Scene, name: str = "aa") -> None:
    waiting = told.waiting
    scene.queue.hear(name, waiting, now=scene.now, destinations=scene.destinations)


def behind_s(scene: Scene, priority: int = 0, *, at_s: float | None = None) -> float:
    arrived_s = scene.now if at_s is None else at_s
    request = RequestInfo("m", arrived_at_s=arrived_s, claim=Claim(priority=priority))
    until_s = scene.queue.must_wait_until_s(request, scene.now)
    return 0 if until_s is None else until_s - scene.now


def test_a_lower_priority_lets_a_higher_one_go_first() -> None:
    scene = other(waits())

    assert scene.queue.has_line()
    assert behind_s(scene) == pytest.approx(SLOT_HOLD_S - scene.now)
    assert behind_s(scene, at_s=-1.0) > behind_s(scene, GOLD) == 0


def test_those_below_0_wait_as_long_as_anybody_does_and_go_when_nobody_does() -> None:
    told = waits(0)
    scene = other(told)
    scene.hold("idle", "m", priority=-1)
    before = scene.free(9, after_s=10.0)
    behind = behind_s(scene, -1)
    told.queue.remove(told.tickets["first"], now=told.now)
    scene.now, scene.room = scene.now + 1.0, 1
    tell(told, scene)
    scene.queue.offer(scene.look, now=scene.now, destinations=scene.destinations)

    assert (before, behind) == ([], inf)
    assert scene.sent == ["idle"]
    assert not scene.queue.has_line()


@pytest.mark.parametrize(
    ("theirs", "ours", "is_behind"),
    [((1, 2), (2, 1), True), ((1,), (2, 3), False), ((1, 2), (3, 4, 2), True), ((), (1,), True)],
)
def test_one_goes_first_where_both_may_go_whatever_the_order_of_endpoints(
    theirs: tuple[int, ...], ours: tuple[int, ...], is_behind: bool
) -> None:
    """Without endpoints it is not known where one may go: it may be anywhere."""
    scene = other(waits(at=pods(*theirs)), at=pods(*ours))

    assert (behind_s(scene) > 0) is is_behind
    assert (behind_s(scene, -1) == inf) is is_behind


def test_where_endpoints_change_what_is_told_next_counts() -> None:
    told = waits()
    scene = other(told, at=pods(3))
    before = behind_s(scene)
    scene.endpoints = pods(3, 1)
    scene.hold("held", "other")
    scene.free(0, after_s=0.1)
    between = behind_s(scene)
    tell(told, scene)

    assert (before, between) == (0, 0)
    assert behind_s(scene) > 0


def test_what_is_told_last_counts_and_what_ended_lets_others_go_at_once() -> None:
    told = waits()
    scene = other(told)
    scene.hold("held", "m")
    at_first = scene.free(9, after_s=0.1)
    told.free(1, after_s=1.0)
    scene.now, scene.room = told.now, 9
    tell(told, scene)
    is_due = scene.queue.is_due(scene.now)
    scene.queue.offer(scene.look, now=scene.now, destinations=scene.destinations)

    assert at_first == []
    assert told.sent == ["first"]
    assert is_due
    assert scene.sent == ["held"]


def test_when_one_of_several_leaves_the_others_do_not_lose_their_place_elsewhere() -> None:
    told = waits()
    told.hold("second", "m", priority=GOLD)
    told.free(0)
    before = told.waiting
    told.queue.remove(told.tickets["first"], now=told.now)
    between = told.waiting
    told.free(0)

    assert before.ahead
    assert between == before
    assert told.waiting.ahead


def test_several_routers_are_heard_and_the_highest_of_them_first() -> None:
    scene = other(waits(1))
    tell(waits(), scene, "bb")
    both = behind_s(scene, 1)
    scene.queue.hear("bb", NOBODY, now=scene.now, destinations=scene.destinations)

    assert both > behind_s(scene, 1) == 0
    assert behind_s(scene) > 0


def test_nobody_waits_longer_than_by_our_own_settings() -> None:
    told = other(waits())
    word = Waiting(ahead=(Ahead(GOLD, 1e9, ALL),))
    told.queue.hear("bb", word, now=told.now, destinations=told.destinations)

    assert behind_s(told) == pytest.approx(SLOT_HOLD_S)


@given(st.floats(-1e6, 1e6))
def test_what_is_told_between_clocks_is_the_same_there_and_back(by_s: float) -> None:
    told = waits().waiting
    back = told.shifted(by_s).shifted(-by_s)

    for one, same in zip(told.ahead, back.ahead, strict=True):
        assert (one.priority, one.reach) == (same.priority, same.reach)
        assert one.until_s == pytest.approx(same.until_s, abs=1e-6)


def test_what_one_gets_at_another_router_while_it_waits_does_not_put_it_behind_others() -> None:
    scene = Scene()
    for _ in range(3):
        scene.queue.charge(RequestInfo("m", claim=Claim(tenant=GREEDY)))
    scene.hold("greedy", tenant=GREEDY)
    scene.queue.charge_elsewhere(f" {MODEST}", 0, 1.0)
    scene.hold("modest", tenant=MODEST)
    scene.queue.charge_elsewhere(f" {GREEDY}", 0, 9.0)

    assert scene.free(1) == ["modest"]


def test_who_knows_nobody_that_waits_is_told_of_nobody() -> None:
    assert Scene().waiting == NOBODY
