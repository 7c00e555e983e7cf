"""What holds for a stream in every state and for every sequence of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.request import bodyslices, jsonmodel
from extproc.request import messages as m
from extproc.request.listbudget import MAX_UNSENT_BYTES
from extproc.request.messages import BodyMode
from extproc.request.transitions import CallState
from extproc.types import Pick, Rejection, Wait
from tests.builders import body, request_headers
from tests.request.fakerouter import PICK, Exchange, FakeRouter, begin
from tests.strategies import body_events, event_sequences, rejections, stream_settings

EVENTS: dict[type, m.Event] = {
    m.RequestHeaders: request_headers(),
    m.BodyChunk: m.BodyChunk(body(), True),
    m.RequestTrailers: m.RequestTrailers(),
    m.ResponseHeaders: m.ResponseHeaders(200),
    m.ResponseBody: m.ResponseBody(b"x"),
    m.ResponseTrailers: m.ResponseTrailers(),
    m.Wakeup: m.Wakeup(),
    m.Overloaded: m.Overloaded(),
    m.StreamEnded: m.StreamEnded(),
}
DENSE = b'{"x": [' + 40_000 * b"[]," + b"0]"
"""The beginning of a body that one pass does not read."""
REQUEST, RESPONSE = (m.BodyChunk, m.RequestTrailers), (m.ResponseBody, m.ResponseTrailers)
ALLOWED: dict[CallState, tuple[type, ...]] = {
    CallState.HEADERS: (m.RequestHeaders, m.ResponseHeaders, m.StreamEnded),
    CallState.BODY: (*REQUEST, m.ResponseHeaders, m.StreamEnded),
    CallState.READING: (*REQUEST, m.ResponseHeaders, m.StreamEnded),
    CallState.WAITING: (*REQUEST, m.ResponseHeaders, m.StreamEnded),
    CallState.REST: (*REQUEST, m.ResponseHeaders, m.StreamEnded),
    CallState.RESPONSE: (*REQUEST, m.ResponseHeaders, *RESPONSE, m.StreamEnded),
    CallState.DECIDED: (*REQUEST, m.ResponseHeaders, *RESPONSE, m.StreamEnded),
    CallState.LOCAL_REPLY: (*RESPONSE, m.StreamEnded),
    CallState.IN_LINE: (*REQUEST, m.ResponseHeaders, m.StreamEnded),
    CallState.LISTED: m.EVENT_TYPES,
    CallState.DONE: m.EVENT_TYPES,
}
ANSWERS: dict[type, type] = {
    m.ContinueHeaders: m.RequestHeaders,
    m.ContinueBody: m.BodyChunk,
    m.EchoBody: m.BodyChunk,
    m.ContinueTrailers: m.RequestTrailers,
    m.ContinueResponseHeaders: m.ResponseHeaders,
    m.ContinueResponseBody: m.ResponseBody,
    m.EchoResponseBody: m.ResponseBody,
    m.ContinueResponseTrailers: m.ResponseTrailers,
}
REQUEST_PHASES = (m.RequestHeaders, m.BodyChunk, m.RequestTrailers)


def begin_again() -> Exchange:
    """A stream of a request that another call has decided."""
    return Exchange(router := FakeRouter(decides=AllDecided()), router.stream())


class AllDecided:
    """Takes every request for decided."""

    def of(self, pick: Pick) -> str:
        return ""

    def knows(self, headers: object, subset: object) -> bool:
        return True


def in_state(state: CallState) -> Exchange:
    exchange = begin(uses_response_phases=True, early_decision_bytes=1)
    early = request_headers(body_mode=BodyMode.STREAMED, sends_body_early=True)
    if state is CallState.DECIDED:
        exchange = begin_again()
    steps: dict[CallState, Sequence[m.Event]] = {
        CallState.HEADERS: [],
        CallState.BODY: [early],
        CallState.READING: [early, m.BodyChunk(DENSE)],
        CallState.WAITING: [early, m.BodyChunk(body())],
        CallState.REST: [early, m.BodyChunk(body())],
        CallState.RESPONSE: [early, m.BodyChunk(body(), True)],
        CallState.DECIDED: [early],
        CallState.LOCAL_REPLY: [m.ResponseHeaders(401)],
        CallState.IN_LINE: [request_headers("GET", "/v1/models")],
        CallState.LISTED: [request_headers("GET", "/v1/models")],
        CallState.DONE: [m.StreamEnded()],
    }
    if state is CallState.IN_LINE:
        exchange.router.lists.unsent_bytes = MAX_UNSENT_BYTES
    if state is CallState.WAITING:
        exchange.router.result = Wait(until_s=10.0)
    exchange.tell(*steps[state])
    assert exchange.stream.state is state
    return exchange


@pytest.mark.parametrize("kind", m.EVENT_TYPES)
@pytest.mark.parametrize("state", CallState)
def test_every_event_in_every_state_is_taken_or_breaks_the_protocol(
    state: CallState, kind: type
) -> None:
    exchange = in_state(state)

    # A timer may fire in any state, and memory be short.
    if kind in (*ALLOWED[state], m.Wakeup, m.Overloaded):
        exchange.tell(EVENTS[kind])
    else:
        with pytest.raises(ProtocolError, match=f"{kind.__name__} in state {state.value}"):
            exchange.tell(EVENTS[kind])


class Observer:
    """Follows one stream and checks each answer against what was delivered."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.delivered: list[m.Event] = []
        self.answers: list[m.Command] = []
        self.is_replied = self.is_ended = self.is_extended = self.is_to_be_woken = False

    def tell(self, event: m.Event) -> None:
        commands = self.exchange.tell(event)
        if self.is_ended:
            assert commands == [], "an answer after the end"
            return
        if not isinstance(event, m.StreamEnded | m.Wakeup):
            self.delivered.append(event)
        if any(isinstance(command, m.WakeAt) for command in commands):
            self.hold(commands)
            return
        for command in commands:
            self.take(command)

    def hold(self, commands: list[m.Command]) -> None:
        """A request that is held gets more time once at most, and no answer in the same pass."""
        *extensions, wake = commands
        assert isinstance(wake, m.WakeAt)
        self.is_to_be_woken = True
        if self.exchange.stream.state is not CallState.WAITING:  # there is more to read
            assert wake.at_s == self.exchange.now
            for command in extensions:
                self.take(command)
            return
        assert wake.at_s >= self.exchange.now
        assert [type(each) for each in extensions] in ([], [m.ExtendTimeout])
        assert not (extensions and self.is_extended)
        self.is_extended |= bool(extensions)

    def wake(self) -> None:
        """Let the timer fire, if there is one."""
        if self.is_to_be_woken:
            self.is_to_be_woken = False
            self.tell(m.Wakeup())

    def take(self, command: m.Command) -> None:
        assert not self.is_ended, "a command after the end"
        if isinstance(command, m.EndStream):
            self.is_ended = True
            assert self.is_replied or (self.carries_pick() and self.unanswered() == [])
            return
        assert not self.is_replied, "a command after the reply"
        if isinstance(command, m.Reply):
            self.is_replied = True
            return
        self.answers.append(command)
        for phases in (REQUEST_PHASES, (m.ResponseHeaders, *RESPONSE)):
            asked, answered = self.sides(phases)
            assert answered == asked[: len(answered)], "in order, and nothing unasked"

    def sides(self, phases: tuple[type, ...]) -> tuple[list[type], list[type]]:
        """What was delivered of these phases and what was answered.

        A run of echoed body chunks stands for all body events: they are not one to one.
        """
        asked = [type(event) for event in self.delivered if isinstance(event, phases)]
        answered = [ANSWERS[type(c)] for c in self.answers if ANSWERS[type(c)] in phases]
        if any(isinstance(c, m.EchoBody | m.EchoResponseBody) for c in self.answers):
            asked, answered = list(dict.fromkeys(asked)), list(dict.fromkeys(answered))
        return asked, answered

    def unanswered(self) -> list[type]:
        asked, answered = self.sides(m.EVENT_TYPES)
        return [kind for kind in set(asked) if asked.count(kind) != answered.count(kind)]

    def carries_pick(self) -> bool:
        picks = [getattr(c, "pick", None) for c in self.answers]
        return picks.count(PICK) == 1


def echoed(observer: Observer, kind: type) -> bytes:
    return b"".join(
        c.data
        for c in observer.answers
        if isinstance(c, m.EchoBody | m.EchoResponseBody) and type(c) is kind
    )


@settings(max_examples=4 * settings().max_examples)
@given(
    event_sequences(),
    stream_settings(),
    st.just(PICK) | rejections(),
    st.sampled_from((0, 0, 1, 2)),
    st.booleans(),
    st.booleans(),
)
def test_every_event_is_answered_once_in_order_and_the_end_comes_last(
    events: list[m.Event],
    configured: dict[str, Any],
    result: Pick | Rejection,
    num_waits: int,
    is_woken_at_once: bool,
    is_read_slowly: bool,
) -> None:
    """Also: an RPC ends with OK only with a destination or a reply given, and the pick is finished
    once if the response phases are used and never if they are not. Held or not, and whether a body
    is read in one pass or in many."""
    exchange = begin(result, **configured)
    exchange.router.num_waits = num_waits
    observer = Observer(exchange)
    whole, slow = {"SMALL_BYTES": 0}, {"SLICE_BYTES": 7, "WORK_PER_PASS": 1}
    with (
        patch.dict(vars(jsonmodel), whole if is_read_slowly else {}),
        patch.dict(vars(bodyslices), slow if is_read_slowly else {}),
    ):
        try:
            for event in events:
                observer.tell(event)
                if is_woken_at_once:
                    observer.wake()
            while observer.is_to_be_woken:
                observer.wake()
        except ProtocolError:
            note("protocol broken")
            exchange.stream.abandon(now=exchange.now)
    observer.tell(m.StreamEnded())

    router = exchange.router
    assert len(router.routed) <= 1
    assert len(router.rejections) <= 1
    note("replied" if observer.is_replied else "routed" if router.routed else "undecided")
    if isinstance(result, Rejection) or router.num_looks <= num_waits:
        assert router.finished == []
    elif configured["uses_response_phases"]:
        assert [pick for pick, _outcome, _now in router.finished] == [PICK]


@given(
    body_events(is_plain=True),
    st.sampled_from((BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_request_that_is_sent_in_chunks_is_answered_whole_when_it_is_over(
    events: list[m.Event], mode: BodyMode, early_decision_bytes: int, uses_response_phases: bool
) -> None:
    exchange = begin(
        early_decision_bytes=early_decision_bytes, uses_response_phases=uses_response_phases
    )
    observer = Observer(exchange)
    observer.tell(request_headers(body_mode=mode, sends_body_early=True))
    for event in events:
        observer.tell(event)
    last = events[-1]
    is_over = last.end_of_stream if isinstance(last, m.BodyChunk) else True

    if is_over:
        assert observer.unanswered() == []
        assert observer.carries_pick()
    assert observer.is_ended is (is_over and not uses_response_phases)
    assert exchange.stream.is_answered is (exchange.stream.pick is not None)


@given(st.lists(st.binary(max_size=5), max_size=5), st.booleans(), st.integers(1, 200_000))
def test_a_duplex_request_is_echoed_byte_for_byte(
    chunks: list[bytes], has_trailers: bool, prompt_bytes: int
) -> None:
    whole = body(prompt=prompt_bytes * "p")
    spaces = [b" " * len(chunk) for chunk in chunks]
    observer = Observer(begin())
    observer.tell(request_headers(body_mode=BodyMode.FULL_DUPLEX_STREAMED))
    for data in (*spaces, whole[:3]):
        observer.tell(m.BodyChunk(data))
    observer.tell(m.BodyChunk(whole[3:], not has_trailers))
    if has_trailers:
        observer.tell(m.RequestTrailers())

    assert observer.is_ended
    assert echoed(observer, m.EchoBody) == b"".join(spaces) + whole
    last = [c.end_of_stream for c in observer.answers if isinstance(c, m.EchoBody)]
    assert last == [False] * (len(last) - 1) + [not has_trailers]


@given(st.lists(st.integers(0, 130_000), min_size=1, max_size=4))
def test_a_duplex_response_is_echoed_byte_for_byte_and_ends_once(sizes: list[int]) -> None:
    observer = Observer(begin(uses_response_phases=True))
    observer.tell(request_headers(response_body_mode=BodyMode.FULL_DUPLEX_STREAMED))
    observer.tell(m.BodyChunk(body(), True))
    observer.tell(m.ResponseHeaders(200))
    for index, size in enumerate(sizes):
        observer.tell(m.ResponseBody(size * b"r", index == len(sizes) - 1))

    assert echoed(observer, m.EchoResponseBody) == sum(sizes) * b"r"
    last = [c.end_of_stream for c in observer.answers if isinstance(c, m.EchoResponseBody)]
    assert last == [False] * (len(last) - 1) + [True]


@pytest.mark.parametrize(
    ("mode", "events"),
    [
        (BodyMode.BUFFERED, [m.BodyChunk(b"")]),
        (BodyMode.BUFFERED, [m.RequestTrailers(), m.RequestTrailers()]),
        (BodyMode.STREAMED, [m.BodyChunk(b"", True), m.BodyChunk(b"")]),
        (BodyMode.STREAMED, [m.BodyChunk(b"", True), m.RequestTrailers()]),
        (BodyMode.STREAMED, [m.RequestTrailers(), m.BodyChunk(b"")]),
    ],
)
def test_a_held_request_that_is_complete_takes_no_more(
    mode: BodyMode, events: list[m.Event]
) -> None:
    exchange = begin(Wait(until_s=10.0), early_decision_bytes=1)
    exchange.tell(request_headers(body_mode=mode, sends_body_early=True), m.BodyChunk(body()))
    exchange.tell(*events[:-1])

    with pytest.raises(ProtocolError, match="more of a request that is complete"):
        exchange.tell(events[-1])


def test_trailers_that_come_while_a_request_is_held_are_answered_after_it() -> None:
    exchange = begin(Wait(until_s=10.0))
    exchange.tell(request_headers(), m.BodyChunk(body()), m.RequestTrailers())
    exchange.router.result = PICK

    assert exchange.tell(m.Wakeup()) == [m.ContinueBody(PICK), m.ContinueTrailers(), m.EndStream()]
