"""No endpoint is left: requests wait until one is back, or their patience ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.adapters.declared import Declaration
from extproc.learned.ejections import OutlierSettings
from extproc.learned.evidence import Evidence
from extproc.phrases import FOR_ADAPTER, FOR_POD
from extproc.queue import HoldEnd, QueueSettings, Ticket
from extproc.routing.conflicts import Offer
from extproc.routing.router import Router
from extproc.tenancy import Claim
from extproc.types import Pick, Reason, Rejection, RequestInfo, Wait
from tests.builders import BASE, address, cards, endpoint, report, request
from tests.routing.scene import Slots, queued, refused, routed, router

NO_ENDPOINTS = (503, Reason.NO_ENDPOINTS)
EMPTY = frozenset({"10.9.9.9:8000"})


def asked(at_s: float = 1.0, **fields: object) -> RequestInfo:
    return request(None, **{"model": "a", "arrived_at_s": at_s, **fields})


def lose(made: Router, *numbers: int) -> None:
    """Nobody answers there any more, neither with a page nor with a list."""
    for number in numbers:
        made.pool.record_unreachable(address(number))
        made.pool.record_silence(address(number))


def held(made: Router, now: float = 1.0, **fields: object) -> Ticket:
    result = queued(made.route(asked(now, **fields), now=now))
    assert result.reason == FOR_POD
    return result


def is_back(made: Router, number: int, now: float) -> None:
    made.pool.record_report(address(number), report(), taken_at_s=now)
    made.pool.record_models(address(number), cards("a"), now=now)
    made.offer(now=now)


@pytest.mark.parametrize("policy", ["founding", "least_harm"])
def test_where_nobody_answers_requests_wait_and_are_sent_to_who_is_back(policy: str) -> None:
    made = router(1, 2, policy=policy)
    lose(made, 1, 2)
    waiting = [held(made) for _ in range(3)]
    made.offer(now=2.0)
    assert [ticket.result for ticket in waiting] == [None] * 3

    is_back(made, 2, now=3.0)
    made.offer(now=5.0)  # of least_harm, those that are late are looked at seldom

    assert {routed(made.resume(each, now=3.0)).address for each in waiting} == {address(2)}


def test_what_was_held_for_room_goes_on_waiting_where_its_endpoints_have_gone() -> None:
    made = router(1)
    ticket = queued(made.hold(asked(), Wait(2.0, "slot"), now=1.0, wake=lambda: None))
    lose(made, 1)
    made.offer(now=2.0)
    assert (ticket.result, ticket.reason) == (None, FOR_POD)

    made.pool.set_endpoints([])
    made.queue.freed(3.0)
    made.offer(now=3.0)
    assert ticket.result is None
    made.pool.set_endpoints([endpoint(4)])
    is_back(made, 4, now=4.0)
    assert routed(made.resume(ticket, now=4.0)).address == address(4)


def test_one_that_waits_is_asked_about_again_once_its_models_are_known() -> None:
    made = router(1)
    made.pool.record_report(address(1), report(process_start_wall_s=5.0), taken_at_s=0.5)
    lose(made, 1)
    known = held(made)

    made.pool.record_report(address(1), report(process_start_wall_s=9.0), taken_at_s=2.0)
    made.offer(now=2.0)
    strange = held(made, 2.0, model="nobody")
    assert (known.result, strange.result) == (None, None)
    made.pool.record_models(address(1), cards("a"), now=3.0)
    made.offer(now=3.0)

    assert routed(made.resume(known, now=3.0)).address == address(1)
    assert refused(made.resume(strange, now=3.0)) == (404, Reason.MODEL_NOT_FOUND)


def test_after_its_patience_a_request_is_sent_to_who_was_gone_or_gets_503() -> None:
    """What is known may be wrong, as where the network lets no call of ours through."""
    made = router(1)
    lose(made, 1)
    first, second = (held(made, claim=Claim(max_wait_s=wait_s)) for wait_s in (2.0, 3.0))
    made.queue.schedule._rests_until_s = 99.0

    assert first.give_up_s == 3.0
    assert made.resume(first, now=2.9) is first
    assert routed(made.resume(first, now=3.0)).address == address(1)
    assert made.resume(first, now=3.1) is first.result
    made.pool.set_endpoints([])
    assert refused(made.resume(second, now=4.0)) == NO_ENDPOINTS
    assert made.queue.num_ended[HoldEnd.NO_ENDPOINTS] == 1


def test_one_whose_endpoint_is_back_at_the_last_moment_and_full_is_one_too_many() -> None:
    made = router(1)
    made.picker.configure(Slots(0), "slots")
    lose(made, 1)
    waiting = held(made)
    made.pool.record_models(address(1), cards("a"), now=60.0)

    assert refused(made.resume(waiting, now=61.0)) == (429, Reason.SATURATED)


def test_a_declared_adapter_whose_pod_is_gone_is_waited_for_as_long_as_may_be() -> None:
    made, declared = router(1), Declaration("a", source="", origin="test")
    made.catalog.planner.declare([declared], now=0.0)
    made.catalog.declare({"a": Offer(declared)}, {frozenset(): BASE})
    made.catalog.planner.tick(made.pool.pod_states(now=0.0), {}, [], now=0.0)
    assert isinstance(made.route(asked(), now=1.0), Pick)
    lose(made, 1)

    reasons = []
    for now in (1.0, 31.0):
        result = queued(made.route(asked(1.0), now=now))
        reasons.append(result.reason)
    assert reasons == [FOR_ADAPTER, FOR_POD]


def test_a_request_that_must_not_wait_is_answered_at_once() -> None:
    made, now = router(1), Claim(waits=False)
    lose(made, 1)
    assert routed(made.route(asked(claim=now), now=1.0)).address == address(1)
    made.pool.set_endpoints([])
    assert refused(made.route(asked(claim=now), now=1.0)) == NO_ENDPOINTS


def test_beyond_the_queues_bounds_it_is_503_and_not_too_many_requests() -> None:
    made = router(1)
    made.queue.configure(QueueSettings(max_requests=1))
    lose(made, 1)
    held(made)

    result = made.route(asked(), now=1.0)
    assert refused(result) == NO_ENDPOINTS
    assert isinstance(result, Rejection)
    assert result.why.startswith("The queue is full: 1 held")


def test_a_gateways_own_choice_of_endpoints_is_waited_for_only_if_one_of_them_may_come() -> None:
    made = router(1, 2)
    made.pool.set_endpoints([endpoint(1), endpoint(2, is_ready=False), endpoint(3)])
    of = [frozenset({address(number)}) for number in (1, 2, 3)]
    lose(made, 1)

    held(made, subset=of[0])
    held(made, subset=of[2])
    for subset in (of[1], EMPTY, frozenset()):
        assert refused(made.route(asked(subset=subset), now=1.0)) == NO_ENDPOINTS


def test_a_refused_page_alone_does_not_say_that_nobody_is_there() -> None:
    """A port of its own for metrics may be closed."""
    made = router(1)
    made.pool.record_unreachable(address(1))

    assert routed(made.route(asked(), now=1.0)).address == address(1)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("verdict", [Evidence.BROKEN, Evidence.UNREACHABLE])
def test_a_broken_connection_leaves_its_room_to_nobody_until_the_endpoint_has_answered(
    verdict: Evidence, enabled: bool
) -> None:
    made = router(1)
    made.pool.configure(made.pool._settings, OutlierSettings(enabled=enabled))
    first = routed(made.route(asked(), now=1.0))
    waiting = queued(made.hold(asked(), Wait(9.0, "slot"), now=1.0, wake=lambda: None))
    made.pool.flights.finish(first.id, now=2.0, verdict=verdict)
    made.offer(now=2.0)
    assert waiting.result is None

    made.pool.record_report(address(1), report(), taken_at_s=2.2, asked_at_s=1.9)
    made.offer(now=2.2)
    assert waiting.result is None  # it answered what was asked before
    made.pool.record_report(address(1), report(), taken_at_s=2.4, asked_at_s=2.3)
    made.offer(now=2.4)
    assert routed(made.resume(waiting, now=2.4)).address == address(1)


def test_an_endpoint_in_doubt_gets_nothing_while_another_is_there() -> None:
    made = router(1, 2, policy="least_pending")
    first = routed(made.route(asked(), now=1.0))
    made.pool.flights.finish(first.id, now=2.0, verdict=Evidence.BROKEN)
    picks = [routed(made.route(asked(2.0), now=2.0)) for _ in range(9)]
    assert first.address not in {pick.address for pick in picks}

    made.pool.record_report(first.address, report(), taken_at_s=2.2, asked_at_s=2.1)
    again = [routed(made.route(asked(3.0), now=3.0)) for _ in range(9)]
    assert first.address in {pick.address for pick in again}


def test_who_waits_for_an_endpoint_holds_up_nobody() -> None:
    made = router(1, 2)
    for number, models in ((1, cards("a")), (2, cards("b"))):
        made.pool.record_models(address(number), models, now=0.0)
    lose(made, 1)
    waiting = held(made, claim=Claim(tenant="t", priority=5))
    made.queue.freed(1.1)
    made.offer(now=1.1)

    assert routed(made.route(asked(1.1, model=BASE), now=1.1)).address == address(2)
    assert waiting.result is None


def test_a_declared_adapter_is_waited_for_beyond_cold_wait_s_only_where_nobody_is_left() -> None:
    made, declared = router(1, 2), Declaration("new", source="/new", origin="test")
    made.catalog.planner.declare([declared], now=0.0)
    made.catalog.declare({"new": Offer(declared)}, {frozenset(): BASE})
    old = asked(1.0, model="new")

    assert refused(made.route(old, now=31.0)) == (503, Reason.ADAPTER_UNAVAILABLE)
    lose(made, 1, 2)
    result = queued(made.route(old, now=31.0))
    assert result.reason == FOR_POD


# --- endpoints that serve while they terminate -------------------------------------------------


def terminate(made: Router, *numbers: int, of: int) -> None:
    """Have some of the endpoints 1 to `of` be deleted, which serve on."""
    made.pool.set_endpoints(
        [
            replace(endpoint(each, is_ready=each not in numbers), is_last_resort=each in numbers)
            for each in range(1, of + 1)
        ]
    )


@pytest.mark.parametrize("policy", ["founding", "least_harm"])
def test_where_all_terminate_and_serve_requests_go_there_and_do_not_wait(policy: str) -> None:
    made = router(1, 2, policy=policy)
    terminate(made, 1, 2, of=2)

    assert routed(made.route(asked(), now=1.0)).address in (address(1), address(2))
    assert made.models.outage(None, now=1.0) is None
    assert refused(made.route(asked(model="nope"), now=1.0)) == (404, Reason.MODEL_NOT_FOUND)


def test_one_that_is_ready_again_is_sent_what_comes_then() -> None:
    made = router(1, 2)
    terminate(made, 1, 2, of=2)
    terminate(made, 1, of=2)

    assert {routed(made.route(asked(), now=1.0)).address for _ in range(5)} == {address(2)}


def test_an_engine_that_has_stopped_is_no_last_resort() -> None:
    made = router(1)
    terminate(made, 1, of=1)
    made.pool.record_health(address(1), is_dead=True, asked_at_s=0.5)

    assert held(made).reason == FOR_POD


def test_what_a_terminating_endpoint_has_under_a_declared_name_is_not_always_what_is_declared() -> (
    None
):
    made = router(1, 2)
    made.pool.record_models(address(2), cards(), now=0.0)
    declared = Declaration("a", source="/another", origin="test")
    made.catalog.planner.declare([declared], now=0.0)
    made.catalog.declare({"a": Offer(declared)}, {frozenset(): BASE})
    made.catalog.planner.tick(made.pool.pod_states(now=0.2), {}, [], now=0.2)
    terminate(made, 1, of=2)
    made.catalog.planner.tick(made.pool.pod_states(now=0.5), {}, [], now=0.5)

    assert not isinstance(made.route(asked(), now=1.0), Pick)


@pytest.mark.parametrize("is_declared", [False, True])
def test_an_adapter_that_only_terminating_endpoints_have_is_served_there(is_declared: bool) -> None:
    """A declared one too, while another endpoint loads it."""
    made = router(1, 2)
    made.pool.record_models(address(2), cards(), now=0.0)
    if is_declared:
        declared = Declaration("a", source=cards("a")[1].root, origin="test")
        made.catalog.planner.declare([declared], now=0.0)
        made.catalog.declare({"a": Offer(declared)}, {frozenset(): BASE})
        made.catalog.planner.tick(made.pool.pod_states(now=0.2), {}, [], now=0.2)
    terminate(made, 1, of=2)
    made.catalog.planner.tick(made.pool.pod_states(now=0.5), {}, [], now=0.5)

    assert routed(made.route(asked(), now=1.0)).address == address(1)
