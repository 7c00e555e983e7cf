"""Who lets whom go first while room is short, and for how long at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.phrases import FOR_SLOT
from extproc.queue import QueueSettings, precedence
from extproc.queue.precedence import (
    AGAIN_RATIO,
    HOLD_UP_S,
    MAX_FIRST,
    First,
    Precedence,
    Reach,
)
from extproc.queue.sweep import BACK_LOOK_S, MAX_LOOKS
from extproc.tenancy import Claim
from extproc.types import RequestInfo
from tests.builders import endpoint_view
from tests.fleets import columns_of
from tests.queue.scene import REST_S, Scene, slow

SHORT_S = HOLD_UP_S / 5
"""Longer than the rest after most offers of these tests, and short of a hold-up."""
AGAIN_S = AGAIN_RATIO * HOLD_UP_S
GREEDY, MODEST = "greedy", "modest"
UNFAIR = QueueSettings(fair=False)
HOLD_S = QueueSettings().slot_hold_s


def newcomer(tenant: str, priority: int = 0, now: float = 0.0) -> RequestInfo:
    return RequestInfo("m", arrived_at_s=now, claim=Claim(tenant=tenant, priority=priority))


def behind_s(scene: Scene, tenant: str, priority: int = 0) -> float:
    """For how long a newcomer has to let others go first."""
    request = newcomer(tenant, priority, scene.now)
    return scene.queue.behind_until_s(request, now=scene.now) - scene.now


def waiting(settings: QueueSettings | None = None, priority: int = 0) -> Scene:
    """The modest one has been asked for in vain just now; the greedy one was served."""
    scene = Scene(settings or QueueSettings(), stuck=frozenset({"slot"}))
    for _ in range(3):
        scene.queue.charge(newcomer(GREEDY))
    scene.hold(MODEST, "slot", tenant=MODEST, priority=priority)
    scene.hold("also held", "slot", tenant=GREEDY)
    scene.free(9)
    return scene


# --- newcomers -------------------------------------------------------------------------------


def test_a_newcomer_of_the_greedy_lets_the_modest_go_first_for_a_while() -> None:
    scene = waiting()
    at_once = behind_s(scene, GREEDY)
    scene.now += HOLD_UP_S

    assert at_once == pytest.approx(HOLD_UP_S)
    assert behind_s(scene, GREEDY) == 0


@pytest.mark.parametrize("tenant", [MODEST, "idle before"])
def test_one_s_own_and_those_who_got_as_little_go_at_once(tenant: str) -> None:
    assert behind_s(waiting(), tenant) == 0


@pytest.mark.parametrize("tenant", [MODEST, "idle before"])
def test_who_comes_later_with_a_lower_priority_lets_higher_ones_go_first(tenant: str) -> None:
    scene = waiting(priority=1)
    scene.queue.charge(newcomer(GREEDY, 2))

    assert behind_s(scene, tenant) == pytest.approx(HOLD_S - REST_S)
    assert behind_s(scene, GREEDY, 1) == behind_s(scene, GREEDY, 2) == 0


def test_who_came_before_a_higher_priority_goes_on_after_a_moment() -> None:
    scene = waiting(priority=1)
    before = RequestInfo("m", arrived_at_s=-1.0)

    until_s = scene.queue.behind_until_s(before, now=scene.now)

    assert until_s == pytest.approx(scene.now + HOLD_UP_S)


def test_those_below_0_wait_as_long_as_anybody_else_does() -> None:
    scene = waiting(UNFAIR)
    at_first = behind_s(scene, GREEDY, -1)
    scene.now += 1000.0
    scene.free(9)

    assert at_first == behind_s(scene, GREEDY, -1) == inf


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


def test_a_flow_does_not_wait_for_its_own_requests_that_have_aged() -> None:
    scene = Scene(QueueSettings(ageing_s=1.0), stuck=frozenset({"slot"}))
    scene.hold("old", "slot", tenant=MODEST)
    scene.free(9, after_s=3.0)

    assert behind_s(scene, MODEST) == 0
    assert behind_s(scene, GREEDY) == pytest.approx(HOLD_UP_S)


def test_without_fairness_nobody_lets_others_of_its_priority_go_first() -> None:
    scene = waiting(UNFAIR)
    at_first = behind_s(scene, GREEDY)
    scene = waiting()
    scene.queue.configure(UNFAIR)

    assert at_first == behind_s(scene, GREEDY) == 0


def behind_while_more_come(scene: Scene, num: int) -> list[bool]:
    """Whether the greedy one lets the modest one go first, while that one's requests keep coming
    and leaving; ten times in `AGAIN_S`."""
    found = list[bool]()
    for _ in range(num):
        before = scene.tickets[MODEST]
        scene.hold(MODEST, "slot", tenant=MODEST)
        scene.queue.remove(before, now=scene.now)
        scene.free(9, after_s=AGAIN_S / 10)
        found.append(behind_s(scene, GREEDY) > 0)
    return found


def test_one_whose_requests_keep_coming_in_vain_lets_others_go_half_of_the_time() -> None:
    found = behind_while_more_come(waiting(), 60)

    assert 20 <= sum(found) <= 40
    assert not any(all(found[begin : begin + 8]) for begin in range(52))


def test_one_that_got_something_holds_up_others_at_once_again() -> None:
    scene = waiting()
    scene.now += HOLD_UP_S
    scene.stuck = frozenset()
    scene.free(1, after_s=SHORT_S)
    scene.stuck = frozenset({"slot"})
    scene.hold("next", "slot", tenant=MODEST)
    for _ in range(3):
        scene.queue.charge(newcomer(GREEDY))
    scene.free(9, after_s=SHORT_S)

    assert behind_s(scene, GREEDY) > 0


def serve(scene: Scene) -> None:
    scene.stuck = frozenset()
    scene.free(1, after_s=SHORT_S)


def leave(scene: Scene) -> None:
    scene.queue.remove(scene.tickets[MODEST], now=scene.now)


def expire(scene: Scene) -> None:
    scene.tickets[MODEST].give_up_s = scene.now
    scene.queue.expire(scene.tickets[MODEST], now=scene.now)


def displace(scene: Scene) -> None:
    scene.queue.settings = QueueSettings(max_requests=len(scene.queue))
    scene.hold("higher", priority=9)


@pytest.mark.parametrize("end", [serve, leave, expire, displace])
def test_nobody_lets_one_go_first_that_has_gone(end: Callable[[Scene], None]) -> None:
    scene = waiting()
    scene.queue.remove(scene.tickets["also held"], now=scene.now)

    end(scene)

    assert scene.tickets[MODEST] not in scene.queue
    assert behind_s(scene, GREEDY) == 0


def test_other_settings_count_at_once_and_begin_anew() -> None:
    scene = waiting(priority=1)
    assert behind_s(scene, MODEST) == pytest.approx(HOLD_S - REST_S)

    scene.queue.configure(QueueSettings(slot_hold_s=6 * HOLD_S))
    assert behind_s(scene, MODEST) == 0
    scene.free(9)
    assert behind_s(scene, MODEST) == pytest.approx(6 * HOLD_S - 2 * REST_S)


# --- those that are held ---------------------------------------------------------------------


def test_one_that_was_put_off_is_asked_for_when_the_first_has_had_its_time() -> None:
    scene = waiting()
    scene.hold("more", "m", tenant=GREEDY)
    before = scene.free(9, after_s=SHORT_S)
    scene.now += HOLD_UP_S - SHORT_S
    scene.queue.offer(scene.look, now=scene.calls[-1])

    assert before == []
    assert scene.calls[-1] == pytest.approx(scene.now)
    assert scene.sent == ["more"]


@pytest.mark.parametrize("end", [leave, expire])
def test_one_that_was_put_off_is_asked_for_at_once_when_the_first_has_gone(
    end: Callable[[Scene], None],
) -> None:
    scene = waiting()
    scene.hold("more", "m", tenant=GREEDY)
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
    assert scene.queue.reservations.kept_from(newcomer(GREEDY), columns_of(()), now=scene.now) == {}


def test_when_one_leaves_that_held_up_nobody_no_offer_is_made() -> None:
    scene = waiting()
    scene.now += HOLD_S
    leave(scene)

    assert scene.queue.is_due(scene.now) is False


def test_late_ones_are_let_go_first_by_nobody() -> None:
    """But for one who was served least, whose turn it is."""
    scene = slow(stuck=frozenset({"slot"}), is_busy=True)
    for tenant in (GREEDY, MODEST):
        scene.queue.charge(newcomer(tenant))
    scene.hold(MODEST, "slot", tenant=MODEST, goal_s=0.1)
    scene.now += 1.0
    scene.free(9)
    scene.hold("more", tenant=GREEDY)

    assert scene.free(9, after_s=2 * BACK_LOOK_S) == ["more"]
    assert scene.looked == ["more", MODEST]
    assert behind_s(scene, GREEDY) == 0


def test_who_was_asked_for_by_an_earlier_offer_of_the_sweep_is_still_let_go_first() -> None:
    names = [f"stuck {number}" for number in range(MAX_LOOKS)]
    scene = Scene(stuck=frozenset(names))
    scene.queue.charge(newcomer(GREEDY))
    for name in names:
        scene.hold(name, tenant=MODEST)
    scene.hold("more", tenant=GREEDY)
    scene.free(9)
    scene.now += SHORT_S
    scene.queue.offer(scene.look, now=scene.now)

    assert scene.sent == []
    assert behind_s(scene, GREEDY) == pytest.approx(HOLD_UP_S - SHORT_S)


def test_the_first_flows_in_order_are_remembered_and_no_more() -> None:
    first = Precedence(lambda _priority, flow: float(flow == GREEDY))
    for number in range(MAX_FIRST):
        first.add(0, 0, f"{number}", First(next_until_s=1.0, reach=1))
    for until_s in (2.0, 1.5):
        first.add(0, 0, "0", First(next_until_s=until_s, reach=1))
    first.add(0, 0, "one more", First(next_until_s=9.0, reach=1))

    assert first.behind_until_s(0, 0, GREEDY, 0.0, 1, now=0.0) == 2.0


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
    scene.queue.charge(newcomer(GREEDY))
    scene.hold(MODEST, "slot", tenant=MODEST)
    scene.hold("more", model, tenant=GREEDY, subset=subset)
    scene.free(9)
    arrival = RequestInfo(model, subset=subset, claim=Claim(tenant=GREEDY))

    assert scene.sent == ([] if is_behind else ["more"])
    assert (scene.queue.behind_until_s(arrival, now=scene.now) > scene.now) is is_behind


def test_a_declared_adapter_s_requests_go_where_its_pods_are_whatever_those_call_it() -> None:
    holders = {"sql": {PODS[0].address}, "slot": {PODS[1].address}, "cold": set[str]()}
    reach = Reach(PODS, holders.get)
    models = ("sql", "slot", "cold", "elsewhere")
    assert [reach.of(RequestInfo(model)) for model in models] == [1, 2, 0, 2]


def test_who_waits_for_an_adapter_that_no_pod_has_holds_up_nobody() -> None:
    scene = Scene(stuck=frozenset({"cold"}), endpoints=PODS, holders={"cold": frozenset[str]()}.get)
    scene.queue.charge(newcomer(GREEDY))
    scene.hold(MODEST, "cold", tenant=MODEST)
    scene.hold("more", "slot", tenant=GREEDY)
    scene.free(9)

    assert scene.sent == ["more"]


NAMES = st.frozensets(st.sampled_from("abc"))
ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 6)]


@given(
    st.lists(st.none() | NAMES, max_size=5),
    st.dictionaries(st.sampled_from("ab"), st.frozensets(st.sampled_from(ADDRESSES))),
    st.none() | st.frozensets(st.sampled_from(ADDRESSES)),
)
def test_a_request_reaches_each_endpoint_that_has_its_model_and_is_allowed(
    lists: Sequence[frozenset[str] | None],
    holders: Mapping[str, frozenset[str]],
    subset: frozenset[str] | None,
) -> None:
    views = [endpoint_view(number, registered=each) for number, each in enumerate(lists, start=1)]
    reach = Reach(views, holders.get)
    for model in "abc":
        found = [
            (view.address in holders[model] if model in holders else view.has_registered(model))
            and (subset is None or view.address in subset)
            for view in views
        ]
        bits = reach.of(RequestInfo(model, subset=subset))
        if model not in holders and not any(found):
            assert bits == -1
        else:
            assert [bool(bits >> place & 1) for place in range(len(views))] == found


def test_where_many_requests_may_go_is_remembered_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precedence, "MAX_KNOWN", 2)
    reach = Reach(PODS)

    for _ in range(2):
        for model, bits in (("slot", 1), ("elsewhere", 2), ("also here", 3), ("unknown", -1)):
            assert reach.of(RequestInfo(model)) == bits
            assert len(reach._known) <= 2


# --- whatever happens ------------------------------------------------------------------------

TENANTS = st.sampled_from("abcd")
PRIORITIES = st.integers(-1, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), TENANTS, PRIORITIES, st.sampled_from(["x", "y", "m", "n"])),
        st.tuples(st.just("free"), st.integers(0, 2), st.floats(0.0, 2 * HOLD_UP_S), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 9), st.none(), st.none()),
        st.tuples(st.just("serve"), TENANTS, PRIORITIES, st.none()),
    ),
    max_size=30,
)


def holds_up_until_s(scene: Scene, request: RequestInfo) -> float:
    """The latest time that any of those held may hold up a request."""
    plan, claim = scene.queue._plan, request.claim
    until_s = scene.now
    for ticket in scene.queue:
        other, flow = ticket.request.claim, ticket.request.claim._flow
        got_less = plan.served(claim.priority, flow) < plan.served(claim.priority, claim._flow)
        if other.priority == claim.priority and got_less and ticket.vain_s <= scene.now:
            until_s = max(until_s, ticket.vain_s + HOLD_UP_S)
        if other.priority > claim.priority:
            until_s = max(until_s, ticket.held_at_s + HOLD_S)
        if other.priority >= 0 > claim.priority:
            until_s = inf
    return until_s


@given(STEPS)
def test_only_who_is_held_of_a_higher_level_or_got_less_holds_up_another_and_not_for_long(
    steps: list[tuple[str, object, object, object]],
) -> None:
    """Not for longer than `HOLD_UP_S` after its own first look in vain, or `slot_hold_s` where its
    priority is higher."""
    settings = QueueSettings(ageing_s=1e9)
    scene = Scene(settings, stuck=frozenset({"x", "y"}))
    for number, (step, first, second, model) in enumerate(steps):
        match step, first, second:
            case "hold", str(tenant), int(priority):
                scene.hold(f"{number}", str(model), tenant=tenant, priority=priority)
            case "free", int(room), float(after_s):
                scene.free(room, after_s=after_s)
            case "serve", str(tenant), int(priority):
                scene.queue.charge(newcomer(tenant, priority))
            case _, int(place), _ if scene.held:
                leaver = scene.held[place % len(scene.held)]
                scene.queue.remove(scene.tickets[leaver], now=scene.now)
        for tenant in "abcd":
            for priority in (-1, 0, 1):
                request = newcomer(tenant, priority, scene.now)
                until_s = scene.queue.behind_until_s(request, now=scene.now)
                assert until_s <= holds_up_until_s(scene, request)


@given(st.lists(st.tuples(TENANTS, st.integers(0, 2), st.booleans()), max_size=12))
def test_whoever_there_is_room_for_goes_once_each_of_the_others_has_had_its_time(
    requests: list[tuple[str, int, bool]],
) -> None:
    """However many others wait for what never comes."""
    names = [f"{number}" for number in range(len(requests))]
    stuck = frozenset(
        name for name, (_, _, is_stuck) in zip(names, requests, strict=True) if is_stuck
    )
    scene = Scene(QueueSettings(slot_hold_s=HOLD_UP_S), stuck=stuck, room=len(requests))
    for name, (tenant, priority, _) in zip(names, requests, strict=True):
        scene.hold(name, tenant=tenant, priority=priority)
    last_s = len(stuck) * (HOLD_UP_S + SHORT_S)
    scene.queue.freed(scene.now)
    while scene.calls and scene.now <= last_s:
        scene.now = scene.calls.pop()
        scene.calls.clear()
        scene.queue.offer(scene.look, now=scene.now)

    assert set(scene.sent) == set(names) - stuck
    assert scene.now <= last_s
