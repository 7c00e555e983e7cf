"""A request may be held: the stream answers late, once, and a client that leaves is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.rejections import saturated
from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.request.stream import HOLD_MARGIN_S
from extproc.request.transitions import CallState
from extproc.types import Pick, Reason, Rejection
from tests.builders import body, request_headers
from tests.request.fakerouter import IN_HEADER, PICK, Exchange, FakeRouter, begin

MAX_HOLD_S = 30.0


def held(mode: BodyMode, *events: m.Event, **settings: Any) -> tuple[Exchange, list[m.Command]]:
    """A stream in this mode whose request has just been held, and what it last said."""
    exchange = begin(max_hold_s=MAX_HOLD_S, early_decision_bytes=1, **settings)
    exchange.router.hold_s = MAX_HOLD_S
    exchange.tell(request_headers(body_mode=mode, sends_body_early=True))
    return exchange, exchange.tell(*(events or (m.BodyChunk(body(), True),)))


def settle(exchange: Exchange, result: Pick | Rejection = PICK) -> list[m.Command]:
    """Give the held request its result, and wake it up."""
    [ticket] = exchange.router.tickets
    ticket.result = result
    return exchange.tell(m.Wakeup())


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_a_held_request_extends_the_timeout_once_and_is_answered_by_a_later_pass(
    mode: BodyMode,
) -> None:
    exchange, commands = held(mode)
    arrived_s = 1.0

    assert commands == [
        m.ExtendTimeout(arrived_s + MAX_HOLD_S - exchange.now + HOLD_MARGIN_S),
        m.WakeAt(arrived_s + MAX_HOLD_S),
    ]
    assert not exchange.stream.is_answered
    assert settle(exchange) == [m.ContinueBody(PICK), m.EndStream()]


def test_a_request_that_is_woken_too_early_goes_on_waiting_without_another_extension() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)

    assert exchange.tell(m.Wakeup()) == [m.WakeAt(1.0 + MAX_HOLD_S)]
    assert len(exchange.router.routed) == 1


@pytest.mark.parametrize("end", [m.StreamEnded(), m.Overloaded(), m.ResponseHeaders(503), None])
def test_a_waiting_request_that_goes_says_so(end: m.Event | None) -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    before = exchange.router.num_left

    if end is None:
        exchange.stream.abandon(now=exchange.now)
    else:
        exchange.tell(end)

    assert (before, exchange.router.num_left) == (0, 1)
    assert exchange.router.tickets_left == exchange.router.tickets
    assert exchange.tell(m.StreamEnded()) == []
    assert exchange.router.tickets_left == exchange.router.tickets  # once


def test_a_policy_learns_when_the_request_arrived() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)

    assert [request.arrived_at_s for request in exchange.router.routed] == [1.0]


def test_a_request_that_is_held_and_then_refused_gets_the_error() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    reply, end = settle(exchange, saturated("a", 1))

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert [rejection.reason for rejection in exchange.router.rejections] == [Reason.SATURATED]
    assert [":path" in headers for headers in exchange.router.rejected_headers] == [True]
    assert end == m.EndStream()


def test_a_held_duplex_request_has_no_timer_and_keeps_its_body() -> None:
    exchange, commands = held(BodyMode.FULL_DUPLEX_STREAMED)

    assert commands == [m.WakeAt(1.0 + MAX_HOLD_S)]
    assert settle(exchange) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), True),
        m.EndStream(),
    ]


def test_a_held_duplex_request_keeps_its_trailers() -> None:
    exchange, _commands = held(
        BodyMode.FULL_DUPLEX_STREAMED, m.BodyChunk(body()), m.RequestTrailers()
    )

    assert settle(exchange) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), False),
        m.ContinueTrailers(),
        m.EndStream(),
    ]


@given(st.integers(0, 5), st.booleans())
def test_what_comes_of_a_streamed_body_while_held_is_answered_with_it(
    num_chunks: int, has_trailers: bool
) -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.BodyChunk(body()))
    for _ in range(num_chunks):
        assert exchange.tell(m.BodyChunk(b" ")) == []
    last = m.RequestTrailers() if has_trailers else m.BodyChunk(b" ", True)
    assert exchange.tell(last) == []
    num_bodies = 1 + num_chunks + (not has_trailers)

    assert settle(exchange) == [
        m.ContinueHeaders(PICK),
        *[m.ContinueBody()] * num_bodies,
        *([m.ContinueTrailers()] if has_trailers else []),
        m.EndStream(),
    ]


def test_a_streamed_body_that_goes_on_after_the_hold_is_answered_chunk_by_chunk() -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.BodyChunk(body()))

    assert settle(exchange) == [m.ContinueHeaders(PICK), m.ContinueBody()]
    assert exchange.stream.state is CallState.REST
    assert exchange.tell(m.BodyChunk(b"", True)) == [m.ContinueBody(), m.EndStream()]


@pytest.mark.parametrize(
    ("rest", "code"), [(b"oops", Reason.INVALID_JSON), (999 * b" ", Reason.BODY_TOO_LARGE)]
)
def test_a_streamed_body_that_goes_wrong_while_held_is_refused_and_waits_no_longer(
    rest: bytes, code: Reason
) -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.BodyChunk(body()), max_body_bytes=500)
    reply, end = exchange.tell(m.BodyChunk(rest))

    assert isinstance(reply, m.Reply)
    assert (reply.details, end) == (code, m.EndStream())
    assert exchange.router.tickets_left == exchange.router.tickets
    assert settle(exchange) == []


def test_a_request_that_is_given_up_for_want_of_memory_while_held_waits_no_longer() -> None:
    exchange, _commands = held(BodyMode.FULL_DUPLEX_STREAMED)
    reply, end = exchange.tell(m.Overloaded())

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.details, end) == (429, Reason.MEMORY, m.EndStream())
    assert exchange.router.tickets_left == exchange.router.tickets
    assert exchange.stream.held_bytes() == 0


@pytest.mark.parametrize("state", [CallState.DONE, CallState.LOCAL_REPLY])
def test_a_wake_up_after_the_end_does_nothing(state: CallState) -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    exchange.tell(m.StreamEnded() if state is CallState.DONE else m.ResponseHeaders(504))
    exchange.router.tickets[0].result = PICK

    assert exchange.tell(m.Wakeup(), m.Wakeup()) == []
    assert exchange.stream.state is state
    assert exchange.stream.pick is None
    assert exchange.router.finished == []  # it is the router that ends a pick not taken


def test_the_stream_s_own_wake_is_what_the_queue_calls() -> None:
    woken: list[str] = []
    router = FakeRouter(hold_s=MAX_HOLD_S)
    stream = router.stream(StreamSettings(), lambda: woken.append("now"))
    stream.handle(request_headers(body_mode=BodyMode.NONE, model="a"), now=1.0)

    router.tickets[0].wake()

    assert woken == ["now"]


def test_a_request_routed_by_its_headers_alone_can_be_held() -> None:
    exchange = begin()
    exchange.router.hold_s = MAX_HOLD_S
    commands = exchange.tell(request_headers(body_mode=BodyMode.NONE, model="a"))

    assert [type(command) for command in commands] == [m.ExtendTimeout, m.WakeAt]
    assert settle(exchange) == [m.ContinueHeaders(PICK), m.EndStream()]


@pytest.mark.parametrize(
    ("mode", "is_kept"),
    [
        (BodyMode.BUFFERED, False),
        (BodyMode.BUFFERED_PARTIAL, False),
        (BodyMode.STREAMED, False),
        (BodyMode.FULL_DUPLEX_STREAMED, True),
    ],
)
def test_the_queue_is_told_how_much_of_a_body_is_kept(mode: BodyMode, is_kept: bool) -> None:
    """The data plane holds the others: ten thousand prompts must not fill the router's memory."""
    exchange, _commands = held(mode)

    assert exchange.router.held_bytes == [exchange.stream.held_bytes()]
    assert exchange.stream.held_bytes() >= is_kept * len(body())
    assert (exchange.stream.held_bytes() > 0) is is_kept


def test_of_a_held_requests_headers_only_what_an_answer_needs_is_kept() -> None:
    exchange = begin(sessions=IN_HEADER)
    exchange.router.hold_s = MAX_HOLD_S
    headers = {"x-session": "s", "x-request-id": "r", "authorization": "secret"}
    exchange.tell(request_headers(headers=headers), m.BodyChunk(body(), True))

    assert set(exchange.stream._headers) == {":path", "x-request-id"}
    assert exchange.router.tickets[0].request.session is not None


def test_no_body_that_is_kept_grows_while_its_request_is_held() -> None:
    """In full duplex it is whole before it is held, so the queue's bound in bytes holds."""
    exchange = begin(max_hold_s=MAX_HOLD_S, early_decision_bytes=1)
    exchange.router.hold_s = MAX_HOLD_S
    headers = request_headers(body_mode=BodyMode.FULL_DUPLEX_STREAMED, sends_body_early=True)
    exchange.tell(headers, m.BodyChunk(body()), m.BodyChunk(b" " * 1000))
    before = exchange.router.held_bytes.copy()
    exchange.tell(m.BodyChunk(b"", True))

    assert before == []
    assert exchange.router.held_bytes == [exchange.stream.held_bytes()]
    assert exchange.stream.held_bytes() >= len(body()) + 1000
    with pytest.raises(ProtocolError):
        exchange.tell(m.BodyChunk(b" "))


def test_of_a_streamed_body_nothing_is_kept_while_its_request_is_held() -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.BodyChunk(body()))

    for _ in range(5):
        exchange.tell(m.BodyChunk(b" " * 1000))
        assert exchange.stream.held_bytes() == 0
