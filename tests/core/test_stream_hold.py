"""A policy may hold a request: the stream answers late, once, and forgets a client that leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import messages as m
from extproc.core.following import Asked
from extproc.core.messages import BodyMode
from extproc.core.rejections import saturated
from extproc.core.stream import HOLD_MARGIN_S
from extproc.core.transitions import State
from extproc.core.types import Reason, Wait
from tests.builders import body, request_headers
from tests.core.dispatcher import PICK, Exchange, begin

MAX_HOLD_S = 30.0


def held(mode: BodyMode, *events: m.Event) -> tuple[Exchange, list[m.Command]]:
    """A stream in this mode that the policy has just held, and what it last said."""
    exchange = begin(Wait(until_s=10.0), max_hold_s=MAX_HOLD_S, early_decision_bytes=1)
    exchange.tell(request_headers(body_mode=mode, sends_body_early=True))
    return exchange, exchange.tell(*(events or (m.RequestBody(body(), True),)))


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_a_held_request_extends_the_timeout_once_and_is_answered_by_a_later_pass(
    mode: BodyMode,
) -> None:
    exchange, commands = held(mode)
    arrived_s = 1.0

    assert commands == [
        m.ExtendTimeout(arrived_s + MAX_HOLD_S - exchange.now + HOLD_MARGIN_S),
        m.WakeAt(10.0),
    ]
    assert not exchange.stream.is_answered
    exchange.dispatcher.result = PICK
    assert exchange.tell(m.Wakeup()) == [m.ContinueBody(PICK), m.End()]


def test_a_policy_that_goes_on_waiting_is_asked_again_without_another_extension() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    exchange.dispatcher.result = Wait(until_s=20.0)

    assert exchange.tell(m.Wakeup()) == [m.WakeAt(20.0)]
    assert len(exchange.dispatcher.routed) == 2
    assert exchange.dispatcher.routed[0] == exchange.dispatcher.routed[1]


def test_a_question_to_the_leader_extends_no_timeout_until_the_leader_holds_the_request() -> None:
    exchange = begin(Asked(until_s=2.0), max_hold_s=MAX_HOLD_S)
    exchange.tell(request_headers(body_mode=BodyMode.BUFFERED))

    assert exchange.tell(m.RequestBody(body(), True)) == [m.WakeAt(2.0)]
    exchange.dispatcher.result = Wait(until_s=3.0)
    commands = exchange.tell(m.Wakeup())
    assert [type(each) for each in commands] == [m.ExtendTimeout, m.WakeAt]
    exchange.dispatcher.result = PICK
    assert exchange.tell(m.Wakeup()) == [m.ContinueBody(PICK), m.End()]


@pytest.mark.parametrize("end", [m.Ended(), m.Overloaded(), m.ResponseHeaders(503), None])
def test_a_waiting_request_that_goes_says_so(end: m.Event | None) -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    before = exchange.dispatcher.num_gone

    if end is None:
        exchange.stream.abandon(now=exchange.now)
    else:
        exchange.tell(end)

    assert (before, exchange.dispatcher.num_gone) == (0, 1)


def test_a_policy_learns_when_the_request_arrived() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)

    assert [request.arrived_at_s for request in exchange.dispatcher.routed] == [1.0]


def test_a_request_that_is_held_and_then_refused_gets_the_error() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    exchange.dispatcher.result = saturated("a", 1)
    reply, end = exchange.tell(m.Wakeup())

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert [rejection.reason for rejection in exchange.dispatcher.rejections] == [Reason.SATURATED]
    assert [":path" in headers for headers in exchange.dispatcher.rejected_headers] == [True]
    assert end == m.End()


def test_a_client_that_leaves_while_held_is_forgotten() -> None:
    exchange, _commands = held(BodyMode.BUFFERED)
    exchange.tell(m.Ended())
    exchange.dispatcher.result = PICK

    assert exchange.tell(m.Wakeup()) == []
    assert exchange.stream.pick is None
    assert len(exchange.dispatcher.routed) == 1


def test_a_held_duplex_request_has_no_timer_and_keeps_its_body() -> None:
    exchange, commands = held(BodyMode.FULL_DUPLEX_STREAMED)
    exchange.dispatcher.result = PICK

    assert commands == [m.WakeAt(10.0)]
    assert exchange.tell(m.Wakeup()) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), True),
        m.End(),
    ]


def test_a_held_duplex_request_keeps_its_trailers() -> None:
    exchange, _commands = held(
        BodyMode.FULL_DUPLEX_STREAMED, m.RequestBody(body()), m.RequestTrailers()
    )
    exchange.dispatcher.result = PICK

    assert exchange.tell(m.Wakeup()) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), False),
        m.ContinueTrailers(),
        m.End(),
    ]


@given(st.integers(0, 5), st.booleans())
def test_what_comes_of_a_streamed_body_while_held_is_answered_with_it(
    num_chunks: int, has_trailers: bool
) -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.RequestBody(body()))
    for _ in range(num_chunks):
        assert exchange.tell(m.RequestBody(b" ")) == []
    last = m.RequestTrailers() if has_trailers else m.RequestBody(b" ", True)
    assert exchange.tell(last) == []
    exchange.dispatcher.result = PICK
    num_bodies = 1 + num_chunks + (not has_trailers)

    assert exchange.tell(m.Wakeup()) == [
        m.ContinueHeaders(PICK),
        *[m.ContinueBody()] * num_bodies,
        *([m.ContinueTrailers()] if has_trailers else []),
        m.End(),
    ]


def test_a_streamed_body_that_goes_on_after_the_hold_is_answered_chunk_by_chunk() -> None:
    exchange, _commands = held(BodyMode.STREAMED, m.RequestBody(body()))
    exchange.dispatcher.result = PICK

    assert exchange.tell(m.Wakeup()) == [m.ContinueHeaders(PICK), m.ContinueBody()]
    assert exchange.stream.state is State.REST
    assert exchange.tell(m.RequestBody(b"", True)) == [m.ContinueBody(), m.End()]


def test_a_request_routed_by_its_headers_alone_can_be_held() -> None:
    exchange = begin(Wait(until_s=10.0))
    commands = exchange.tell(request_headers(body_mode=BodyMode.NONE, model="a"))
    assert [type(command) for command in commands] == [m.ExtendTimeout, m.WakeAt]
    exchange.dispatcher.result = PICK

    assert exchange.tell(m.Wakeup()) == [m.ContinueHeaders(PICK), m.End()]


def test_a_held_buffered_body_is_not_kept() -> None:
    """The data plane holds it: ten thousand held prompts must not fill the router's memory."""
    exchange, _commands = held(BodyMode.BUFFERED)

    assert exchange.stream._incoming.reader.held_bytes == 0


def test_of_a_held_requests_headers_only_what_an_answer_needs_is_kept() -> None:
    exchange = begin(Wait(until_s=10.0), session_header="x-session")
    headers = {"x-session": "s", "x-request-id": "r", "authorization": "secret"}
    exchange.tell(request_headers(headers=headers), m.RequestBody(body(), True))

    assert set(exchange.stream._headers) == {":path", "x-request-id"}
    exchange.dispatcher.result = PICK
    exchange.tell(m.Wakeup())
    first, last = exchange.dispatcher.routed
    assert last.session == first.session is not None
