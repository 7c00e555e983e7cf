"""The ext_proc service: sessions that answer, and that never end with OK unanswered."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from extproc.learned.evidence import StreamEnd
from extproc.observe.logs import MAX_REPEATS
from extproc.request.codec import Codec
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.request.processor import MAX_SILENCE_S
from extproc.types import Outcome, Pick, Wait
from extproc.wire.rpc import Code, Session
from tests.builders import address, body
from tests.request.ext_proc import (
    FULL_DUPLEX,
    destination,
    phase,
    read,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.request.fakerouter import PICK, FakeRouter
from tests.request.scene import Service
from tests.wire.fake_call import FakeCall

BODY = body()


class BrokenRouter(FakeRouter):
    is_broken = True

    def route(self, *args: Any, **named: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("a bug with a prompt in it")
        return super().route(*args, **named)


class BrokenCodec(Codec):
    """Fails when a destination is to be written."""

    def encode(self, command: object) -> bytes:
        if getattr(command, "pick", None) is not None:
            raise RuntimeError("cannot be written")
        return super().encode(command)  # type: ignore[arg-type] # an object to take any command


def test_the_service_has_the_name_that_envoy_calls() -> None:
    [method] = Service().processor.methods()

    assert method.path == "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
    assert not method.is_long_lived


def test_a_request_gets_its_response_and_the_rpc_ends_with_ok() -> None:
    call, session = Service().ask()

    headers, routed = call.sent
    assert (phase(headers), phase(routed)) == ("request_headers", "request_body")
    assert destination(routed) == (address(1), address(1), "pick-1")
    assert call.code is Code.OK


def test_open_rpcs_are_counted_whoever_ends_them() -> None:
    service = Service()
    _, first = service.open()
    _, second = service.open()
    first.receive(b"garbage\xff")
    during = service.processor.num_open
    first.closed()
    second.closed()

    assert (during, service.processor.num_open) == (2, 0)


def test_while_it_is_not_open_requests_are_turned_away_unread_and_not_counted() -> None:
    """UNAVAILABLE without a message: the data plane may ask another, or do without."""
    service = Service(is_open=False)
    call, session = service.open()
    session.receive(request_headers())
    empty_call, empty_session = service.open()
    empty_session.half_close()

    assert (call.sent, call.code) == ([], Code.UNAVAILABLE)
    assert (empty_call.sent, empty_call.code) == ([], Code.UNAVAILABLE)
    assert service.processor.num_open == 0
    session.closed()
    empty_session.closed()
    assert service.processor.num_open == 0


def test_accepted_requests_continue_after_the_service_closes() -> None:
    service = Service()
    call, session = service.open()
    session.receive(request_headers())
    service.is_open = False
    session.receive(request_body(BODY))

    assert call.code is Code.OK
    assert destination(call.sent[-1])


@pytest.mark.parametrize("message", [b"garbage\xff", b"", request_body(BODY)])
def test_a_broken_protocol_is_an_invalid_argument(
    message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    call, session = Service().open()
    session.receive(message)

    assert (call.sent, call.code) == ([], Code.INVALID_ARGUMENT)
    assert "broke the ext_proc protocol" in caplog.text


def test_a_bug_is_an_internal_error_without_details_for_the_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call, session = Service(BrokenRouter()).open()
    session.receive(request_headers())
    session.receive(request_body(BODY))

    assert call.ended == (Code.INTERNAL, "internal error, see the router's log")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_policy_that_always_raises_is_counted_and_does_not_fill_the_log(
    limited_log: pytest.LogCaptureFixture,
) -> None:
    router = BrokenRouter()
    service = Service(router)
    for _ in range(50):
        call, session = service.ask()
        assert call.code is Code.INTERNAL
    router.is_broken = False
    call, session = service.ask()

    assert call.code is Code.OK, "another request has its answer"
    assert service.processor.num_broken == {"protocol": 0, "internal": 50, "silence": 0}
    assert len(limited_log.records) == MAX_REPEATS


def test_a_data_plane_that_breaks_the_protocol_all_the_time_does_not_fill_the_log(
    limited_log: pytest.LogCaptureFixture,
) -> None:
    service = Service()
    for _ in range(50):
        call, session = service.open()
        session.receive(b"garbage\xff")
        assert call.code is Code.INVALID_ARGUMENT

    assert service.processor.num_broken == {"protocol": 50, "internal": 0, "silence": 0}
    assert len(limited_log.records) == MAX_REPEATS


def test_the_rpc_ends_even_if_its_pick_cannot_be_ended() -> None:
    class CannotFinish(FakeRouter):
        def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> bool:
            raise RuntimeError("cannot be ended")

    service = Service(CannotFinish(), codec=BrokenCodec())
    call, session = service.open()
    session.receive(request_headers())
    with pytest.raises(RuntimeError, match="cannot be ended"):
        session.receive(request_body(BODY))

    assert call.code is Code.INTERNAL


@pytest.mark.parametrize("uses_response_phases", [True, False])
def test_a_pick_whose_response_cannot_be_encoded_is_ended(uses_response_phases: bool) -> None:
    service = Service(
        settings=StreamSettings(uses_response_phases=uses_response_phases), codec=BrokenCodec()
    )
    call, session = service.ask()
    session.closed()

    assert call.code is Code.INTERNAL
    assert service.router.finished == [(PICK, Outcome.FAILED, service.now)]


def test_messages_after_the_end_are_ignored() -> None:
    service = Service()
    call, session = service.open()
    session.receive(b"garbage\xff")
    session.receive(request_headers())
    session.half_close()
    session.closed()

    assert (call.sent, call.code) == ([], Code.INVALID_ARGUMENT)


@pytest.mark.parametrize("messages", [[], [request_headers()]])
def test_a_half_close_before_the_response_does_not_end_with_ok(messages: list[bytes]) -> None:
    call, session = Service().open()
    for message in messages:
        session.receive(message)
    session.half_close()

    assert call.code is Code.CANCELLED


def test_a_half_close_after_the_response_is_ok() -> None:
    call, session = Service(settings=StreamSettings(uses_response_phases=True)).open()
    session.receive(request_headers())
    session.receive(request_body(BODY))
    assert call.code is None
    session.half_close()

    assert call.code is Code.OK


DUPLEX = StreamSettings(
    assumed_body_mode=BodyMode.FULL_DUPLEX_STREAMED, uses_response_phases=True, max_hold_s=10.0
)


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["a policy holds it", "and it is read"])
def test_a_half_closed_stream_without_modes_gets_its_response_before_the_end(size: int) -> None:
    """It sends no modes, only headers and body, half-closes, and reads the response."""
    service = Service(settings=DUPLEX)
    service.router.result = Wait(service.now + 2.0)
    call, session = service.open()
    session.receive(request_headers(body_mode=None))
    session.receive(request_body(body(prompt=size * "p")))
    session.half_close()
    assert (call.sent, call.code) == ([], None)
    service.router.result = PICK
    while call.code is None:
        service.timers[-1].callback()

    assert destination(call.sent[0]) == (address(1), address(1), "pick-1")
    assert call.code is Code.OK


def test_a_body_that_was_cut_off_is_no_ok_once_it_is_read() -> None:
    service = Service(settings=DUPLEX)
    call, session = service.open()
    session.receive(request_headers(body_mode=None))
    session.receive(request_body(body(prompt=1_000_000 * "p"), end_of_stream=False))
    session.half_close()
    while call.code is None:
        service.timers[-1].callback()

    assert (call.sent, call.code) == ([], Code.CANCELLED)


def test_the_end_of_the_rpc_finishes_the_pick_where_the_response_is_seen() -> None:
    service = Service(settings=StreamSettings(uses_response_phases=True))
    _, session = service.open()
    parts = (request_headers(), request_body(BODY), response_headers({":status": "200"}))
    for message in (*parts, response_body(b"x")):
        session.receive(message)
    service.now = 200.0
    session.closed()

    assert service.router.finished == [(PICK, Outcome.COMPLETED, 200.0)]


def test_a_bug_at_the_end_of_an_rpc_is_logged_and_affects_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeRouter):
        def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> bool:
            raise RuntimeError("a bug")

    service = Service(Broken(), StreamSettings(uses_response_phases=True))
    _, session = service.ask()
    session.closed()

    assert service.processor.num_open == 0
    assert "could not be ended" in caplog.text


def _answered(service: Service) -> Session:
    return service.ask()[1]


def _cut(service: Service) -> Session:
    _, session = service.open()
    session.receive(request_headers())
    return session


def _listed(service: Service) -> Session:
    _, session = service.open()
    session.receive(request_headers("/v1/models", method="GET"))
    return session


def _refused(service: Service) -> Session:
    _, session = service.open()
    session.receive(b"garbage\xff")
    return session


def _held(service: Service) -> Session:
    return held(service)[1]


@pytest.mark.parametrize("begun", [_answered, _cut, _listed, _refused, _held])
def test_an_ended_request_leaves_nothing_to_the_garbage_collector(
    begun: Callable[[Service], Session],
) -> None:
    """Whoever cuts off many requests must not cause pauses for others."""
    service = Service()
    gc.collect()
    gc.disable()
    try:
        begun(service).closed()
        service.timers.clear()
        service.router.tickets.clear()
        service.router.tickets_left.clear()

        assert gc.collect() == 0
    finally:
        gc.enable()


# --- held requests --------------------------------------------------------------------------


def held(service: Service) -> tuple[FakeCall, Session]:
    """A request that is held for two seconds at most."""
    service.router.hold_s = 2.0
    return service.ask()


def test_a_held_request_gets_more_time_and_is_looked_after_at_its_end() -> None:
    service = Service()
    call, _ = held(service)
    [timer] = service.timers
    assert (timer.delay_s, call.code) == (2.0, None)
    assert read(call.sent[-1]).override_message_timeout is not None

    service.now += 2.0
    service.router.tickets[0].result = PICK
    timer.callback()

    assert destination(call.sent[-1]) == (address(1), address(1), "pick-1")
    assert call.code is Code.OK


def test_a_held_request_that_is_woken_is_answered_next_and_its_timer_is_cancelled() -> None:
    service = Service()
    call, _ = held(service)
    service.router.tickets[0].result = PICK
    service.router.tickets[0].wake()
    timer, soon = service.timers
    assert (timer.is_cancelled, soon.delay_s, call.code) == (True, 0.0, None)
    soon.callback()

    assert destination(call.sent[-1]) == (address(1), address(1), "pick-1")
    assert call.code is Code.OK


def test_a_request_that_ends_after_it_was_woken_is_not_decided_again() -> None:
    service = Service()
    _, session = held(service)
    service.router.tickets[0].wake()
    session.closed()

    assert service.timers[-1].is_cancelled
    assert service.router.tickets_left == service.router.tickets


def test_a_request_that_ends_while_it_is_held_is_not_decided_again() -> None:
    service = Service()
    _, session = held(service)
    session.closed()

    assert [timer.is_cancelled for timer in service.timers] == [True]
    assert service.router.tickets_left == service.router.tickets


def test_a_half_close_while_a_request_is_held_is_no_ok() -> None:
    call, session = held(Service())
    session.half_close()

    assert call.code is Code.CANCELLED


def test_a_bug_in_a_wake_up_is_an_internal_error() -> None:
    service = Service()
    call, session = held(service)
    service.router.tickets[0].result = "?"  # type: ignore[assignment] # no result at all
    service.timers[0].callback()
    session.closed()

    assert call.code is Code.INTERNAL


# --- memory ----------------------------------------------------------------------------------


def test_a_full_duplex_request_holds_memory_of_the_transport() -> None:
    service = Service()
    call, session = service.open()
    session.receive(request_headers(body_mode=FULL_DUPLEX))
    assert call.held == (0, False)
    session.receive(request_body(BODY[:9], False))
    kept, is_whole = call.held
    assert kept >= 9
    assert not is_whole
    service.router.result = Wait(until_s=service.now + 2)
    session.receive(request_body(BODY[9:], True))
    assert call.held[0] >= len(BODY)
    assert call.held[1], "a policy holds it, and all of it is here"
    service.router.result = PICK
    service.timers[-1].callback()

    assert call.held[0] == 0
    assert call.code is Code.OK


@pytest.mark.parametrize(
    ("why", "answer"),
    [({}, (429, "memory")), ({"is_too_large": True}, (413, "body_too_large"))],
)
def test_a_request_that_is_given_up_is_told_why_and_ends_with_ok(
    why: dict[str, bool], answer: tuple[int, str]
) -> None:
    service = Service()
    call, session = service.open()
    session.receive(request_headers(body_mode=FULL_DUPLEX))
    session.receive(request_body(BODY[:9], False))
    give_up: Callable[..., None] = getattr(session, "give_up")  # noqa: B009 - optional in Session
    give_up(**why)

    reply = read(call.sent[-1]).immediate_response
    assert (reply.status.code, reply.details) == answer
    assert call.code is Code.OK
    assert call.held[0] == 0


def test_a_request_of_one_buffered_message_keeps_nothing() -> None:
    service = Service()
    call, session = service.ask()

    assert call.code is Code.OK
    assert call.num_holds == 0


# --- a data plane that says nothing more ---------------------------------------------------------


def test_a_call_that_is_left_without_a_word_is_ended() -> None:
    service = Service()
    unheard, first = service.open()
    begun, second = service.open()
    second.receive(request_headers(body_mode=FULL_DUPLEX))
    second.receive(request_body(BODY[:10], end_of_stream=False))
    service.now += MAX_SILENCE_S
    service.processor.tick()
    in_time = (unheard.code, begun.code)
    service.now += 1
    service.processor.tick()

    assert in_time == (None, None)
    assert [unheard.code, begun.code] == [Code.DEADLINE_EXCEEDED] * 2
    assert service.processor.num_broken["silence"] == 2
    first.closed()
    second.closed()
    assert service.processor.num_open == 0


def test_a_call_that_goes_on_is_not_ended_however_slow_it_is() -> None:
    service = Service()
    call, session = service.open()
    session.receive(request_headers(body_mode=FULL_DUPLEX))
    for byte in BODY:
        service.now += MAX_SILENCE_S * 0.9
        service.processor.tick()
        session.receive(request_body(bytes([byte]), end_of_stream=False))

    assert call.ended is None


@pytest.mark.parametrize("num_waits", [0, 1], ids=["a response runs", "a policy holds it"])
def test_silence_is_no_fault_where_the_data_plane_owes_nothing(num_waits: int) -> None:
    settings = StreamSettings(uses_response_phases=True, max_hold_s=1e9)
    service = Service(FakeRouter(num_waits=num_waits), settings)
    call, session = service.ask()
    for _ in range(5):
        service.now += 2 * MAX_SILENCE_S
        service.processor.tick()

    assert call.ended is None


def test_passes_over_bodies_take_turns_one_in_each_round_of_the_event_loop() -> None:
    service, done = Service(), list[str]()
    turns = service.processor.pass_scheduler
    for name in "abc":
        handle = turns.add(partial(done.append, name))
        if name == "b":
            handle.cancel()

    assert (done, len(service.timers)) == ([], 1)
    service.timers[0].callback()
    turns.add(partial(done.append, "d"))
    assert (done, len(service.timers)) == (["a"], 2)
    service.timers[1].callback()
    service.timers[2].callback()
    assert (done, len(service.timers)) == (["a", "c", "d"], 3)
