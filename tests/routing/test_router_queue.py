"""Requests that a policy holds: who is asked about next, and what is left of one that goes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs
from extproc.phrases import FOR_TURN
from extproc.pods.accounting import Accounting
from extproc.pods.pool import InFlight, Pool
from extproc.queue import QueueSettings, Ticket
from extproc.queue.destinations import ALL
from extproc.queue.schedule import PEER_OFFERS_FIRST_S
from extproc.queue.waiting import NOBODY, Ahead, Waiting
from extproc.routing.router import OBJECTIVE_RATIO, Router
from extproc.tenancy import Claim
from extproc.types import (
    Choice,
    Hints,
    Pick,
    Reason,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)
from tests.builders import address, cards, completion, endpoint, report, request
from tests.otherrouters import OtherRouter
from tests.routing.scene import Slots, refused, routed
from tests.routing.scene import router as router_of

HOLD_S = QueueSettings().slot_hold_s
LATER_S = 9.0
"""A time by which every rest of the queue is over."""


@dataclass(eq=False)
class Held:
    """One request, as its stream sees it."""

    router: Router
    now: float = 0.0
    fields: dict[str, object] = field(default_factory=dict)
    num_wakes: int = 0

    def __post_init__(self) -> None:
        fields = {"adapter": None, "model": "a", "arrived_at_s": self.now, **self.fields}
        info = request(**fields)  # type: ignore[arg-type]
        self.result = self.router.route(info, now=self.now, wake=self._wake)

    def _wake(self) -> None:
        self.num_wakes += 1

    @property
    def ticket(self) -> Ticket:
        assert isinstance(self.result, Ticket)
        return self.result

    def resume(self, now: float) -> Pick | Rejection | Ticket:
        return self.router.resume(self.ticket, now=now)


def router(num: int = 1, parts: Mapping[str, Any] | None = None, **policy: Any) -> Router:
    """A router over endpoint 1, which has room for `num` requests."""
    made = router_of(1, **(parts or {}))
    made.picker.configure(Slots(num, **policy), "slots")
    return made


def full(**policy: Any) -> tuple[Router, Pick]:
    """A router whose only endpoint is full, and what it is full of."""
    made = router(**policy)
    return made, routed(made.route(request(None, model="a"), now=0.0))


def ask(made: Router, now: float = 0.0, **fields: Any) -> Held:
    return Held(made, now, fields)


# --- held, and offered room -------------------------------------------------------------------


class NoTime(Slots):
    """Waits until a time that is none."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        return Wait(self.until_s, "slot")


@pytest.mark.parametrize("until_s", [None, "9", nan])
def test_a_wait_until_a_time_that_is_none_ends_its_request_and_is_not_queued(until_s: Any) -> None:
    made, _ = full()
    made.picker.configure(NoTime(until_s=until_s), "no_time")

    with pytest.raises(ValueError, match="policy no_time waits until"):
        ask(made)
    assert len(made.queue) == 0


def test_a_request_without_room_is_held_and_gets_what_is_freed() -> None:
    made, first = full()
    held = ask(made)
    before = held.resume(1.0)
    made.pool.flights.finish(first.id, now=1.0)
    made.offer(now=1.0)

    assert before is held.ticket
    assert held.ticket.reason == "slot"
    assert held.num_wakes == 1
    assert routed(held.resume(1.0)).address == address(1)
    assert len(made.pool.flights) == 1
    assert len(made.queue) == 0


def end_ours(pool: Pool, other: OtherRouter, first: Pick) -> None:
    pool.flights.finish(first.id, now=LATER_S)


def end_told(pool: Pool, other: OtherRouter, first: Pick) -> None:
    other.end(now=LATER_S)


def report_again(pool: Pool, other: OtherRouter, first: Pick) -> None:
    pool.record_report(address(1), report(), taken_at_s=LATER_S)


def list_models(pool: Pool, other: OtherRouter, first: Pick) -> None:
    pool.record_models(address(1), cards("a"), now=LATER_S)


@pytest.mark.parametrize(
    ("event", "wait_s"),
    [(end_ours, 0.0), (report_again, 0.0), (list_models, 0.0), (end_told, PEER_OFFERS_FIRST_S)],
)
def test_whatever_may_free_room_has_it_offered_and_the_router_that_tells_of_it_comes_first(
    event: Callable[[Pool, OtherRouter, Pick], None], wait_s: float
) -> None:
    times: list[float] = []
    made, first = full(parts={"at": times.append})
    other = OtherRouter(made.pool)
    other.start()
    ask(made)
    made.offer(now=1.0)  # in vain, if it is due
    times.clear()

    event(made.pool, other, first)

    assert times == [pytest.approx(LATER_S + wait_s)]


def test_a_place_that_another_router_tells_of_and_takes_is_not_taken_here() -> None:
    made, first = full()
    made.pool.flights.finish(first.id, now=0.0)
    other = OtherRouter(made.pool)
    other.start("1")
    held = ask(made)
    made.offer(now=1.0)
    other.end("1", now=LATER_S)
    made.offer(now=LATER_S)
    other.start("2", now=LATER_S)
    made.offer(now=LATER_S + PEER_OFFERS_FIRST_S)
    taken = held.resume(LATER_S + PEER_OFFERS_FIRST_S)
    other.end("2", now=2 * LATER_S)  # this one it does not take
    made.offer(now=2 * LATER_S + PEER_OFFERS_FIRST_S)

    assert taken is held.ticket
    assert isinstance(held.resume(2 * LATER_S + PEER_OFFERS_FIRST_S), Pick)


def test_whoever_waits_comes_before_a_newcomer_where_another_router_tells_of_room_too() -> None:
    made, first = full()
    made.pool.flights.finish(first.id, now=0.0)
    other = OtherRouter(made.pool)
    other.start()
    held = ask(made)
    made.offer(now=1.0)
    other.end(now=LATER_S)
    newcomer = ask(made, LATER_S)
    made.offer(now=LATER_S)
    before = held.ticket.result
    made.offer(now=LATER_S + PEER_OFFERS_FIRST_S)

    assert before is None
    assert isinstance(held.ticket.result, Pick)
    assert isinstance(newcomer.resume(LATER_S + PEER_OFFERS_FIRST_S), Ticket)


class OneSlot:
    """A policy of endpoints that have one slot each."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        for view in snapshot.endpoints:
            if not view.pending_by_adapter or request.adapter in view.pending_by_adapter:
                return Choice((view,), "slot")
        return Wait(inf, "slot")


def test_a_slot_that_another_router_s_request_left_is_kept_for_a_moment() -> None:
    made = router_of(1)
    made.picker.configure(OneSlot(), "one_slot")
    made.pool.record_models(address(1), cards("a", "b"), now=0.0)
    other = OtherRouter(made.pool)
    made.pool.record_report(address(1), report(max_loras=1), taken_at_s=0.0)
    other.start()
    other.end(now=LATER_S)
    held = ask(made, LATER_S, adapter="b", model="b")
    reason = held.ticket.reason
    made.offer(now=LATER_S + PEER_OFFERS_FIRST_S)

    assert reason == FOR_TURN
    assert isinstance(held.resume(LATER_S + PEER_OFFERS_FIRST_S), Pick)


def test_where_one_endpoint_keeps_its_slot_another_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = router_of(1, 2)
    monkeypatch.setattr(made.queue.reservations, "kept_from", lambda *_, **__: {address(1): 99.0})

    for _ in range(3):
        assert routed(made.route(request("a"), now=0.0)).address == address(2)


def test_what_another_router_serves_counts_for_its_tenant_here() -> None:
    made, _ = full()
    other = OtherRouter(made.pool)
    tickets = [
        ask(made, hints=Hints(fairness_id=tenant), session=tenant) for tenant in ("much", "little")
    ]
    other.start(claim=Claim(tenant="much"), tokens=1000.0)
    made.picker.configure(Slots(3), "slots")
    made.queue.freed(LATER_S)
    made.offer(now=LATER_S)

    assert [isinstance(each.resume(LATER_S), Pick) for each in tickets] == [False, True]


def test_a_long_response_counts_for_its_tenant_once_it_has_ended() -> None:
    made, tenants = router(2), ("greedy", "modest")
    first, _ = (ask(made, hints=Hints(fairness_id=tenant)) for tenant in tenants)
    tickets = [ask(made, hints=Hints(fairness_id=tenant)) for tenant in tenants]
    accounting = Accounting(made.pool, "r")
    response = {"body_bytes": 4_000, "first_body_byte_s": 1.0, "duration_s": 1.0}
    accounting.complete(completion(pick_id=routed(first.result).id, **response), now=LATER_S)
    made.offer(now=LATER_S)

    assert [isinstance(each.resume(LATER_S), Pick) for each in tickets] == [False, True]


def test_nobody_asks_for_a_request_again_while_nothing_is_freed() -> None:
    times: list[float] = []
    made, _first = full(parts={"at": times.append})

    ask(made)

    assert times == []
    assert not made.queue.is_due(LATER_S)


def test_a_policy_is_asked_again_when_it_said_without_a_word_from_outside() -> None:
    times: list[float] = []
    made, _first = full(parts={"at": times.append}, until_s=5.0)
    held = ask(made)
    made.picker.configure(Slots(2), "slots")
    made.offer(now=4.9)
    too_early = held.num_wakes
    made.offer(now=5.0)

    assert times[0] == 5.0
    assert (too_early, held.num_wakes) == (0, 1)


def test_whoever_waits_comes_before_a_newcomer() -> None:
    made, first = full()
    held = ask(made)
    made.pool.flights.finish(first.id, now=1.0)

    newcomer = ask(made, now=1.0)  # before the offer that the queue has planned

    assert isinstance(newcomer.result, Ticket)
    assert held.num_wakes == 1
    assert routed(held.resume(1.0))


class AdapterSlots:
    """A policy with `num` slots for adapters; one that runs takes any number of requests."""

    def __init__(self, num: int) -> None:
        self.num = num

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        (view,) = snapshot.endpoints
        running = view.pending_by_adapter
        is_free = request.adapter in running or len(running) < self.num
        return Choice([view], "slot") if is_free else Wait(inf, "slot")


def without_slot() -> tuple[Router, Pick, Held, Callable[[float], Held]]:
    """A router with both slots taken, the pick that has the second one, a tenant that has been
    asked for in vain, and how to ask as one that has the first."""
    made = router()
    made.pool.record_models(address(1), cards("greedy", "other", "modest"), now=0.0)
    made.picker.configure(AdapterSlots(2), "slots")

    def ask_as(tenant: str, now: float) -> Held:
        return ask(made, now, model=tenant, hints=Hints(fairness_id=tenant))

    ask_as("greedy", 0.0)
    other = routed(ask_as("other", 0.0).result)
    modest = ask_as("modest", 0.0)
    made.queue.freed(LATER_S)
    made.offer(now=LATER_S)
    return made, other, modest, partial(ask_as, "greedy")


class FirstWithRoom:
    """A policy that takes the first endpoint that is not full."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        free = [view for view in snapshot.endpoints if not view.is_full]
        return Choice(free, "room") if free else Wait(inf, "room")


def test_a_request_that_a_slot_is_kept_from_goes_to_an_endpoint_without_such_a_slot() -> None:
    made, _, _, _ = without_slot()
    made.pool.set_endpoints([endpoint(1), endpoint(2)])
    made.pool.record_models(address(2), cards("greedy", "other", "modest"), now=LATER_S)
    made.pool.record_report(address(2), report(), taken_at_s=LATER_S)
    made.picker.configure(FirstWithRoom(), "room")

    asked = request("greedy", hints=Hints(fairness_id="greedy"), arrived_at_s=LATER_S)
    _, result = made.choose(asked, now=LATER_S)
    assert routed(result).address == address(2)


def test_the_adapter_that_a_slot_is_kept_for_waits_for_the_slot_and_not_for_its_turn() -> None:
    made, _, _, _ = without_slot()
    another = ask(made, LATER_S, model="modest", hints=Hints(fairness_id="modest"))

    assert [*made.queue.reservations]
    assert another.ticket.reason == "slot"


def test_whoever_was_served_more_stands_in_line_while_another_waits_for_a_slot() -> None:
    made, _, modest, ask_greedy = without_slot()
    newcomer, until_s = ask_greedy(LATER_S), LATER_S + HOLD_S
    reason = newcomer.ticket.reason
    made.offer(now=until_s)

    assert reason == "turn"
    assert routed(newcomer.resume(until_s))
    assert modest.resume(until_s) is modest.ticket
    assert routed(ask_greedy(until_s).result)


def test_whoever_stands_in_line_goes_once_the_other_has_its_slot() -> None:
    made, other, modest, ask_greedy = without_slot()
    now = LATER_S + 0.1
    newcomer = ask_greedy(now)
    made.pool.flights.finish(other.id, now=now)
    made.offer(now=now)

    assert routed(modest.resume(now)).request.adapter == "modest"
    assert routed(newcomer.resume(now)).request.adapter == "greedy"
    assert routed(ask_greedy(now).result)


def test_whoever_stands_in_line_goes_once_the_other_has_left() -> None:
    made, _, modest, ask_greedy = without_slot()
    now = LATER_S + 0.1
    newcomer = ask_greedy(now)
    made.leave(modest.ticket, now=now)
    made.offer(now=now)

    assert routed(newcomer.resume(now))
    assert routed(ask_greedy(now).result)


def test_a_slot_is_kept_for_nobody_once_the_one_it_was_kept_for_has_left() -> None:
    made, _, modest, _ = without_slot()
    now = LATER_S + 0.1
    columns = made.pool.columns(now=now)
    asked = [request(name, claim=Claim(tenant=name)) for name in ("greedy", "other")]
    before = [made.queue.reservations.kept_from(each, columns, now=now) for each in asked]
    made.leave(modest.ticket, now=now)

    assert any(before)
    assert [made.queue.reservations.kept_from(each, columns, now=now) for each in asked] == [{}, {}]


def test_a_newcomer_whose_model_nobody_has_does_not_stand_in_line() -> None:
    made, _first = full()
    ask(made)

    assert refused(ask(made, model="unknown").result) == (404, Reason.MODEL_NOT_FOUND)
    assert len(made.queue) == 1


def test_a_newcomer_of_another_kind_takes_room_that_nobody_who_waits_can_use() -> None:
    made, _first = full()
    held = ask(made)
    made.pool.set_endpoints([endpoint(1), endpoint(2)])
    made.pool.record_report(address(2), report(), taken_at_s=1.0)
    made.pool.record_models(address(2), cards("b"), now=1.0)

    newcomer = ask(made, now=1.0, model="b")

    assert routed(newcomer.result).address == address(2)
    assert held.num_wakes == 0


# --- who goes, and who may not wait ------------------------------------------------------------


class Observer:
    """What other routers would be told."""

    def __init__(self) -> None:
        self.started_ids: list[str] = []
        self.ends: list[tuple[str, bool]] = []

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        self.started_ids.append(flight.pick.id)

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        self.ends.append((flight.pick.id, has_run))


def test_a_pick_that_nobody_takes_any_more_is_ended_once_and_goes_to_the_next() -> None:
    observer = Observer()
    made, first = full(parts={"observer": observer})
    gone, after = ask(made), ask(made)
    made.pool.flights.finish(first.id, now=1.0)
    for seen in (observer.started_ids, observer.ends):
        seen.clear()
    made.offer(now=1.0)
    assert (gone.num_wakes, after.num_wakes) == (1, 0)

    made.leave(gone.ticket, now=1.1)
    made.leave(gone.ticket, now=1.1)
    made.offer(now=LATER_S)

    assert len(observer.started_ids) == 2
    assert observer.ends == [(observer.started_ids[0], False)]
    assert after.num_wakes == 1
    assert len(made.pool.flights) == 1


@pytest.mark.parametrize(
    ("max_hold_s", "claim", "give_up_s"),
    [
        (30.0, Claim(), 33.0),
        (30.0, Claim(max_wait_s=5.0), 8.0),
        (4.0, Claim(max_wait_s=5.0), 7.0),
    ],
)
def test_nobody_is_held_for_longer_than_it_may_be(
    max_hold_s: float, claim: Claim, give_up_s: float
) -> None:
    made, _first = full()
    made.max_hold_s = max_hold_s
    held = ask(made, now=4.0, arrived_at_s=3.0, claim=claim)

    assert held.ticket.give_up_s == give_up_s
    assert held.resume(give_up_s - 0.001) is held.ticket
    result = held.resume(give_up_s)
    assert refused(result) == (429, Reason.SATURATED)
    assert isinstance(result, Rejection)
    assert result.retry_after_s is not None
    assert result.retry_after_s >= 1
    assert len(made.queue) == 0


@pytest.mark.parametrize(
    "fields", [{"claim": Claim(waits=False)}, {"arrived_at_s": -60.0}], ids=["may not", "too old"]
)
def test_who_may_not_wait_is_refused_where_it_would_be_held(fields: dict[str, Any]) -> None:
    made, _first = full()

    assert refused(ask(made, **fields).result) == (429, Reason.SATURATED)
    assert len(made.queue) == 0


def test_a_policy_that_raises_ends_the_request_that_it_raised_for_and_no_other() -> None:
    made, first = full()
    wrong, right = ask(made, path="/free"), ask(made, now=1.0)
    wrong.ticket.request = request("a", path="/bug")
    made.pool.flights.finish(first.id, now=2.0)

    newcomer = ask(made, now=2.0)

    assert isinstance(newcomer.result, Ticket)
    assert routed(right.resume(2.0))
    assert wrong.num_wakes == 1
    with pytest.raises(ArithmeticError):
        wrong.resume(2.0)
    made.leave(wrong.ticket, now=2.0)
    assert len(made.pool.flights) == len(made.queue) == 1


# --- objectives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "policy_s", "objective_s"),
    [
        (Claim(), None, None),
        (Claim(), 2.0, 2.0),
        (Claim(ttft_s=1.0), 2.0, 1.0),
        (Claim(ttft_s=1.0, priority=-1), 2.0, 1.0),
        (Claim(priority=-1), 2.0, None),
    ],
)
def test_a_first_token_is_wanted_by_the_request_s_objective_or_else_the_policy_s(
    claim: Claim, policy_s: float | None, objective_s: float | None
) -> None:
    made, _first = full()
    made.picker.configure(Slots(ttft_s=policy_s), "slots")

    ticket = ask(made, now=2.5, arrived_at_s=2.0, claim=claim).ticket

    assert ticket.deadline_s == (
        inf if objective_s is None else pytest.approx(2.0 + OBJECTIVE_RATIO * objective_s)
    )


def test_what_a_request_still_needs_is_its_prompt_and_its_load_where_they_take_least() -> None:
    costs = Costs()
    prompt_s = 1000 * costs.prompt_s_per_byte
    made, _first = full()
    made.pool.record_models(address(1), cards("a", "b"), now=0.0)

    runs, is_loaded_first, base = (
        ask(made, body_bytes=1000, model=model).ticket.rest_s for model in ("a", "b", "base")
    )

    assert runs == base == pytest.approx(prompt_s)
    assert is_loaded_first == pytest.approx(prompt_s + costs.cold_load_s)


# --- whatever happens --------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.sampled_from(("ask", "end", "leave", "take", "offer", "time")), st.integers(0, 5)),
    max_size=60,
)


@dataclass
class Clients:
    """Clients of a router that do anything in any order, and what came of it.

    Attributes:
        served: Picks that were taken and have not ended.
        num_over: Requests that were refused, have left or have ended.
    """

    router: Router
    now: float = 0.0
    waiting: list[Held] = field(default_factory=list)
    served: list[Pick] = field(default_factory=list)
    num_asked: int = 0
    num_over: int = 0

    def ask(self, **fields: Any) -> None:
        held = ask(self.router, self.now, **fields)
        self.num_asked += 1
        if isinstance(held.result, Ticket):
            self.waiting.append(held)
        else:
            self._end(held.result)

    def act(self, action: str, number: int) -> None:
        """Do it to one of those that there are."""
        match action:
            case "end" if self.served:
                ended = self.served.pop(number % len(self.served))
                self.router.pool.flights.finish(ended.id, now=self.now)
                self.num_over += 1
            case "leave" if self.waiting:
                left = self.waiting.pop(number % len(self.waiting))
                self.router.leave(left.ticket, now=self.now)
                self.num_over += 1
            case "take" if self.waiting:
                self._take(self.waiting[number % len(self.waiting)])
            case "offer":
                self.router.offer(now=self.now)

    def check(self) -> None:
        """Each is counted once, where it is."""
        held = [each.ticket.result for each in self.waiting]
        not_taken = [each for each in held if isinstance(each, Pick)]
        assert len(self.router.pool.flights) == len(self.served) + len(not_taken)
        assert len(self.router.queue) == held.count(None)
        assert all(each.num_wakes == (each.ticket.result is not None) for each in self.waiting)

    def check_ends(self, after_s: float) -> None:
        """By then nobody waits, and each had one end."""
        self.now += after_s
        for held in tuple(self.waiting):
            self._take(held)
        assert self.num_asked == self.num_over + len(self.served)
        assert len(self.router.queue) == len(self.waiting) == 0

    def _take(self, held: Held) -> None:
        result = held.resume(self.now)
        if not isinstance(result, Ticket):
            self.waiting.remove(held)
            self._end(result)

    def _end(self, result: Pick | Rejection) -> None:
        if isinstance(result, Pick):
            self.served.append(result)
        else:
            self.num_over += 1


@given(ACTIONS)
def test_whatever_happens_each_request_has_one_end_and_every_pick_is_counted_once(
    actions: list[tuple[str, int]],
) -> None:
    clients = Clients(router(2))
    for action, number in actions:
        match action:
            case "ask":
                num_over = clients.num_over
                clients.ask(claim=Claim(max_wait_s=3.0))
                assert clients.num_over == num_over  # nobody is refused at once
            case "time":
                clients.now += number / 5
            case _:
                clients.act(action, number)
        clients.check()
        assert len(clients.router.pool.flights) <= 2
    clients.check_ends(3.0)


MIXED = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "end", "leave", "take", "offer", "time", "report", "lose")),
        st.integers(0, 179),
    ),
    min_size=20,
    max_size=80,
)


def claim_of(number: int) -> Claim:
    """Some tenant, priority and objective."""
    tenant, priority, ttft_s = "ab"[number // 5 % 2], number // 10 % 3 - 1, number // 30 % 2
    return Claim("", tenant, priority, ttft_s=0.5 if ttft_s else None, max_wait_s=12.0)


@given(MIXED)
def test_whatever_happens_over_slots_each_request_has_one_end_and_nobody_waits_for_ever(
    actions: list[tuple[str, int]],
) -> None:
    clients, names = Clients(router_of(1, 2, policy="least_harm")), "vwxyz"
    pool = clients.router.pool

    def tell(pod: str) -> None:
        num_running = sum(each.address == pod for each in clients.served)
        said = report(num_running=num_running, max_loras=2)
        pool.record_report(pod, said, taken_at_s=clients.now)

    for pod in (address(1), address(2)):
        pool.record_models(pod, cards(*names), now=0.0)
        tell(pod)
    for action, number in actions:
        name, pod = names[number % 5], address(1 + number % 2)
        match action:
            case "ask":
                clients.ask(model=name, adapter=name, claim=claim_of(number))
            case "time":
                clients.now += number / 30
            case "report":
                tell(pod)
            case "lose":
                pool.record_unreachable(pod)
                pool.record_silence(pod)
            case _:
                clients.act(action, number)
        clients.check()
    clients.check_ends(12.0)


def test_while_nobody_waits_anywhere_what_other_routers_say_of_it_takes_no_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, num_taken = router_of(1, 2), 0
    snapshot = Pool.snapshot

    def taken(pool: Pool, *, now: float) -> Snapshot:
        nonlocal num_taken
        num_taken += 1
        return snapshot(pool, now=now)

    monkeypatch.setattr(Pool, "snapshot", taken)
    router.hear("bb", NOBODY, now=1.0)
    assert num_taken == 0

    router.hear("bb", Waiting(ahead=(Ahead(5, 2.0, ALL),)), now=1.0)
    assert router.queue.has_line()
    router.hear("bb", NOBODY, now=1.0)
    assert not router.queue.has_line()
    assert num_taken == 2
