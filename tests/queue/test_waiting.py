"""Who lets whom go first while room is short, and for how long at most."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.phrases import FOR_POD, FOR_SLOT
from extproc.queue import QueueSettings
from extproc.queue.offers import LATE_AGAIN_S, MAX_ASKED
from extproc.tenancy import Claim
from extproc.types import RequestInfo
from tests.builders import endpoint_view
from tests.fleets import columns_of
from tests.queue.scene import REST_S, Scene, slow

SHORT_S = 0.05
"""Longer than the rest after most offers of these tests."""
HOLD_S = QueueSettings().slot_hold_s
GOLD = 10


def newcomer(priority: int = 0, at_s: float = 0.0) -> RequestInfo:
    return RequestInfo("m", arrived_at_s=at_s, claim=Claim(priority=priority))


def behind_s(scene: Scene, priority: int = 0, *, at_s: float | None = None) -> float:
    """For how long a newcomer has to let others go first."""
    request = newcomer(priority, scene.now if at_s is None else at_s)
    until_s = scene.queue.must_wait_until_s(request, scene.now)
    return 0 if until_s is None else until_s - scene.now


def waiting(settings: QueueSettings | None = None, priority: int = GOLD) -> Scene:
    """One has been asked for in vain just now, for want of a slot."""
    scene = Scene(settings or QueueSettings(), stuck=frozenset({"slot"}), reason=FOR_SLOT)
    scene.hold("first", "slot", priority=priority, reason=FOR_SLOT)
    scene.free(9)
    return scene


# --- newcomers -------------------------------------------------------------------------------


def test_who_comes_later_with_a_lower_priority_lets_higher_ones_go_first_for_a_while() -> None:
    scene = waiting()

    assert behind_s(scene) == behind_s(scene, GOLD - 1) == pytest.approx(HOLD_S - REST_S)
    assert behind_s(scene, GOLD) == behind_s(scene, GOLD + 1) == 0
    scene.now += HOLD_S
    assert behind_s(scene) == 0


@pytest.mark.parametrize("reason", [FOR_SLOT, "full"])
def test_those_that_came_before_one_of_a_higher_priority_let_it_go_first_as_well(
    reason: str,
) -> None:
    scene = waiting()
    scene.reason = reason
    scene.free(9)

    assert behind_s(scene, at_s=-1.0) > 0


def test_of_those_of_one_priority_the_first_counts() -> None:
    """Where one waits in vain and more keep coming, they do not hold up others for ever."""
    scene = waiting()
    for number in range(30):
        scene.hold(f"{number}", "slot", priority=GOLD)
        scene.free(9)

    assert behind_s(scene) == 0


def test_who_waits_for_a_pod_holds_up_nobody() -> None:
    scene = waiting()
    scene.reason = FOR_POD
    scene.free(9)

    assert behind_s(scene) == behind_s(scene, -1) == 0


def test_those_below_0_wait_as_long_as_anybody_else_does() -> None:
    scene = waiting(QueueSettings(fair=False), priority=0)
    at_first = behind_s(scene, -1)
    scene.now += 1000.0
    scene.free(9)

    assert at_first == behind_s(scene, -1) == behind_s(scene, -1, at_s=-9.0) == inf


def test_those_below_0_go_once_nobody_else_waits() -> None:
    scene = Scene(stuck=frozenset({"slot"}))
    scene.hold("other", "slot")
    scene.hold("shed", "m", priority=-1)
    before = scene.free(9)
    scene.now += REST_S
    scene.queue.remove(scene.tickets["other"], now=scene.now)
    scene.queue.offer(scene.look, now=scene.now)

    assert before == []
    assert scene.sent == ["shed"]


def test_those_below_0_wait_for_late_ones_too() -> None:
    scene = slow(is_busy=True)
    scene.hold("late", goal_s=0.1)
    scene.hold("shed", priority=-1)
    scene.now += 1.0

    assert scene.free(9, after_s=SHORT_S) == []
    assert scene.free(9, after_s=LATE_AGAIN_S) == ["late", "shed"]


def serve(scene: Scene) -> None:
    scene.stuck = frozenset()
    scene.free(1, after_s=SHORT_S)


def leave(scene: Scene) -> None:
    scene.queue.remove(scene.tickets["first"], now=scene.now)


def expire(scene: Scene) -> None:
    scene.tickets["first"].give_up_s = scene.now
    scene.queue.expire(scene.tickets["first"], now=scene.now)


def displace(scene: Scene) -> None:
    scene.queue.settings = QueueSettings(max_requests=len(scene.queue))
    scene.hold("higher", priority=GOLD + 1)
    scene.free(9)


@pytest.mark.parametrize("end", [serve, leave, expire, displace])
def test_nobody_lets_one_go_first_that_has_gone(end: Callable[[Scene], None]) -> None:
    scene = waiting()

    end(scene)

    assert scene.tickets["first"] not in scene.queue
    assert behind_s(scene) == 0


def test_other_settings_count_at_once_and_begin_anew() -> None:
    scene = waiting()

    scene.queue.configure(QueueSettings(slot_hold_s=6 * HOLD_S))
    assert behind_s(scene) == 0
    scene.free(9)
    assert behind_s(scene) == pytest.approx(6 * HOLD_S - 2 * REST_S)


# --- those that are held ---------------------------------------------------------------------


def test_one_that_was_put_off_is_asked_for_when_the_first_has_had_its_time() -> None:
    scene = waiting()
    scene.hold("more", "m")
    before = scene.free(9, after_s=SHORT_S)
    scene.now = HOLD_S
    scene.queue.offer(scene.look, now=scene.calls[-1])

    assert before == []
    assert scene.calls[-1] == pytest.approx(HOLD_S)
    assert scene.sent == ["more"]


@pytest.mark.parametrize("end", [leave, expire])
def test_one_that_was_put_off_is_asked_for_at_once_when_the_first_has_gone(
    end: Callable[[Scene], None],
) -> None:
    scene = waiting()
    scene.hold("more", "m")
    scene.free(9, after_s=SHORT_S)
    scene.now += SHORT_S
    end(scene)

    assert scene.calls[-1] == scene.now
    scene.queue.offer(scene.look, now=scene.now)
    assert scene.sent == ["more"]


def test_one_for_the_base_model_keeps_no_slot() -> None:
    scene = Scene(stuck=frozenset({"base"}))
    for name in ("one", "two"):
        scene.hold(name, "base", reason=FOR_SLOT)
    scene.free(1)
    scene.queue.remove(scene.tickets["one"], now=scene.now)

    assert scene.held == ["two"]
    assert scene.queue.reservations.kept_from(newcomer(), columns_of(()), now=scene.now) == {}


def test_late_ones_are_let_go_first_by_nobody_of_0_and_above() -> None:
    scene = slow(stuck=frozenset({"slot"}), is_busy=True)
    scene.hold("late", "slot", priority=1, goal_s=0.1)
    scene.now += 1.0
    scene.hold("more")

    assert scene.free(9, after_s=2 * LATE_AGAIN_S) == ["more"]
    assert behind_s(scene) == 0


def test_wherever_those_wait_that_an_offer_did_not_come_to_those_below_0_do_not_go() -> None:
    names = [f"stuck {number}" for number in range(MAX_ASKED + 1)]
    scene = Scene(stuck=frozenset(names), endpoints=PODS)
    for name in names:
        scene.hold(name, name if name != names[-1] else "slot")
    scene.free(9)
    scene.now += REST_S

    assert behind_s(scene, -1) == inf


# --- where they may go -----------------------------------------------------------------------

PODS = [
    endpoint_view(1, registered=frozenset({"slot", "also here"})),
    endpoint_view(2, registered=frozenset({"elsewhere", "also here"})),
]


@pytest.mark.parametrize(
    ("model", "subset", "is_behind"),
    [
        ("slot", None, True),
        ("also here", None, True),
        ("elsewhere", None, False),
        ("also here", frozenset({PODS[1].address}), False),
        ("also here", frozenset({pod.address for pod in PODS}), True),
        ("unknown", None, True),
    ],
)
def test_only_who_may_go_where_the_first_wants_to_lets_it_go_first(
    model: str, subset: frozenset[str] | None, is_behind: bool
) -> None:
    scene = Scene(stuck=frozenset({"slot"}), endpoints=PODS)
    scene.hold("first", "slot", priority=GOLD)
    scene.now = 0.1
    scene.hold("more", model, subset=subset)
    scene.free(9)
    arrival = RequestInfo(model, subset=subset, arrived_at_s=scene.now)

    assert scene.sent == ([] if is_behind else ["more"])
    assert (scene.queue.must_wait_until_s(arrival, scene.now) is not None) is is_behind


def test_who_waits_for_an_adapter_that_no_pod_has_holds_up_nobody() -> None:
    scene = Scene(stuck=frozenset({"cold"}), endpoints=PODS, holders={"cold": frozenset[str]()}.get)
    scene.hold("first", "cold", priority=GOLD)
    scene.now = 0.1
    scene.hold("more", "slot")
    scene.free(9)

    assert scene.sent == ["more"]


# --- whatever happens ------------------------------------------------------------------------

PRIORITIES = st.integers(-1, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), PRIORITIES, st.sampled_from(["x", "y", "m", "n"])),
        st.tuples(st.just("free"), st.integers(0, 2), st.floats(0.0, HOLD_S)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
    ),
    max_size=30,
)


def holds_up_until_s(scene: Scene, priority: int) -> float:
    """The latest time that any of those held may hold up a newcomer."""
    until_s = scene.now
    for ticket in scene.queue:
        if ticket.priority > priority:
            until_s = max(until_s, ticket.held_at_s + HOLD_S)
        if ticket.priority >= 0 > priority:
            until_s = inf
    return until_s


@given(STEPS)
def test_only_who_is_held_of_a_higher_priority_holds_up_another_and_not_for_long(
    steps: list[tuple[str, int, object]],
) -> None:
    scene = Scene(stuck=frozenset({"x", "y"}))
    for number, (step, size, extra) in enumerate(steps):
        match step, extra:
            case "hold", str(model):
                scene.hold(f"{number}", model, priority=size)
            case "free", float(after_s):
                scene.free(size, after_s=after_s)
            case _ if scene.held:
                leaver = scene.held[size % len(scene.held)]
                scene.queue.remove(scene.tickets[leaver], now=scene.now)
        for priority in (-1, 0, 1):
            assert behind_s(scene, priority) <= holds_up_until_s(scene, priority) - scene.now


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.booleans()), max_size=12))
def test_whoever_there_is_room_for_goes_once_those_ahead_have_had_their_time(
    requests: list[tuple[str, int, bool]],
) -> None:
    """However many others wait for what never comes."""
    names = [f"{number}" for number in range(len(requests))]
    stuck = frozenset(
        name for name, (_, _, is_stuck) in zip(names, requests, strict=True) if is_stuck
    )
    scene = Scene(QueueSettings(slot_hold_s=1.0), stuck=stuck, room=len(requests))
    for name, (tenant, priority, _) in zip(names, requests, strict=True):
        scene.hold(name, tenant=tenant, priority=priority)
        scene.now += 0.01
    last_s = scene.now + 1.0 + SHORT_S
    scene.queue.freed(scene.now)
    while scene.calls and scene.now <= last_s:
        scene.now = max(scene.now, scene.calls.pop())
        scene.calls.clear()
        scene.queue.offer(scene.look, now=scene.now)

    assert set(scene.sent) == set(names) - stuck
    assert scene.now <= last_s
