"""One HTTP request's life as ext_proc tells it: events in, commands out.

Rules:
1. All transitions live in `_TRANSITIONS`; an event that has none there breaks the protocol.
2. A stream makes at most one pick, and `Router.route` is asked at most once.
3. Every delivered event is answered once, in order. Nothing is ever answered unasked.
4. `End` comes right after the last needed answer and never before one: Envoy takes an RPC that
   ends with OK unanswered for "carry on without me".
5. With the response phases in use, the pick is finished here, once, when the stream ends; without
   them only where the request is refused after it was routed.

States: HEADERS (nothing seen) -> BODY (the model is not known yet) -> READING (more came than is
read in one pass: the rest after others had their turn) -> WAITING (only where the rule holds the
request) -> REST (routed; the data plane still sends parts of the request) -> RESPONSE
(request answered; response phases may come) -> DONE. LOCAL_REPLY: the data plane answered the
client itself (its own 413, another filter's 401) before we routed; nothing of the request follows,
and what it shows us of its response goes on unchanged.

A headers answer is held back where the body comes early (STREAMED with
`send_body_without_waiting_for_header_response`, FULL_DUPLEX_STREAMED) and given at once where the
body waits for it (BUFFERED, BUFFERED_PARTIAL).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from typing import Any

from extproc.core import messages as m
from extproc.core import rejections
from extproc.core.body import BodyReader, pieces
from extproc.core.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.core.errors import ProtocolError, RequestError
from extproc.core.hints import read_hints
from extproc.core.messages import BodyMode
from extproc.core.openai import MAX_MODEL_BYTES, check_model, error_body, model_body
from extproc.core.ports import Dispatcher, StreamSettings
from extproc.core.routes import Route, RouteKind, match_untold
from extproc.core.types import Hints, Outcome, Pick, Rejection, RequestInfo, Wait
from extproc.core.words import shortened

HOLD_MARGIN_S = 5.0
"""The data plane's timer runs this much longer than a hold, so that the answer is ours."""


class State(Enum):
    """Where a stream is."""

    HEADERS = "headers"
    BODY = "body"
    READING = "reading"
    WAITING = "waiting"
    REST = "rest"
    RESPONSE = "response"
    LOCAL_REPLY = "local_reply"
    DONE = "done"


_HOLDING = (State.BODY, State.READING, State.WAITING, State.REST)
"""Where the body is kept."""

_Release = Callable[["Stream", Pick], list[m.Command]]


class Stream:
    """The machine for one request. Not reusable."""

    __slots__ = (
        "_arrived_at_s",
        "_body",
        "_dispatcher",
        "_has_trailers",
        "_headers",
        "_hints",
        "_is_complete",
        "_mode",
        "_release",
        "_request",
        "_response_body_mode",
        "_response_status",
        "_route",
        "_settings",
        "_subset",
        "_tells_modes",
        "pick",
        "state",
    )

    _headers: m.RequestHeaders
    _subset: frozenset[str] | None
    _route: Route
    _body: BodyReader
    _hints: Hints
    _request: RequestInfo
    _release: _Release

    def __init__(self, dispatcher: Dispatcher, settings: StreamSettings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._mode = BodyMode.NONE
        self._response_body_mode = BodyMode.NONE
        self._response_status = 0
        self._arrived_at_s = 0.0
        self._is_complete = False
        self._tells_modes = True
        self._has_trailers = False
        self.state = State.HEADERS
        self.pick: Pick | None = None

    def handle(self, event: m.Event, *, now: float) -> list[m.Command]:
        """Take one event; answer the commands to carry out, in order.

        Raises:
            ProtocolError: The event may not come here. End the RPC with a non-OK status.
        """
        handler = _TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise ProtocolError(f"{type(event).__name__} in state {self.state.value}")
        try:
            return handler(self, event, now)
        except RequestError as error:
            # Routed by a part of the body, and the rest is wrong: the endpoint has not got it all.
            self._give_up_pick(now)
            return self._reject(error.rejection)

    @property
    def is_answered(self) -> bool:
        """Nothing that the data plane still waits for is unanswered."""
        return self.state not in (State.HEADERS, State.BODY, State.READING, State.WAITING)

    @property
    def awaits_message(self) -> bool:
        """Nothing happens before the data plane says more."""
        return self.state in (State.HEADERS, State.BODY)

    @property
    def is_wanted_half_closed(self) -> bool:
        """Whether the data plane wants an answer though it has closed its side.

        Envoy closes it when the client has left; one that tells nothing of modes, when all is sent.
        """
        return not self._tells_modes

    @property
    def held_bytes(self) -> int:
        """What is kept of the request's body."""
        return self._body.held_bytes if self.state in _HOLDING else 0

    @property
    def is_whole(self) -> bool:
        """Nothing more will be kept of the body."""
        return self.state is State.WAITING or (self.state is State.READING and self._is_over())

    def abandon(self, *, now: float) -> None:
        """The answer could not be given: the request will not reach the pick's endpoint."""
        self._let_go()
        self.state = State.DONE
        self._give_up_pick(now)

    def _give_up_pick(self, now: float) -> None:
        pick, self.pick = self.pick, None
        if pick is not None:
            self._dispatcher.finish(pick, Outcome.FAILED, now=now)

    # --- request headers ---------------------------------------------------------------------

    def _on_request_headers(self, event: m.RequestHeaders, now: float) -> list[m.Command]:
        headers = event.headers
        self._headers, self._subset, self._arrived_at_s = event, event.subset, now
        self._response_body_mode = self._mode_of_response(event.response_body_mode)
        route = self._match(event)
        if isinstance(route, Rejection):
            return self._reject(route)
        if route.kind in (RouteKind.LIST_MODELS, RouteKind.GET_MODEL):
            return self._answer_models(route, event.subset, now)
        self._route = route
        self._tells_modes = event.body_mode is not None
        self._mode = event.body_mode or self._settings.assumed_body_mode
        self._body = BodyReader(
            route,
            headers.get("content-type", ""),
            max_bytes=self._settings.max_body_bytes,
            allows_stored=self._session() is not None,
            early_bytes=self._settings.early_decision_bytes,
            is_echoed=self._mode is BodyMode.FULL_DUPLEX_STREAMED,
        )
        self._check_length(headers.get("content-length", ""))
        self._hints = read_hints(headers)
        if route.kind is RouteKind.STORED_RESPONSE:
            return self._on_stored_response(event, now)
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise RequestError(rejections.encoded_body())
        if event.end_of_stream:
            raise RequestError(rejections.empty_body())
        if self._mode is BodyMode.NONE and event.model is not None:
            return self._on_metadata(event.model, now)
        return self._await_body(event)

    def _match(self, event: m.RequestHeaders) -> Route | Rejection:
        """Not every data plane tells the request line: without a method, a body makes it POST."""
        headers = event.headers
        method, path = headers.get(":method"), headers.get(":path")
        if method is None:
            method = "GET" if event.end_of_stream else "POST"
        if path is None:
            return match_untold(method, headers.get("content-type", ""))
        return self._settings.routes.match(method, path)

    def _check_length(self, content_length: str) -> None:
        limit = self._settings.max_body_bytes
        # The count of digits first: int() refuses thousands of them with a ValueError.
        if content_length.isdecimal() and (len(content_length) > 18 or int(content_length) > limit):
            raise RequestError(rejections.too_large(limit))

    def _await_body(self, event: m.RequestHeaders) -> list[m.Command]:
        waits = self._mode is BodyMode.STREAMED and not event.sends_body_early
        if self._mode is BodyMode.NONE or waits:
            return self._ask_for_body()
        self.state = State.BODY
        if self._mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            return [m.ContinueHeaders()]
        return []

    def _ask_for_body(self) -> list[m.Command]:
        if not self._settings.allow_mode_override:
            raise RequestError(rejections.body_not_sent())
        self._mode, self.state = BodyMode.BUFFERED, State.BODY
        keeps_response = self._settings.uses_response_phases
        return [m.ContinueHeaders(ask_for_body=True, keeps_response=keeps_response)]

    def _on_metadata(self, model: str, now: float) -> list[m.Command]:
        """The data plane has read the model itself; "" says that it found none."""
        if not model:
            raise RequestError(rejections.missing_model())
        return self._decide(check_model(model), now, Stream._release_headers)

    def _on_stored_response(self, event: m.RequestHeaders, now: float) -> list[m.Command]:
        if self._session() is None:
            raise RequestError(rejections.stored_response())
        if event.end_of_stream or self._mode is BodyMode.NONE:
            return self._decide("", now, Stream._release_headers)
        return self._await_body(event)

    def _answer_models(
        self, route: Route, subset: frozenset[str] | None, now: float
    ) -> list[m.Command]:
        if route.kind is RouteKind.LIST_MODELS:
            answer = self._dispatcher.models_body(subset, now=now)
        else:
            name = shortened(route.resource, MAX_MODEL_BYTES)
            card = self._dispatcher.model(name, subset, now=now)
            answer = card if isinstance(card, Rejection) else model_body(card)
        return self._reject(answer) if isinstance(answer, Rejection) else self._reply(200, answer)

    # --- request body ------------------------------------------------------------------------

    def _on_request_body(self, event: m.RequestBody, now: float) -> list[m.Command]:
        self._take(event)
        return self._read_on(None, now)

    def _take(self, event: m.RequestBody) -> None:
        self._body.add(event.data)
        self._is_complete = event.end_of_stream
        if event.subset is not None:
            self._subset = event.subset

    def _read_on(self, _event: m.Wakeup | None, now: float) -> list[m.Command]:
        """Read on; decide once all that came is read, and let others have their turn before."""
        if not self._body.read(is_over=self._is_over()):
            self.state = State.READING
            return [m.WakeAt(now)]
        self.state = State.BODY
        return self._decide_if_enough(now)

    def _decide_if_enough(self, now: float) -> list[m.Command]:
        body, is_over = self._body, self._is_over()
        if self._mode is BodyMode.BUFFERED:
            # With trailers end_of_stream is unset; the one message is complete all the same.
            return self._decide(body.model(), now, Stream._release_body)
        if self._mode is BodyMode.BUFFERED_PARTIAL:
            model = body.model() if self._is_complete else body.model_of_part()
            return self._decide(model, now, Stream._release_body)
        if self._mode is BodyMode.STREAMED:
            so_far = body.model() if is_over else body.model_so_far()
            if so_far is None:
                return []
            body.settle(so_far)
            return self._decide(so_far, now, Stream._release_streamed)
        return self._decide(body.model(), now, Stream._release_duplex) if is_over else []

    def _on_body_trailers(self, _event: m.RequestTrailers, now: float) -> list[m.Command]:
        """Trailers before a decision: what came of the body is all of it."""
        self._has_trailers = True
        if self._mode in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.STREAMED):
            return self._read_on(None, now)
        # A buffered body is delivered before the trailers: there is none.
        raise RequestError(rejections.empty_body())

    def _is_over(self) -> bool:
        """Whether what came is all that will: a buffered body comes in one message."""
        is_sent_once = self._mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
        return is_sent_once or self._is_complete or self._has_trailers

    def _on_reading_body(self, event: m.RequestBody, _now: float) -> list[m.Command]:
        comes_in_chunks = self._mode in (BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
        self._check_goes_on(is_possible=comes_in_chunks)
        self._take(event)
        return []

    def _release_headers(self, pick: Pick) -> list[m.Command]:
        return [m.ContinueHeaders(pick), *self._trailers(), *self._request_over()]

    def _release_body(self, pick: Pick) -> list[m.Command]:
        return [m.ContinueBody(pick), *self._trailers(), *self._request_over()]

    def _release_streamed(self, pick: Pick) -> list[m.Command]:
        self.state = State.REST
        return [m.ContinueHeaders(pick), *self._answer_read()]

    def _answer_read(self) -> list[m.Command]:
        """Let the chunks go on that have been read; the trailers and the end once all have."""
        body = self._body
        commands: list[m.Command] = [m.ContinueBody() for _ in range(body.take_done())]
        if body.is_read and (self._is_complete or self._has_trailers):
            commands += [*self._trailers(), *self._request_over()]
        return commands

    def _release_duplex(self, pick: Pick) -> list[m.Command]:
        is_last = not self._has_trailers
        echo = [m.EchoBody(data, last and is_last) for data, last in self._body.pieces()]
        return [m.ContinueHeaders(pick), *echo, *self._trailers(), *self._request_over()]

    def _trailers(self) -> list[m.Command]:
        return [m.ContinueTrailers()] if self._has_trailers else []

    def _on_rest_body(self, event: m.RequestBody, now: float) -> list[m.Command]:
        """More of a body whose beginning has decided: nothing of it goes on unread."""
        if self._is_complete or self._mode is not BodyMode.STREAMED:
            return [m.ContinueBody()]
        is_reading = not self._body.is_read
        self._take(event)
        return [] if is_reading else self._read_rest(None, now)

    def _read_rest(self, _event: m.Wakeup | None, now: float) -> list[m.Command]:
        if self._body.is_read:
            return []  # a timer of before
        is_read = self._body.read()
        return self._answer_read() if is_read else [*self._answer_read(), m.WakeAt(now)]

    def _on_rest_trailers(self, _event: m.RequestTrailers, _now: float) -> list[m.Command]:
        self._has_trailers = True
        return self._answer_read() if self._body.is_read else []

    # --- deciding, now or later --------------------------------------------------------------

    def _decide(self, model: str, now: float, release: _Release) -> list[m.Command]:
        """Ask for an endpoint; what follows a pick is `release`, now or after a wait."""
        headers = self._headers
        self._request = RequestInfo(
            model=model,
            path=self._route.path[:MAX_PATH_CHARS],
            body_bytes=self._body.num_bytes,
            request_id=headers.headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS],
            session=_digest(self._session()),
            subset=self._subset,
            arrived_at_s=self._arrived_at_s,
            hints=self._hints,
        )
        self._release = release
        return self._ask(now)

    def _ask(self, now: float) -> list[m.Command]:
        result = self._dispatcher.route(self._request, now=now)
        if isinstance(result, Pick):
            self.pick = result
            return self._release(self, result)
        if isinstance(result, Wait):
            return self._hold(result, now)
        raise RequestError(result)

    def _hold(self, wait: Wait, now: float) -> list[m.Command]:
        if self.state is State.WAITING:
            return [m.WakeAt(wait.until_s)]
        self.state = State.WAITING
        self._headers = self._kept_headers()
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED:
            return [m.WakeAt(wait.until_s)]  # no timer runs there
        give_up_s = self._arrived_at_s + self._settings.max_hold_s
        return [m.ExtendTimeout(give_up_s - now + HOLD_MARGIN_S), m.WakeAt(wait.until_s)]

    def _kept_headers(self) -> m.RequestHeaders:
        """What an answer can still need: thousands may be held, and all headers are 1.5 KB each."""
        headers = self._headers.headers
        limits = {":path": MAX_PATH_CHARS, "x-request-id": MAX_REQUEST_ID_CHARS}
        kept = {name: headers[name][:most] for name, most in limits.items() if name in headers}
        return m.RequestHeaders(kept)

    def _on_wakeup(self, _event: m.Wakeup, now: float) -> list[m.Command]:
        return self._ask(now) if self._body.read() else [m.WakeAt(now)]

    def _on_waiting_body(self, event: m.RequestBody, _now: float) -> list[m.Command]:
        """More of a streamed body whose beginning has told the model: read, and answered later."""
        self._check_goes_on(is_possible=self._mode is BodyMode.STREAMED)
        self._take(event)
        self._body.read()
        return []

    def _on_waiting_trailers(self, _event: m.RequestTrailers, _now: float) -> list[m.Command]:
        self._check_goes_on()
        self._has_trailers = True
        return []

    def _check_goes_on(self, *, is_possible: bool = True) -> None:
        if self._is_complete or self._has_trailers or not is_possible:
            raise ProtocolError("more of a request that is complete")

    # --- response phases ---------------------------------------------------------------------

    def _on_response_headers(self, event: m.ResponseHeaders, now: float) -> list[m.Command]:
        self.state = State.RESPONSE
        self._response_status = event.status
        pick, served_by = self.pick, event.served_by
        if served_by and pick is not None and served_by != pick.address:
            self._dispatcher.served(pick, served_by, now=now)
        return [m.ContinueResponseHeaders()]

    def _on_local_reply(self, event: m.ResponseHeaders, _now: float) -> list[m.Command]:
        self._let_go()
        if self.state is State.HEADERS:
            self._response_body_mode = self._mode_of_response(event.body_mode)
        self.state = State.LOCAL_REPLY
        return [m.ContinueResponseHeaders()]

    def _on_response_body(self, event: m.ResponseBody, _now: float) -> list[m.Command]:
        if self._response_body_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [m.ContinueResponseBody()]
        return [
            m.EchoResponseBody(data, last and event.end_of_stream)
            for data, last in pieces(event.data)
        ]

    def _on_response_trailers(self, _event: m.ResponseTrailers, _now: float) -> list[m.Command]:
        return [m.ContinueResponseTrailers()]

    # --- the end -----------------------------------------------------------------------------

    def _on_ended(self, _event: m.Ended, now: float) -> list[m.Command]:
        self.state = State.DONE
        if self.pick is not None and self._settings.uses_response_phases:
            self._dispatcher.finish(self.pick, self._outcome(), now=now)
        return []

    def _outcome(self) -> Outcome:
        if self._response_status == 0:
            return Outcome.CANCELLED
        return Outcome.FAILED if self._response_status >= 500 else Outcome.COMPLETED

    def _on_overloaded(self, _event: m.Overloaded, _now: float) -> list[m.Command]:
        raise RequestError(rejections.no_memory())

    def _let_go(self) -> None:
        """Nobody needs the body any more; a peer that reads slowly can keep this object alive."""
        if self.state in _HOLDING:
            self._body.clear()

    def _request_over(self) -> list[m.Command]:
        self._body.clear()
        # A full-duplex response's body is in our hands: ending the RPC loses what is under way.
        is_duplex = self._response_body_mode is BodyMode.FULL_DUPLEX_STREAMED
        if self._settings.uses_response_phases or is_duplex:
            self.state = State.RESPONSE
            return []
        self.state = State.DONE
        return [m.End()]

    # --- helpers -----------------------------------------------------------------------------

    def _mode_of_response(self, told: BodyMode | None) -> BodyMode:
        """Where the data plane does not tell its modes: full duplex is assumed both ways."""
        if told is not None:
            return told
        assumed = self._settings.assumed_body_mode
        return assumed if assumed is BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE

    def _session(self) -> str | None:
        name = self._settings.session_header
        return None if name is None else self._headers.headers.get(name) or None

    def _reject(self, rejection: Rejection) -> list[m.Command]:
        self._dispatcher.rejected(rejection, self._headers.headers)
        headers = rejections.dropped(rejection)
        if rejection.retry_after_s is not None:
            headers["retry-after"] = str(rejection.retry_after_s)
        if rejection.allowed_methods:
            headers["allow"] = ", ".join(rejection.allowed_methods)
        return self._reply(rejection.status, error_body(rejection), headers, rejection.reason.value)

    def _reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, details: str = ""
    ) -> list[m.Command]:
        self._let_go()
        self.state = State.DONE
        return [m.Reply(status, body, headers or {}, details), m.End()]


def _digest(session: str | None) -> str | None:
    """As long for any value: what is remembered keeps it, and a client chooses the value."""
    return None if session is None else blake2b(session.encode(), digest_size=16).hexdigest()


def _ignore(_stream: Stream, _event: Any, _now: float) -> list[m.Command]:
    """What was under way when we ended the RPC needs no answer."""
    return []


_Handler = Callable[[Stream, Any, float], list[m.Command]]
_TRANSITIONS: dict[tuple[State, type], _Handler] = {
    (State.HEADERS, m.RequestHeaders): Stream._on_request_headers,
    (State.BODY, m.RequestBody): Stream._on_request_body,
    (State.BODY, m.RequestTrailers): Stream._on_body_trailers,
    (State.READING, m.Wakeup): Stream._read_on,
    (State.READING, m.RequestBody): Stream._on_reading_body,
    (State.READING, m.RequestTrailers): Stream._on_waiting_trailers,
    (State.READING, m.ResponseHeaders): Stream._on_local_reply,
    (State.WAITING, m.Wakeup): Stream._on_wakeup,
    (State.WAITING, m.RequestBody): Stream._on_waiting_body,
    (State.WAITING, m.RequestTrailers): Stream._on_waiting_trailers,
    (State.WAITING, m.ResponseHeaders): Stream._on_local_reply,
    (State.HEADERS, m.ResponseHeaders): Stream._on_local_reply,
    (State.BODY, m.ResponseHeaders): Stream._on_local_reply,
    (State.LOCAL_REPLY, m.ResponseBody): Stream._on_response_body,
    (State.LOCAL_REPLY, m.ResponseTrailers): Stream._on_response_trailers,
    (State.REST, m.Wakeup): Stream._read_rest,
    (State.REST, m.RequestBody): Stream._on_rest_body,
    (State.REST, m.RequestTrailers): Stream._on_rest_trailers,
    # A response may begin while the endpoint still reads the request.
    (State.REST, m.ResponseHeaders): Stream._on_response_headers,
    (State.RESPONSE, m.Wakeup): Stream._read_rest,
    (State.RESPONSE, m.RequestBody): Stream._on_rest_body,
    (State.RESPONSE, m.RequestTrailers): Stream._on_rest_trailers,
    (State.RESPONSE, m.ResponseHeaders): Stream._on_response_headers,
    (State.RESPONSE, m.ResponseBody): Stream._on_response_body,
    (State.RESPONSE, m.ResponseTrailers): Stream._on_response_trailers,
}
_TRANSITIONS |= {(state, m.Ended): Stream._on_ended for state in State}
for _state in State:
    _TRANSITIONS.setdefault((_state, m.Wakeup), _ignore)
    # Elsewhere it holds nothing that an answer would free.
    _TRANSITIONS[_state, m.Overloaded] = Stream._on_overloaded if _state in _HOLDING else _ignore
_TRANSITIONS |= {(State.DONE, event): _ignore for event in m.EVENT_TYPES}
