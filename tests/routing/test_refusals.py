"""What a request gets that no pod takes: the table of docs/errors.md, state by state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.adapters.declared import Declaration
from extproc.phrases import FOR_POD
from extproc.queue import QueueSettings, Ticket
from extproc.request.responses import refusal
from extproc.routing.conflicts import Offer
from extproc.routing.router import Router
from extproc.tenancy import Claim
from extproc.types import Pick, Rejection
from tests.builders import BASE, address, cards, endpoint, report
from tests.routing.scene import Slots, ask, router

WAIT_S = 5.0
NOBODY = (503, "no_endpoints", "rejected-no-endpoints")
FULL = (429, "saturated", "rejected-saturated")
EXPIRED = (429, "saturated", "rejected-ttl-expired")
LATE = (429, "late", "rejected-saturated")
STOPS = (503, "shutting_down", "rejected-shutting-down")
UNLOADED = (503, "adapter_unavailable", "rejected-no-endpoints")
ASLEEP = (503, "endpoints_asleep", "rejected-no-endpoints")
UNKNOWN = (404, "model_not_found", None)

Answer = tuple[int, str, str | None]


@dataclass
class Scene:
    """A router over two pods, and the time."""

    made: Router
    now: float = 1.0

    def ask(self, **fields: Any) -> Pick | Rejection | Ticket:
        claim = Claim(**{"max_wait_s": WAIT_S, **fields.pop("claim", {})})
        return ask(self.made, now=self.now, **{"model": "a", "claim": claim, **fields})

    def answer(self, result: Pick | Rejection | Ticket, after_s: float = 0.0) -> Answer:
        """What its client reads, if it gets its answer within so many seconds."""
        if isinstance(result, Ticket):
            self.now += after_s
            held = self.made.resume(result, now=self.now)
            assert isinstance(held, Rejection), held
            result = held
        assert isinstance(result, Rejection), result
        reply = refusal(result)
        code = json.loads(reply.body)["error"]["code"]
        assert (reply.status in (429, 503)) == ("retry-after" in reply.headers)
        return reply.status, code, reply.headers.get("x-llm-d-request-dropped-reason")

    def kill(self) -> None:
        """Nobody connects to either pod, and what ran there has broken off."""
        for number in (1, 2):
            self.made.pool.record_unreachable(address(number))
            self.made.pool.record_silence(address(number))


def scene(num_slots: int = 1, **parts: Any) -> Scene:
    """Pods that have room for so many requests each."""
    made = router(1, 2, **parts)
    made.picker.configure(Slots(num_slots), "slots")
    return Scene(made)


def full(**parts: Any) -> Scene:
    """Both pods have a request, and room for no other."""
    made = scene(**parts)
    for _ in range(2):
        assert isinstance(made.ask(), Pick)
    return made


def dead(**parts: Any) -> Scene:
    made = scene(**parts)
    made.kill()
    return made


# --- states ------------------------------------------------------------------------------------


def no_pods() -> Answer:
    made = scene()
    made.made.pool.set_endpoints([])
    return made.answer(made.ask(), WAIT_S)


def no_pod_is_ready() -> Answer:
    made = scene()
    made.made.pool.set_endpoints([endpoint(n, is_ready=False) for n in (1, 2)])
    return made.answer(made.ask(), WAIT_S)


def all_with_the_model_have_left() -> Answer:
    made = scene()
    made.made.pool.record_models(address(2), cards("b"), now=0.0)
    made.made.pool.set_endpoints([endpoint(1, is_ready=False), endpoint(2)])
    return made.answer(made.ask(), WAIT_S)


def all_are_dead_and_the_queue_is_full() -> Answer:
    made = dead()
    made.made.queue.configure(QueueSettings(max_requests=1))
    made.ask()
    return made.answer(made.ask())


def all_are_dead_and_it_must_not_wait() -> Answer:
    made = dead()
    made.made.pool.set_endpoints([endpoint(n, is_ready=False) for n in (1, 2)])
    return made.answer(made.ask(claim={"waits": False}))


def all_die_while_it_waits_for_room() -> Answer:
    """Nobody asks for it again: nothing ends."""
    made = full()
    held = made.ask()
    assert isinstance(held, Ticket)
    assert held.reason != FOR_POD
    made.kill()
    made.made.queue.schedule._rests_until_s = 99.0
    return made.answer(held, WAIT_S)


def all_die_and_a_newcomer_stands_in_line() -> Answer:
    made = full()
    made.made.queue.configure(QueueSettings(max_requests=1))
    made.ask()
    made.kill()
    return made.answer(made.ask())


def all_are_dead_and_one_below_0_is_asked_for() -> Answer:
    made = scene()
    for number in (1, 2):
        load = report(num_running=9, num_waiting=9)
        made.made.pool.record_report(address(number), load, taken_at_s=0.5)
    made.kill()
    return made.answer(made.ask(claim={"priority": -1, "waits": False}))


def all_are_dead_and_at_their_cap() -> Answer:
    made = Scene(router(1, 2, max_pending=1))
    for _ in range(2):
        assert isinstance(made.ask(), Pick)
    made.kill()
    return made.answer(made.ask(claim={"waits": False}))


def one_died_and_the_other_is_full() -> Answer:
    made = full()
    made.made.pool.record_unreachable(address(1))
    made.made.pool.record_silence(address(1))
    return made.answer(made.ask(), WAIT_S)


def its_wait_is_over() -> Answer:
    made = full()
    return made.answer(made.ask(), WAIT_S)


def its_wait_was_over_when_it_came() -> Answer:
    made = full()
    return made.answer(made.ask(arrived_at_s=-WAIT_S))


def the_queue_is_full() -> Answer:
    made = full()
    made.made.queue.configure(QueueSettings(max_requests=1))
    made.ask()
    return made.answer(made.ask())


def its_route_is_full() -> Answer:
    made = full()
    claim = {"route": "r", "max_held": 1}
    made.ask(claim=claim)
    return made.answer(made.ask(claim=claim))


def another_took_its_place() -> Answer:
    made = full()
    made.made.queue.configure(QueueSettings(max_requests=1))
    held = made.ask()
    made.ask(claim={"priority": 1})
    return made.answer(held)


def it_is_shed() -> Answer:
    made = full()
    held, other = made.ask(claim={"priority": -1}), made.ask()
    made.answer(other, WAIT_S)
    return made.answer(held)


def it_must_not_wait() -> Answer:
    made = full()
    return made.answer(made.ask(claim={"waits": False}))


def all_are_at_their_cap() -> Answer:
    made = Scene(router(1, 2, max_pending=1))
    for _ in range(2):
        assert isinstance(made.ask(), Pick)
    return made.answer(made.ask())


def it_would_be_late() -> Answer:
    made = full()
    return made.answer(made.ask(arrived_at_s=-9.0, claim={"ttft_s": 1.0, "max_wait_s": 30.0}))


def it_would_be_late_and_all_are_dead() -> Answer:
    made = dead()
    return made.answer(made.ask(arrived_at_s=-9.0, claim={"ttft_s": 1.0, "max_wait_s": 30.0}))


def the_router_stops(*, is_dead: bool) -> Answer:
    made = dead() if is_dead else full()
    held = made.ask()
    made.made.queue.close(now=made.now)
    return made.answer(held)


def the_router_stops_before_it_comes() -> Answer:
    made = full()
    made.made.queue.close(now=made.now)
    return made.answer(made.ask())


def nobody_has_its_adapter() -> Answer:
    made, declared = scene(), Declaration("new", source="/new", origin="test")
    made.made.catalog.planner.declare([declared], now=0.0)
    made.made.catalog.declare({"new": Offer(declared)}, {frozenset(): BASE})
    return made.answer(made.ask(model="new", claim={"waits": False}))


def nobody_has_its_adapter_and_all_are_dead() -> Answer:
    made, declared = dead(), Declaration("new", source="/new", origin="test")
    made.made.catalog.planner.declare([declared], now=0.0)
    made.made.catalog.declare({"new": Offer(declared)}, {frozenset(): BASE})
    return made.answer(made.ask(model="new"), WAIT_S)


def all_sleep() -> Answer:
    made = scene()
    for number in (1, 2):
        asleep = replace(report(), is_asleep=True)
        made.made.pool.record_report(address(number), asleep, taken_at_s=0.5)
    return made.answer(made.ask())


def nobody_knows_its_model() -> Answer:
    made = scene()
    return made.answer(made.ask(model="nope"))


STATES: dict[Callable[[], Answer], Answer] = {
    no_pods: NOBODY,
    no_pod_is_ready: NOBODY,
    all_with_the_model_have_left: NOBODY,
    all_are_dead_and_the_queue_is_full: NOBODY,
    all_are_dead_and_it_must_not_wait: NOBODY,
    all_die_while_it_waits_for_room: NOBODY,
    all_die_and_a_newcomer_stands_in_line: NOBODY,
    all_are_dead_and_one_below_0_is_asked_for: NOBODY,
    all_are_dead_and_at_their_cap: NOBODY,
    it_would_be_late_and_all_are_dead: NOBODY,
    one_died_and_the_other_is_full: EXPIRED,
    its_wait_is_over: EXPIRED,
    its_wait_was_over_when_it_came: EXPIRED,
    the_queue_is_full: FULL,
    its_route_is_full: FULL,
    another_took_its_place: FULL,
    it_is_shed: FULL,
    it_must_not_wait: FULL,
    all_are_at_their_cap: FULL,
    it_would_be_late: LATE,
    partial(the_router_stops, is_dead=False): STOPS,
    partial(the_router_stops, is_dead=True): STOPS,
    the_router_stops_before_it_comes: STOPS,
    nobody_has_its_adapter: UNLOADED,
    nobody_has_its_adapter_and_all_are_dead: UNLOADED,
    all_sleep: ASLEEP,
    nobody_knows_its_model: UNKNOWN,
}


@pytest.mark.parametrize(
    ("state", "answer"),
    STATES.items(),
    ids=[getattr(each, "__name__", "the_router_stops") for each in STATES],
)
def test_each_state_has_its_status_code_and_reason(
    state: Callable[[], Answer], answer: Answer
) -> None:
    assert state() == answer
