"""The queue: who is asked for, in which order and how often, and who is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from math import inf
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.queue import HoldQueue, QueueSettings, Ticket
from extproc.queue.offers import LATE_AGAIN_S, MAX_ASKED, MAX_SENT, QUIET_S
from extproc.queue.queue import MAX_RETRY_AFTER_S
from extproc.queue.schedule import ASK_S, ORDER_S, PEER_OFFERS_FIRST_S, REST_RATIO
from extproc.queue.tenantorder import LATE_EVERY
from extproc.types import Pick, Reason, RequestInfo
from tests.builders import pick
from tests.queue.scene import REST_S, Scene, reasons, slow

# --- offers ----------------------------------------------------------------------------------


def test_room_goes_to_the_first_that_waits_who_is_woken_once() -> None:
    scene = Scene()
    for name in "abc":
        scene.hold(name)

    assert scene.free(1) == ["a"]
    assert (scene.held, scene.woken) == (["b", "c"], ["a"])
    assert isinstance(scene.result("a"), Pick)
    assert scene.free(5) == ["b", "c"]
    assert (len(scene.queue), scene.woken) == (0, ["a", "b", "c"])


def test_nobody_is_asked_for_before_something_has_changed() -> None:
    scene = Scene(room=1)
    scene.hold("a")

    assert not scene.queue.is_due(5.0)
    scene.queue.offer(scene.look, now=5.0)

    assert (scene.looked, scene.calls) == ([], [])


def test_much_room_is_offered_bit_by_bit_without_a_rest_for_those_that_get_it() -> None:
    scene = Scene()
    names = [str(number) for number in range(2 * MAX_SENT + 1)]
    for name in names:
        scene.hold(name)
    num_at_once = len(scene.free(len(names)))
    rest_s = REST_RATIO * ORDER_S * len(names)
    due = [scene.queue.is_due(scene.now + rest_s * part) for part in (0.9, 1.1)]
    for _ in range(2):
        scene.now += REST_S
        scene.queue.offer(scene.look, now=scene.now)

    assert num_at_once == MAX_SENT
    assert due == [False, True]
    assert scene.sent == names


def test_what_frees_room_has_an_offer_made_at_once_and_further_ones_after_a_rest() -> None:
    scene = Scene()
    scene.hold("a")
    scene.hold("b")
    scene.queue.freed(1.0)
    scene.queue.offer(scene.look, now=1.0)
    scene.queue.freed(1.0)

    rest_s = REST_RATIO * (2 * ORDER_S + 2 * ASK_S)
    assert scene.calls == [1.0, pytest.approx(1.0 + rest_s)]
    assert not scene.queue.is_due(1.0 + rest_s / 2)
    assert scene.queue.is_due(1.0 + rest_s * 1.01)


def test_an_empty_queue_wants_no_offer() -> None:
    scene = Scene()
    scene.queue.freed(1.0)
    scene.queue.offer(scene.look, now=1.0)

    assert (scene.calls, scene.looked, scene.queue.is_due(1.0)) == ([], [], False)


def test_a_policy_is_asked_again_when_it_said_that_it_wants_to_be() -> None:
    scene = Scene(until_s=3.0)
    scene.hold("a")
    assert scene.calls == [3.0]
    assert not scene.queue.is_due(2.9)

    scene.until_s = 7.0
    scene.queue.offer(scene.look, now=3.0)

    assert scene.looked == ["a"]
    assert scene.calls == [3.0, 7.0]


def test_requests_that_are_alike_are_asked_for_once_an_offer() -> None:
    scene = Scene(stuck=frozenset({"m"}))
    for name in "abc":
        scene.hold(name, "m")
    scene.hold("d", "other")

    assert scene.free(9) == ["d"]
    assert scene.looked == ["a", "d"]


def test_who_gets_nothing_holds_up_nobody_behind() -> None:
    """More requests that no endpoint takes stand first than one offer asks for."""
    names = [f"stuck {number}" for number in range(3 * MAX_ASKED)]
    scene = Scene(stuck=frozenset(names))
    for name in names:
        scene.hold(name)
    scene.hold("free")

    scene.free(1)
    num_offers = 1
    while not scene.sent:
        scene.now += REST_S
        assert scene.queue.is_due(scene.now)
        scene.queue.offer(scene.look, now=scene.now)
        num_offers += 1

    assert scene.sent == ["free"]
    assert num_offers <= 4
    assert len(scene.looked) <= num_offers * MAX_ASKED + 1


@pytest.mark.parametrize("num_flows", [1, MAX_ASKED])
def test_kinds_that_keep_coming_of_some_flows_leave_others_their_looks(num_flows: int) -> None:
    """However many stand first and get nothing; the other one got nothing at first either."""
    scene = Scene(QueueSettings(fair=False, order="first_come"))
    scene.now = 1.0
    scene.hold("other", tenant="other")
    scene.stuck = frozenset({"other"})
    for offer in range(10):
        names = [f"{offer} {number}" for number in range(2 * MAX_ASKED)]
        scene.now = 0.0
        for number, name in enumerate(names):
            scene.hold(name, tenant=f"{number % num_flows}")
        scene.now = 2.0 + offer * REST_S
        scene.stuck |= set(names)
        scene.free(1)
        scene.stuck -= {"other"}

    assert scene.sent == ["other"]


def test_room_that_is_freed_meanwhile_is_offered_to_the_first_again() -> None:
    names = [f"stuck {number}" for number in range(3 * MAX_ASKED)]
    scene = Scene(stuck=frozenset(names))
    for name in names:
        scene.hold(name)
    scene.free(1)
    scene.stuck = frozenset(names[1:])

    assert scene.free(1) == [names[0]]


def test_nothing_is_kept_of_those_that_have_gone_while_others_keep_coming() -> None:
    class Kind:
        pass

    scene, kinds, names = Scene(QueueSettings(fair=False)), WeakSet[Kind](), list[str]()
    for number in range(100 * MAX_ASKED):
        kind = Kind()
        kinds.add(kind)
        names.append(f"{number}")
        scene.hold(names[-1])
        scene.tickets[names[-1]].kind = kind
        if len(names) == 4 * MAX_ASKED:
            scene.free(0)
            for name in names[2 * MAX_ASKED :]:
                scene.queue.remove(scene.tickets.pop(name), now=scene.now)
            del names[2 * MAX_ASKED :]

    assert len(kinds) <= 8 * MAX_ASKED


def test_one_that_is_asked_for_out_of_turn_says_what_it_waits_for_then() -> None:
    scene = Scene()
    scene.hold("a", reason="slot")
    scene.queue.ask(scene.tickets["a"], scene.look, now=0.0)

    assert (scene.held, scene.tickets["a"].reason) == (["a"], "room")


def test_one_that_left_is_not_asked_for_and_is_removed_once() -> None:
    scene = Scene()
    scene.hold("a", num_bytes=5)
    scene.hold("b", num_bytes=7)
    for _ in range(2):
        scene.queue.remove(scene.tickets["a"], now=1.0)

    assert (scene.free(2), scene.woken, scene.queue.occupancy.num_bytes) == (["b"], ["b"], 0)


def test_without_anybody_who_calls_back_offers_are_made_by_who_asks() -> None:
    queue = HoldQueue()
    ticket = Ticket(RequestInfo("m"), lambda: None, inf)
    queue.add(ticket, now=0.0)
    queue.freed(0.0)

    queue.offer(lambda _ticket, _now: pick(), now=0.0)

    assert isinstance(ticket.result, Pick)


# --- order -----------------------------------------------------------------------------------


def test_a_higher_priority_goes_first() -> None:
    scene = Scene()
    for name, priority in (("low", -1), ("normal", 0), ("high", 2)):
        scene.hold(name, priority=priority)

    assert scene.free(3) == ["high", "normal", "low"]


def test_who_has_waited_long_enough_goes_before_higher_ones() -> None:
    scene = Scene(QueueSettings(ageing_s=2.0))
    scene.hold("normal")
    scene.now = 5.0
    scene.hold("high", priority=1)

    assert scene.free(1) == ["normal"]


def test_tenants_have_turns_by_what_each_got() -> None:
    scene = Scene()
    for number in range(6):
        scene.hold(f"greedy {number}", tenant="greedy")
    for number in range(2):
        scene.hold(f"modest {number}", tenant="modest")

    assert scene.free(4) == ["greedy 0", "modest 0", "greedy 1", "modest 1"]
    assert scene.free(9) == [f"greedy {number}" for number in range(2, 6)]


def test_what_a_tenant_gets_without_waiting_counts_as_well() -> None:
    scene = Scene()
    scene.hold("a", tenant="a")
    scene.hold("b", tenant="b")
    scene.queue.charge(scene.tickets["a"].request)

    assert scene.free(1) == ["b"]


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    scene = Scene()
    for number in range(20):
        scene.hold(f"heavy {number}", tenant="heavy", weight=2.0)
        scene.hold(f"light {number}", tenant="light")

    sent = scene.free(15)

    assert sum(name.startswith("heavy") for name in sent) == 10


def test_without_fairness_all_tenants_are_one_in_order_of_arrival() -> None:
    scene = Scene(QueueSettings(fair=False))
    for name in ("a0", "a1", "b0"):
        scene.hold(name, tenant=name[0])

    assert scene.free(3) == ["a0", "a1", "b0"]


def test_turns_can_begin_and_end_while_requests_are_held() -> None:
    scene = Scene(QueueSettings(fair=False))
    for name in ("a0", "a1", "a2", "b0", "b1"):
        scene.hold(name, tenant=name[0])

    scene.queue.configure(QueueSettings(fair=True))
    assert scene.free(2) == ["a0", "b0"]
    scene.queue.configure(QueueSettings(fair=False))
    assert scene.free(2) == ["a1", "a2"]
    scene.queue.configure(QueueSettings(fair=False, max_requests=0))
    assert reasons(scene.hold("c")) == [(429, Reason.SATURATED)]
    assert scene.free(1) == ["b1"]


def test_the_adapters_that_are_waited_for_are_known_in_order() -> None:
    scene = Scene()
    for name, adapter, priority in (("1", "x", 0), ("2", None, 0), ("3", "y", 1), ("4", "x", 0)):
        scene.hold(name, adapter=adapter, priority=priority)

    assert scene.queue.adapters(0.0) == ["y", "x"]


def test_adapters_are_loaded_first_come_first_served_whatever_the_order_of_requests() -> None:
    """Those that nobody loads in time would otherwise give up while newer ones get theirs."""
    scene = Scene(QueueSettings("in_time"))
    for number in range(3):
        scene.now = float(number)
        scene.hold(f"{number}", adapter=f"a{number}", goal_s=0.4)

    assert scene.queue.adapters(2.1) == ["a0", "a1", "a2"]


# --- refusals --------------------------------------------------------------------------------


def test_one_that_cannot_be_in_time_is_refused_at_once() -> None:
    scene = Scene()

    assert reasons(scene.hold("a", ttft_s=0.5, rest_s=0.6)) == [(429, Reason.LATE)]
    assert scene.hold("b", ttft_s=0.5, rest_s=0.4) is None
    assert scene.held == ["b"]


@pytest.mark.parametrize("order", ["in_time", "first_come"])
def test_one_that_is_late_meanwhile_is_refused_when_it_is(order: str) -> None:
    scene = Scene(QueueSettings(order))
    scene.hold("a", ttft_s=0.5, rest_s=0.2)
    assert scene.calls == [pytest.approx(0.3)]

    scene.now = 0.31
    scene.queue.offer(scene.look, now=0.31)

    assert reasons(scene.result("a")) == [(429, Reason.LATE)]
    assert (scene.woken, scene.looked) == (["a"], [])


def test_one_that_is_late_by_nobody_s_objective_goes_last_and_is_kept() -> None:
    scene = slow()
    scene.hold("old", goal_s=0.5)
    scene.now += 1.0
    scene.hold("new", goal_s=5.0)

    assert scene.free(1) == ["new"]
    assert scene.free(1, after_s=2 * LATE_AGAIN_S) == ["old"]


def test_each_eighth_place_goes_to_the_oldest_that_cannot_be_in_time() -> None:
    scene, sent = slow(), list[str]()
    for number in range(20):
        scene.hold(f"late {number}", goal_s=0.1)
    for number in range(2 * LATE_EVERY):
        scene.hold(f"{number}", goal_s=0.9)
        sent += scene.free(1, after_s=0.2)

    late = [place for place, name in enumerate(sent) if name.startswith("late")]
    assert [after - before for before, after in pairwise(late)] == [LATE_EVERY]
    assert [sent[place] for place in late] == ["late 0", "late 1"]


def test_what_is_freed_is_left_to_those_in_time_for_a_while() -> None:
    scene = slow(stuck=frozenset({"stuck"}), is_busy=True)
    scene.hold("late", goal_s=0.1)
    scene.hold("stuck", goal_s=100.0)
    scene.now += 1.0

    assert scene.free(1, after_s=0.0) == []
    assert scene.calls[-1] <= scene.now + 1.5 * LATE_AGAIN_S
    scene.stuck = frozenset()
    assert scene.free(1, after_s=0.1) == ["stuck"]
    assert scene.free(0, after_s=2 * LATE_AGAIN_S) == []
    assert scene.looked[-1] == "late"
    assert scene.free(1, after_s=0.1) == []
    assert scene.free(1, after_s=2 * LATE_AGAIN_S) == ["late"]


@pytest.mark.parametrize(
    ("num_served", "sent"), [(0, ["late one"]), (1, ["in time"])], ids=["least", "as much"]
)
def test_a_tenant_that_was_served_least_keeps_its_turn_though_all_of_it_is_late(
    num_served: int, sent: list[str]
) -> None:
    """Else a tenant that sends without end would always have one that is in time."""
    scene = slow()
    scene.hold("late one", tenant="modest", goal_s=0.5)
    scene.hold("of the flood", tenant="flood", goal_s=0.5)
    for name in ("of the flood", *["late one"] * num_served):
        scene.queue.charge(scene.tickets[name].request)
    scene.free(0)
    scene.hold("in time", tenant="flood", goal_s=0.5)

    assert scene.free(after_s=0.1) == sent


def test_all_alike_that_are_late_are_looked_at_again_though_one_was_asked_for_in_vain() -> None:
    scene = slow(is_busy=True)
    for name in "abc":
        scene.hold(name, model="alike", goal_s=0.1)
    scene.free(0)
    scene.free(0, after_s=2 * LATE_AGAIN_S)
    assert len(scene.looked) == 1

    assert sorted(scene.free(3, after_s=2 * LATE_AGAIN_S)) == ["a", "b", "c"]


def must_wait_until_s(scene: Scene) -> float | None:
    return scene.queue.must_wait_until_s(RequestInfo("m", arrived_at_s=scene.now), scene.now)


@pytest.mark.parametrize("left", [[("p", "sql")], []])
def test_room_that_another_router_s_request_left_is_offered_a_moment_later(
    left: list[tuple[str, str]],
) -> None:
    scene = Scene()
    scene.hold("a")
    scene.free(0)
    scene.queue.freed_elsewhere(left, now=scene.now)

    assert scene.calls[-1] == pytest.approx(scene.now + PEER_OFFERS_FIRST_S)
    assert must_wait_until_s(scene) == pytest.approx(scene.now + PEER_OFFERS_FIRST_S)


def test_newcomers_stand_in_line_while_what_is_freed_is_still_to_be_offered() -> None:
    scene = Scene()
    scene.hold("a")
    assert must_wait_until_s(scene) is None
    scene.free(0)

    assert must_wait_until_s(scene) is None
    scene.queue.freed(scene.now)
    assert must_wait_until_s(scene) == scene.now
    scene.now += REST_S
    assert must_wait_until_s(scene) is None


def test_by_the_queue_s_own_pace_who_will_be_late_is_refused_before_that() -> None:
    """One a second has left; of ten that want to within four seconds, the newest can."""
    scene = Scene()
    for number in range(20):
        scene.hold(f"before {number}", goal_s=100.0)
    for _ in range(20):
        scene.free(1, after_s=1.0)
    for number in range(10):
        scene.now += 0.01
        scene.hold(f"{number}", ttft_s=4.0)

    assert scene.free(1, after_s=0.01) == ["6"]
    assert scene.held == ["7", "8", "9"]
    assert reasons(*map(scene.result, "012345")) == [(429, Reason.LATE)] * 6


def test_one_that_was_held_as_long_as_it_may_is_refused() -> None:
    scene = Scene()
    scene.hold("a", give_up_s=2.0)
    scene.queue.expire(scene.tickets["a"], now=1.9)
    assert scene.held == ["a"]

    for _ in range(2):
        scene.queue.expire(scene.tickets["a"], now=2.0)

    assert (reasons(scene.result("a")), scene.woken) == ([(429, Reason.SATURATED)], ["a"])
    scene.now = 3.0
    assert reasons(scene.hold("b", give_up_s=3.0)) == [(429, Reason.SATURATED)]


def test_an_order_that_gives_up_nobody_asks_for_no_one_because_it_is_late() -> None:
    scene = Scene(QueueSettings(order="first_come"))
    scene.hold("late", goal_s=1.0)
    scene.free(0, after_s=2.0)

    assert scene.held == ["late"]
    assert not scene.queue.is_due(99.0)


def test_one_that_does_not_wait_is_refused_instead_of_held() -> None:
    scene = Scene()

    assert reasons(scene.hold("a", waits=False)) == [(429, Reason.SATURATED)]


@pytest.mark.parametrize(
    "settings",
    [QueueSettings(max_requests=2), QueueSettings(max_bytes=20)],
    ids=["number", "bytes"],
)
def test_a_full_queue_refuses_newcomers_of_no_higher_priority(settings: QueueSettings) -> None:
    scene = Scene(settings)
    for name in "ab":
        scene.hold(name, num_bytes=10)

    assert reasons(scene.hold("c", num_bytes=10)) == [(429, Reason.SATURATED)]
    assert scene.held == ["a", "b"]


@pytest.mark.parametrize(
    "settings",
    [QueueSettings(max_requests=3), QueueSettings(max_bytes=30)],
    ids=["number", "bytes"],
)
def test_in_a_full_queue_the_newest_of_the_lowest_priority_makes_way(
    settings: QueueSettings,
) -> None:
    scene = Scene(settings)
    for name, priority in (("old", -1), ("new", -1), ("normal", 0)):
        scene.hold(name, priority=priority, num_bytes=10)

    assert scene.hold("high", priority=1, num_bytes=10) is None
    assert scene.held == ["old", "normal", "high"]
    assert reasons(scene.result("new")) == [(429, Reason.SATURATED)]


def test_nobody_makes_way_for_one_that_is_refused_all_the_same() -> None:
    scene = Scene(QueueSettings(max_bytes=100))
    scene.hold("low", priority=-1, num_bytes=10)
    scene.hold("normal", num_bytes=90)

    assert reasons(scene.hold("large", num_bytes=11)) == [(429, Reason.SATURATED)]
    assert scene.held == ["low", "normal"]
    assert scene.hold("fits", num_bytes=10) is None
    assert scene.held == ["normal", "fits"]


@pytest.mark.parametrize("limit", [{"max_held": 2}, {"max_held_bytes": 20}])
def test_a_route_s_own_bounds_leave_the_others_room(limit: dict[str, Any]) -> None:
    scene = Scene()
    for name in "ab":
        assert scene.hold(name, route="r", num_bytes=10, **limit) is None

    assert reasons(scene.hold("c", route="r", num_bytes=10, **limit)) == [(429, Reason.SATURATED)]
    assert scene.hold("d", route="s", num_bytes=10, **limit) is None
    scene.free(1)
    assert scene.hold("e", route="r", num_bytes=10, **limit) is None


def test_clients_are_told_to_come_back_when_those_held_will_have_gone() -> None:
    scene = Scene()
    assert scene.queue.retry_after_s() == 1
    for number in range(30):
        scene.hold(f"{number}")
    for _ in range(20):
        scene.free(1, after_s=1.0)

    assert 9 <= scene.queue.retry_after_s() <= 12
    for number in range(200):
        scene.hold(f"more {number}")
    assert scene.queue.retry_after_s() == MAX_RETRY_AFTER_S


# --- the best that can be done ---------------------------------------------------------------


def best(objectives_s: Sequence[float], service_s: float) -> int:
    """The most first tokens in time, by trying all orders: one is dispatched each `service_s`."""
    return max(
        sum(
            (place + 1) * service_s <= objective_s
            for place, objective_s in enumerate(_without_late(order, service_s))
        )
        for order in permutations(objectives_s)
    )


def _without_late(order: Sequence[float], service_s: float) -> list[float]:
    """An order, without those that would be late in it: they are refused and cost nothing."""
    kept: list[float] = []
    for objective_s in order:
        if (len(kept) + 1) * service_s <= objective_s:
            kept.append(objective_s)
    return kept


@given(st.lists(st.integers(1, 6).map(lambda n: n + 0.5), min_size=1, max_size=6))
def test_at_a_steady_pace_as_many_are_in_time_as_in_the_best_order(
    objectives_s: list[float],
) -> None:
    """Once the pace is known, the queue serves as many in time as a search of all orders finds."""
    scene = Scene()
    for number in range(60):
        scene.hold(f"before {number}", goal_s=1e6)
    for _ in range(50):
        scene.free(1, after_s=1.0)
    for number in range(50, 60):
        scene.queue.remove(scene.tickets[f"before {number}"], now=scene.now)
    for number, objective_s in enumerate(objectives_s):
        scene.hold(f"{number}", ttft_s=objective_s)

    sent = [name for _ in objectives_s for name in scene.free(1, after_s=1.0)]

    assert len(sent) == best(objectives_s, 1.0)
    assert not scene.held


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hold"), st.integers(-1, 1), st.sampled_from(["", "a", "b"])),
            st.tuples(st.just("free"), st.integers(0, 3), st.floats(0.0, 2.0)),
            st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
        ),
        max_size=40,
    ),
    st.sampled_from(["in_time", "first_come"]),
    st.booleans(),
)
@example([("hold", 1, ""), ("hold", -1, ""), ("free", 0, 2.0)], "in_time", False)  # both are late
def test_every_request_is_held_or_has_one_end(
    steps: list[tuple[str, int, object]], order: str, fair: bool
) -> None:
    """Whatever happens, each is held, sent, refused or gone, and woken if it has a result."""
    scene, gone = Scene(QueueSettings(order, fair=fair, max_requests=8)), set[str]()
    refused = set[str]()
    for number, (step, size, extra) in enumerate(steps):
        name = str(number)
        if step == "hold":
            if scene.hold(name, priority=size, tenant=extra, ttft_s=1.5 if size else None):
                refused.add(name)
        elif step == "free":
            scene.free(size, after_s=float(str(extra)))
        elif scene.held:
            leaver = scene.held[size % len(scene.held)]
            scene.queue.remove(scene.tickets[leaver], now=scene.now)
            gone.add(leaver)

    held = set(scene.held)
    woken = {name for name in scene.tickets if scene.result(name) is not None}
    assert sorted(scene.woken) == sorted(woken)
    assert held | gone | refused | woken == set(scene.tickets)
    assert len(held) + len(gone) + len(refused) + len(woken) == len(scene.tickets)
    assert set(scene.sent) <= woken


@pytest.mark.parametrize(("quiet_s", "expected"), [(QUIET_S, ["old"]), (0.8 * QUIET_S, [])])
def test_where_no_request_comes_any_more_what_is_freed_is_for_late_ones_too(
    quiet_s: float, expected: list[str]
) -> None:
    scene = slow()
    scene.hold("old", goal_s=0.1)
    scene.now += 1.0
    scene.queue.charge(RequestInfo("m", arrived_at_s=scene.now))

    assert scene.free(1, after_s=quiet_s) == expected
