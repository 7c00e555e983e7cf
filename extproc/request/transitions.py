"""A stream's states and their transitions, as a table.

1. All transitions are in `TABLE`; any other is an error.
2. The answers to events are in `stream`, which names no next state.

An event moves a stream by its type. Its result (`EventResult`) may move the stream once more. A
request whose headers are rejected goes HEADERS -> BODY, by the event, -> DONE, by the result.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Final

from extproc.request import messages as m


class CallState(StrEnum):
    """The state of a stream."""

    HEADERS = auto()  # no event yet
    BODY = auto()  # the model is not known yet
    READING = auto()  # more body than one pass reads: others run before the rest is read
    WAITING = auto()  # the policy holds the request
    REST = auto()  # routed; the data plane still sends parts of the request
    RESPONSE = auto()  # the request is answered; response phases may come
    DECIDED = auto()  # decided before: nothing but to let all parts go on
    IN_LINE = auto()  # a list of models is asked for, and others come first
    LISTED = auto()  # it is answered, and counts until the RPC has ended
    LOCAL_REPLY = auto()  # the data plane answered the client itself before we routed
    DONE = auto()  # everything needed is answered, or the RPC is gone


class EventResult(StrEnum):
    """The result of an event, where its type alone does not determine the next state."""

    UNREAD = auto()  # others run before the rest of the body is read
    HELD = auto()  # the policy does not choose yet
    KNOWN = auto()  # the request was decided before, by another call
    LINED_UP = auto()  # a list has to wait for others
    LISTED = auto()  # a list is on its way
    ROUTED = auto()  # an endpoint is chosen, and more of the request is to come
    ANSWERED = auto()  # the whole request is answered, and the RPC stays open for its response
    OVER = auto()  # the RPC ends


HOLDING: Final = frozenset((CallState.BODY, CallState.READING, CallState.WAITING, CallState.REST))
"""States that keep the request's body."""

UNANSWERED: Final = frozenset(
    (CallState.HEADERS, CallState.BODY, CallState.READING, CallState.WAITING, CallState.IN_LINE)
)
"""States in which the data plane waits for an answer."""

_ROUTED: Final[dict[type | EventResult, CallState]] = {
    EventResult.ROUTED: CallState.REST,
    EventResult.ANSWERED: CallState.RESPONSE,
    EventResult.OVER: CallState.DONE,
}

TABLE: Final[dict[CallState, dict[type | EventResult, CallState]]] = {
    CallState.HEADERS: {m.RequestHeaders: CallState.BODY, m.ResponseHeaders: CallState.LOCAL_REPLY},
    CallState.BODY: {
        m.BodyChunk: CallState.BODY,
        m.RequestTrailers: CallState.BODY,
        m.ResponseHeaders: CallState.LOCAL_REPLY,
        EventResult.UNREAD: CallState.READING,
        EventResult.HELD: CallState.WAITING,
        EventResult.KNOWN: CallState.DECIDED,
        EventResult.LINED_UP: CallState.IN_LINE,
        EventResult.LISTED: CallState.LISTED,
        **_ROUTED,
    },
    CallState.DECIDED: {
        m.BodyChunk: CallState.DECIDED,
        m.RequestTrailers: CallState.DECIDED,
        m.ResponseHeaders: CallState.DECIDED,
        m.ResponseBody: CallState.DECIDED,
        m.ResponseTrailers: CallState.DECIDED,
        EventResult.OVER: CallState.DONE,
    },
    CallState.IN_LINE: {
        m.BodyChunk: CallState.IN_LINE,
        m.RequestTrailers: CallState.IN_LINE,
        m.ResponseHeaders: CallState.LOCAL_REPLY,
        EventResult.LISTED: CallState.LISTED,
        EventResult.OVER: CallState.DONE,
    },
    CallState.READING: {
        m.Wakeup: CallState.BODY,
        m.BodyChunk: CallState.READING,
        m.RequestTrailers: CallState.READING,
        m.ResponseHeaders: CallState.LOCAL_REPLY,
        EventResult.OVER: CallState.DONE,
    },
    CallState.WAITING: {
        m.BodyChunk: CallState.WAITING,
        m.RequestTrailers: CallState.WAITING,
        m.ResponseHeaders: CallState.LOCAL_REPLY,
        EventResult.HELD: CallState.WAITING,
        **_ROUTED,
    },
    CallState.REST: {
        m.BodyChunk: CallState.REST,
        m.RequestTrailers: CallState.REST,
        # A response may begin while the endpoint still reads the request.
        m.ResponseHeaders: CallState.RESPONSE,
        **_ROUTED,
    },
    CallState.RESPONSE: {
        m.BodyChunk: CallState.RESPONSE,
        m.RequestTrailers: CallState.RESPONSE,
        m.ResponseHeaders: CallState.RESPONSE,
        m.ResponseBody: CallState.RESPONSE,
        m.ResponseTrailers: CallState.RESPONSE,
        EventResult.ROUTED: CallState.RESPONSE,
        EventResult.ANSWERED: CallState.RESPONSE,
        EventResult.OVER: CallState.DONE,
    },
    CallState.LOCAL_REPLY: {
        m.ResponseBody: CallState.LOCAL_REPLY,
        m.ResponseTrailers: CallState.LOCAL_REPLY,
    },
    # Messages in transit when we ended the RPC.
    CallState.DONE: dict.fromkeys(m.EVENT_TYPES, CallState.DONE),
    CallState.LISTED: dict.fromkeys(m.EVENT_TYPES, CallState.LISTED),
}
for _state, _follows in TABLE.items():
    _follows[m.StreamEnded] = CallState.DONE
    # A timer may fire late, and memory be short, at any time.
    _follows.setdefault(m.Wakeup, _state)
    _follows[m.Overloaded] = _state
