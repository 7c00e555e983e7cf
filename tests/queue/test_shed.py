"""Requests below priority 0: they go first where anybody else would fail."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.queue import QueueSettings
from extproc.queue.tickets import HoldEnd
from extproc.types import Pick, Reason, Rejection
from tests.builders import endpoint_view
from tests.queue.scene import REST_S, Scene, reasons

PODS = [
    endpoint_view(1, registered=frozenset({"here"})),
    endpoint_view(2, registered=frozenset({"elsewhere"})),
]


def full(*names: tuple[str, str, int]) -> Scene:
    """Requests with a model and a priority that have been asked for in vain."""
    scene = Scene(endpoints=PODS)
    for name, model, priority in names:
        scene.hold(name, model, priority=priority, give_up_s=9.0)
    scene.free(0)
    return scene


def test_when_one_has_waited_as_long_as_it_may_those_below_0_are_refused_before_it() -> None:
    scene = full(("shed", "here", -1), ("far", "elsewhere", -1), ("other", "here", 0))
    scene.now = 9.0
    scene.queue.expire(scene.tickets["other"], now=scene.now)

    assert scene.woken == ["shed", "other"]
    assert reasons(scene.result("shed")) == [(429, Reason.SATURATED)]
    assert scene.held == ["far"]
    assert scene.queue.num_ended[HoldEnd.SHED] == scene.queue.num_ended[HoldEnd.EXPIRED] == 1


def test_one_below_0_that_has_waited_as_long_as_it_may_takes_nobody_along() -> None:
    scene = full(("shed", "here", -1), ("other", "here", -2))
    scene.now = 9.0
    scene.queue.expire(scene.tickets["shed"], now=scene.now)

    assert scene.held == ["other"]


def test_an_objective_that_cannot_be_met_sheds_nobody() -> None:
    scene = full(("batch", "here", -1))
    scene.hold("late", "here", ttft_s=1.0)
    scene.free(9, after_s=2.0)

    assert reasons(scene.result("late")) == [(429, Reason.LATE)]
    assert scene.sent == ["batch"]


def test_nobody_below_0_gets_what_is_freed_while_others_wait_that_were_not_looked_at() -> None:
    scene = Scene(endpoints=PODS)
    for number in range(99):
        scene.hold(f"{number}", f"stuck {number}")
    scene.hold("shed", "shed", priority=-1)
    scene.stuck = frozenset(f"stuck {number}" for number in range(99))
    scene.free(1)

    assert scene.sent == []
    assert scene.queue.must_wait_until_s(scene.tickets["shed"].request, scene.now + REST_S) == inf


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(-2, 1), st.floats(0.1, 9.0)),
        st.tuples(st.just("free"), st.integers(0, 2), st.floats(0.1, 3.0)),
        st.tuples(st.just("expire"), st.just(0), st.floats(0.1, 3.0)),
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from(["in_time", "first_come"]))
def test_nobody_else_fails_or_waits_while_one_below_0_is_held_or_served(
    steps: list[tuple[str, int, float]], order: str
) -> None:
    scene = Scene(QueueSettings(order=order))
    for number, (step, count, time_s) in enumerate(steps):
        if step == "hold":
            scene.hold(f"{number}", "m", priority=count, give_up_s=scene.now + time_s)
            continue
        waits = [each for each in scene.queue if each.request.claim.priority >= 0]
        if step == "free":
            sent = scene.free(count, after_s=time_s)
            below = [name for name in sent if scene.tickets[name].request.claim.priority < 0]
            assert not below or all(isinstance(each.result, Pick) for each in waits)
            continue
        scene.now += time_s
        for ticket in list(scene.queue):
            scene.queue.expire(ticket, now=scene.now)
        if any(isinstance(each.result, Rejection) for each in waits):
            assert all(each.request.claim.priority >= 0 for each in scene.queue)


@pytest.mark.parametrize("priority", [-1, 0])
def test_only_those_below_0_stand_in_line_for_ever(priority: int) -> None:
    scene = full(("other", "here", 0))
    scene.now += 1000.0
    scene.free(0)
    scene.hold("new", "here", priority=priority)

    request = scene.tickets["new"].request
    assert scene.queue.must_wait_until_s(request, scene.now) == (inf if priority < 0 else None)
