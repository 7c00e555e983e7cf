"""Slots that are kept for requests that wait: whose adapter lets its own go, and from whom."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs
from extproc.phrases import FOR_SLOT
from extproc.queue import QueueSettings, reservations
from extproc.queue.plan import QueuePlan
from extproc.queue.reservations import MAX_LEFT, Reservations
from extproc.queue.tickets import Ticket
from extproc.tenancy import Claim, SlotUse
from extproc.types import EndpointView, RequestInfo
from tests.builders import address, endpoint_view
from tests.fleets import columns_of

SETTINGS = QueueSettings(slot_hold_s=10.0, slot_turn_s=5.0)
GREEDY, MODEST = Claim(tenant="greedy"), Claim(tenant="modest")
SERVED = {GREEDY.flow: 9.0, MODEST.flow: 1.0}
NOW = 100.0


def request(adapter: str | None, claim: Claim = MODEST, *, at_s: float = NOW) -> RequestInfo:
    return RequestInfo(adapter or "base", adapter, arrived_at_s=at_s, claim=claim)


def waiting(adapter: str | None, claim: Claim = MODEST, *, at_s: float = NOW) -> Ticket:
    info = request(adapter, claim, at_s=at_s)
    return Ticket(info, lambda: None, 1e9, held_at_s=NOW, reason=FOR_SLOT)


def pod(number: int, slots: int | None, *running: str, num: int = 1) -> EndpointView:
    pending = dict.fromkeys(running, num)
    return endpoint_view(number, max_loras=slots, pending_by_adapter=pending)


def use(claim: Claim = GREEDY, *, since_s: float = NOW - 1, last_s: float = NOW - 1) -> SlotUse:
    return SlotUse(since_s, last_s, claim.priority, claim.flow)


def kept(settings: QueueSettings = SETTINGS) -> Reservations:
    plan = QueuePlan(settings)
    for priority in (-1, 0, 1):
        for flow, tokens in SERVED.items():
            plan.counters[priority].add(flow, tokens)
    return Reservations(plan)


Slots = list[tuple[EndpointView, Mapping[str, SlotUse]]]


def one_pod(*uses: SlotUse, slots: int | None = None) -> Slots:
    """A pod whose slots are used like that, by a, b, c ..."""
    by_name = dict(zip("abcdef", uses, strict=False))
    return [(pod(1, len(uses) if slots is None else slots, *by_name), by_name)]


def leaving(made: Reservations) -> list[str]:
    return [each.leaving for each in made]


# --- who lets a slot go ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "of", "is_kept"),
    [
        (Claim(priority=1), GREEDY, True),
        (Claim(priority=-1), GREEDY, False),
        (GREEDY, Claim(priority=1), False),
        (MODEST, GREEDY, True),
        (GREEDY, MODEST, False),
        (MODEST, MODEST, False),
    ],
)
def test_a_slot_is_let_go_for_a_higher_priority_and_for_a_tenant_that_got_less(
    claim: Claim, of: Claim, is_kept: bool
) -> None:
    made = kept()
    made.add(waiting("x", claim), "x", one_pod(use(of)), now=NOW)

    assert leaving(made) == ["a"] * is_kept


@pytest.mark.parametrize(
    ("waited_s", "had_s", "slot_turn_s", "is_kept"),
    [(5, 5, 5.0, True), (4, 9, 5.0, False), (9, 4, 5.0, False), (99, 99, 0.0, False)],
)
def test_who_has_waited_long_gets_a_slot_that_was_had_as_long(
    waited_s: float, had_s: float, slot_turn_s: float, is_kept: bool
) -> None:
    made = kept(QueueSettings(slot_turn_s=slot_turn_s))
    made.add(waiting("y"), "y", one_pod(), now=NOW)
    held = waiting("x", at_s=NOW - waited_s)
    made.add(held, "x", one_pod(use(MODEST, since_s=NOW - had_s)), now=NOW)

    assert leaving(made) == ["a"] * is_kept


@pytest.mark.parametrize(
    ("response_s", "load_s", "waited_s", "is_kept"),
    [
        (0.4, 0.1, 1.5, True),
        (0.4, 0.1, 1.49, False),
        (0.4, 0.3, 1.5, False),
        (None, 0.1, 60.0, False),
    ],
    ids=["a turn", "less", "dearer loads", "no response has ended"],
)
def test_a_turn_is_three_times_a_response_and_a_load_there(
    response_s: float | None, load_s: float, waited_s: float, is_kept: bool
) -> None:
    made = kept(QueueSettings())
    costs = Costs(cold_load_s=load_s)
    at_s = NOW - waited_s - 1e-9
    view = endpoint_view(
        1, max_loras=1, pending_by_adapter={"a": 1}, costs=costs, response_s=response_s
    )
    held = waiting("x", at_s=at_s)
    made.add(held, "x", [(view, {"a": use(MODEST, since_s=at_s)})], now=NOW)

    assert leaving(made) == ["a"] * is_kept


def test_without_fairness_tenants_have_no_turns_and_starve_nobody() -> None:
    made = kept(QueueSettings(fair=False, slot_turn_s=5.0))
    made.add(waiting("x"), "x", one_pod(use()), now=NOW)
    made.add(waiting("y", at_s=0), "y", one_pod(use(MODEST, since_s=0)), now=NOW)

    assert [each.adapter for each in made] == ["y"]


def test_the_one_that_will_be_done_soonest_goes() -> None:
    made = kept()
    made.add(waiting("x"), "x", one_pod(use(last_s=99), use(last_s=97), use(last_s=98)), now=NOW)
    busy = pod(1, 1, "many", num=50), {"many": use(last_s=NOW - 2)}
    idle = pod(2, 1, "one"), {"one": use(last_s=NOW - 1)}
    made.add(waiting("y"), "y", [busy, idle], now=NOW)

    assert leaving(made) == ["b", "one"]


def test_nothing_is_kept_where_a_slot_is_free_or_enough_is_kept_already() -> None:
    made = kept()
    made.add(waiting("x"), "x", one_pod(use(), slots=2), now=NOW)
    at_first = leaving(made)
    slots = one_pod(use(), use(), use(), use())
    for name in "xyz":
        made.add(waiting(name), name, slots, now=NOW)

    assert at_first == []
    assert len(leaving(made)) == 2 == len(set(leaving(made)))


def test_an_endpoint_whose_slots_are_unknown_may_keep_one() -> None:
    made, views = kept(), {"a": use(), "b": use()}
    for name in "xy":
        made.add(waiting(name), name, [(pod(1, None, *views), views)], now=NOW)

    assert leaving(made) == ["a"]
    assert made.kept_from(request("z", GREEDY), columns_of([pod(1, None)]), now=NOW) == {}


def test_an_adapter_has_one_and_keeps_it_until_it_is_not_asked_for_again() -> None:
    made, slots = kept(), one_pod(use(last_s=1), use(last_s=2), use(last_s=3), use(last_s=4))
    for _ in range(2):
        made.begin()
        made.add(waiting("x"), "x", slots, now=NOW)
        made.add(waiting("x"), "x", slots, now=NOW)
        slots[0] = pod(1, 4, *"abcd"), {**slots[0][1], "a": use(last_s=99)}
    made.end()
    at_first = leaving(made)
    made.begin()
    made.end()

    assert at_first == ["a"]
    assert leaving(made) == []


@pytest.mark.parametrize(("after_s", "is_kept"), [(9.9, True), (10.0, False)])
def test_it_lets_go_after_a_while(after_s: float, is_kept: bool) -> None:
    made = kept()
    made.add(waiting("x"), "x", one_pod(use()), now=NOW)
    found = made.kept_from(request("a", GREEDY), columns_of([pod(1, 1, "a")]), now=NOW + after_s)
    made.begin()
    made.add(waiting("x"), "x", one_pod(use()), now=NOW + after_s)
    made.end()

    assert bool(found) == bool(list(made)) == is_kept


def test_two_that_wait_do_not_keep_each_other_from_what_is_free_for_one() -> None:
    made, slots = kept(), one_pod(use(last_s=0), use(last_s=1), use(), use())
    for name in "xy":
        made.add(waiting(name), name, slots, now=NOW)
    freed = [(pod(1, 4, *"bcd"), {name: use() for name in "bcd"})]
    made.begin()
    made.add(waiting("x"), "x", freed, now=NOW)

    assert made.kept_from(request("x"), columns_of([FREED]), now=NOW) == {}
    assert made.kept_from(request("y"), columns_of([FREED]), now=NOW) != {}
    assert [each.leaving for each in made] == ["b", "a"]


def test_who_goes_first_takes_over_what_is_reserved_for_others() -> None:
    """And they have nothing on that endpoint once it has as much as may be reserved there."""
    made, slots = kept(), one_pod(use(Claim(priority=-1), last_s=0), use(Claim(priority=-1)))
    made.add(waiting("x"), "x", slots, now=NOW)
    made.add(waiting("gold", Claim(priority=1)), "gold", slots, now=NOW)
    after = list(made)
    made.begin()
    made.add(waiting("x"), "x", slots, now=NOW)

    assert [(each.priority, each.leaving) for each in after] == [(1, "a")]
    assert list(made) == after


def test_so_many_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "MAX_RESERVED", 1)
    made, slots = kept(), one_pod(use(), use(), use(), use())
    for name in "xy":
        made.add(waiting(name), name, slots, now=NOW)

    assert len(leaving(made)) == 1


# --- from whom ---------------------------------------------------------------------------------


def reserved() -> Reservations:
    """For x of the modest one: a lets its slot go, on a pod of four."""
    made = kept()
    made.add(waiting("x"), "x", one_pod(use(last_s=0), use(), use(), use()), now=NOW)
    return made


FULL, FREED = pod(1, 4, *"abcd"), pod(1, 4, *"bcd")


@pytest.mark.parametrize(
    ("adapter", "claim", "view", "is_kept"),
    [
        ("a", GREEDY, FULL, True),
        ("a", MODEST, FULL, True),
        ("a", Claim(priority=-1), FULL, True),
        ("a", Claim(priority=1), FULL, False),
        ("a", Claim(tenant="got nothing"), FULL, False),
        ("b", GREEDY, FULL, False),
        ("b", GREEDY, FREED, False),
        ("y", GREEDY, FREED, True),
        ("y", GREEDY, FULL, False),
        ("y", GREEDY, pod(1, 4, *"bc"), False),
        ("y", GREEDY, pod(2, 4), False),
        ("x", GREEDY, FREED, False),
        (None, GREEDY, FREED, False),
    ],
)
def test_a_slot_is_kept_from_who_would_keep_it_or_take_it(
    adapter: str | None, claim: Claim, view: EndpointView, is_kept: bool
) -> None:
    found = reserved().kept_from(request(adapter, claim), columns_of([view]), now=NOW)

    assert found == ({view.address: NOW + 10.0} if is_kept else {})


def test_what_is_reserved_is_free_once_the_other_has_gone() -> None:
    made, before = reserved(), {"a": use()}

    assert [made.is_free(name, lambda _: before) for name in ("x", "y", None)] == [False] * 3
    assert made.is_free("x", lambda _: {})


def is_kept(made: Reservations, adapter: str | None, *, after_s: float = 0.0) -> bool:
    """Whether the slot that a has left is kept from a request, even of the highest priority."""
    asked = request(adapter, Claim(priority=9))
    return bool(made.kept_from(asked, columns_of((FREED,)), now=NOW + after_s))


def test_a_slot_that_another_router_s_request_left_is_that_router_s_for_a_moment() -> None:
    made = kept()
    made.freed_elsewhere(FREED.address, "a", until_s=NOW + 0.1)
    made.freed_elsewhere(address(9), "a", until_s=NOW + 0.1)

    assert is_kept(made, "y")
    assert is_kept(made, "a")  # it runs there no more, and needs the slot, too
    assert not is_kept(made, "b")
    assert not is_kept(made, None)
    assert not is_kept(made, "y", after_s=0.1)
    assert not made._left  # forgotten


def test_what_is_remembered_of_slots_that_were_left_is_bounded() -> None:
    made = kept()
    for number in range(MAX_LEFT + 3):
        made.freed_elsewhere(address(number), "a", until_s=NOW + 1.0 + number)

    assert len(made._left) == MAX_LEFT


def test_a_slot_that_is_reserved_here_is_had_at_once_whoever_left_it() -> None:
    made = reserved()
    made.freed_elsewhere(FREED.address, "a", until_s=NOW + 0.1)

    assert not is_kept(made, "x")
    assert is_kept(made, "y")


def test_what_is_let_go_is_kept_from_nobody() -> None:
    made, all_of_them = reserved(), reserved()
    made.drop("x")
    all_of_them.clear()

    for each in (made, all_of_them):
        assert each.kept_from(request("y", GREEDY), columns_of([FREED]), now=NOW) == {}


CLAIMS = st.builds(Claim, tenant=st.sampled_from(["greedy", "modest"]), priority=st.integers(-1, 1))
STEPS = st.lists(st.tuples(st.sampled_from("abcdefxyz"), CLAIMS, st.floats(0, 20)), max_size=20)


@given(STEPS, st.integers(1, 6), st.integers(1, 3))
def test_whatever_happens_few_are_kept_and_nobody_who_goes_first_is_kept_out(
    steps: list[tuple[str, Claim, float]], num_slots: int, num_pods: int
) -> None:
    made = kept()
    slots: Slots = []
    for number in range(num_pods):
        uses = {name: use(since_s=0, last_s=90 - number) for name in "abcdef"[:num_slots]}
        slots.append((pod(number, num_slots, *uses), uses))
    for adapter, claim, waited_s in steps:
        made.add(waiting(adapter, claim, at_s=NOW - waited_s), adapter, slots, now=NOW)
        taken = [(each.address, each.leaving) for each in made]
        assert len(set(taken)) == len(taken) <= num_pods * num_slots
        lowest = min([each.priority for each in made], default=2)
        highest = request("new", Claim(tenant="got nothing", priority=lowest + 1))
        views = [pod(number, num_slots) for number in range(num_pods)]
        if all(each.priority == lowest for each in made):
            assert made.kept_from(highest, columns_of(views), now=NOW) == {}
