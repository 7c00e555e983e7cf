"""A stream's states and their transitions, as a table.

1. All transitions are in `TABLE`; any other is an error.
2. The answers to events are in `stream`, which names no next state.

An event moves a stream by its type. Its result may move the stream once more: that is a turn. A
request whose headers are rejected goes HEADERS -> BODY, by the event, -> DONE, by the turn.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Final

from extproc.request import messages as m


class State(StrEnum):
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


HOLDING: Final = frozenset((State.BODY, State.READING, State.WAITING, State.REST))
"""States that keep the request's body."""

UNANSWERED: Final = frozenset(
    (State.HEADERS, State.BODY, State.READING, State.WAITING, State.IN_LINE)
)
"""States in which the data plane waits for an answer."""

_ROUTED: Final[dict[type | EventResult, State]] = {
    EventResult.ROUTED: State.REST,
    EventResult.ANSWERED: State.RESPONSE,
    EventResult.OVER: State.DONE,
}

TABLE: Final[dict[State, dict[type | EventResult, State]]] = {
    State.HEADERS: {m.RequestHeaders: State.BODY, m.ResponseHeaders: State.LOCAL_REPLY},
    State.BODY: {
        m.RequestBody: State.BODY,
        m.RequestTrailers: State.BODY,
        m.ResponseHeaders: State.LOCAL_REPLY,
        EventResult.UNREAD: State.READING,
        EventResult.HELD: State.WAITING,
        EventResult.KNOWN: State.DECIDED,
        EventResult.LINED_UP: State.IN_LINE,
        EventResult.LISTED: State.LISTED,
        **_ROUTED,
    },
    State.DECIDED: {
        m.RequestBody: State.DECIDED,
        m.RequestTrailers: State.DECIDED,
        m.ResponseHeaders: State.DECIDED,
        m.ResponseBody: State.DECIDED,
        m.ResponseTrailers: State.DECIDED,
        EventResult.OVER: State.DONE,
    },
    State.IN_LINE: {
        m.RequestBody: State.IN_LINE,
        m.RequestTrailers: State.IN_LINE,
        m.ResponseHeaders: State.LOCAL_REPLY,
        EventResult.LISTED: State.LISTED,
        EventResult.OVER: State.DONE,
    },
    State.READING: {
        m.Wakeup: State.BODY,
        m.RequestBody: State.READING,
        m.RequestTrailers: State.READING,
        m.ResponseHeaders: State.LOCAL_REPLY,
        EventResult.OVER: State.DONE,
    },
    State.WAITING: {
        m.RequestBody: State.WAITING,
        m.RequestTrailers: State.WAITING,
        m.ResponseHeaders: State.LOCAL_REPLY,
        EventResult.HELD: State.WAITING,
        **_ROUTED,
    },
    State.REST: {
        m.RequestBody: State.REST,
        m.RequestTrailers: State.REST,
        # A response may begin while the endpoint still reads the request.
        m.ResponseHeaders: State.RESPONSE,
        **_ROUTED,
    },
    State.RESPONSE: {
        m.RequestBody: State.RESPONSE,
        m.RequestTrailers: State.RESPONSE,
        m.ResponseHeaders: State.RESPONSE,
        m.ResponseBody: State.RESPONSE,
        m.ResponseTrailers: State.RESPONSE,
        EventResult.ROUTED: State.RESPONSE,
        EventResult.ANSWERED: State.RESPONSE,
        EventResult.OVER: State.DONE,
    },
    State.LOCAL_REPLY: {m.ResponseBody: State.LOCAL_REPLY, m.ResponseTrailers: State.LOCAL_REPLY},
    # Messages in transit when we ended the RPC.
    State.DONE: dict.fromkeys(m.EVENT_TYPES, State.DONE),
    State.LISTED: dict.fromkeys(m.EVENT_TYPES, State.LISTED),
}
for _state, _follows in TABLE.items():
    _follows[m.Ended] = State.DONE
    # A timer may fire late, and memory be short, at any time.
    _follows.setdefault(m.Wakeup, _state)
    _follows[m.Overloaded] = _state
