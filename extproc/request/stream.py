"""One HTTP request in ext_proc: events in, commands out.

Rules:
1. `transitions.TABLE` lists the events allowed in each state and the states that follow; any other
   event breaks the protocol. Handlers answer an event and name the turn that the request takes,
   never the next state.
2. A stream makes at most one pick, and `Chooser.route` chooses at most once.
3. Every delivered event is answered once, in order; there are no other answers.
4. `End` comes right after the last needed answer and never before one: to Envoy, an RPC that ends
   with OK and an event unanswered means "carry on without me".
5. A request that another call has decided goes on as it is, at once, and nothing is counted.
6. With the response phases in use, the pick is finished here, once, when the stream ends; without
   them only where the request is rejected after it was routed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from extproc import rejections
from extproc.errors import ProtocolError, RequestError
from extproc.learned.evidence import StreamEnd
from extproc.paths import Route, RouteKind
from extproc.queue import Ticket
from extproc.request import messages as m
from extproc.request import responses
from extproc.request.body import pieces
from extproc.request.controlheaders import read_hints
from extproc.request.incoming import Incoming, begin, kept_headers, match_route
from extproc.request.interfaces import StreamParts, StreamSettings
from extproc.request.lostrewrites import gateway_of
from extproc.request.messages import FULL_DUPLEX, IN_CHUNKS, NO_BODY, STREAMED, BodyMode
from extproc.request.passing import Passing, body_mode, may_restore
from extproc.request.responses import ListRequest
from extproc.request.transitions import HOLDING, TABLE, UNANSWERED, CallState, EventResult
from extproc.types import Outcome, Pick, Rejection, RequestInfo

HOLD_MARGIN_S = 5.0
"""The data plane's timer runs this much longer than a hold, so that the answer is ours."""


_ANSWERED = frozenset(
    (RouteKind.HEALTH, RouteKind.VERSION, RouteKind.LIST_MODELS, RouteKind.GET_MODEL)
)
"""Headers that no endpoint gets."""
_DONE, _OVER = CallState.DONE, EventResult.OVER
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NOT_YET: Any = None  # set before a state that needs it


def _nobody() -> None:
    """Wake nobody."""


_Step = tuple[EventResult | None, list[m.Command]]
"""The turn that an event causes, if any, and its answer."""


class Stream(Struct, eq=False):
    """The state machine of one request. Not reusable.

    Attributes:
        _wake: Has `Wakeup` sent to it soon, but not from within the call.
        _envoy: The host of the Envoy that has the request.
        _headers: Of the request, once they have come, as is what they make.
    """

    _parts: StreamParts
    _settings: StreamSettings
    _wake: Callable[[], None]
    _envoy: str = ""
    state: CallState = CallState.HEADERS
    pick: Pick | None = None
    _response_body_mode: BodyMode = NO_BODY
    _tells_modes: bool = True
    _is_held: bool = False
    _is_echoing: bool = False
    _ticket: Ticket | None = None
    _passing: Passing | None = None
    _list: ListRequest | None = None
    _headers: Mapping[str, str] = _NO_HEADERS
    _incoming: Incoming = _NOT_YET
    _request: RequestInfo = _NOT_YET

    def handle(self, event: m.Event, *, now: float) -> list[m.Command]:
        """Handle one event; return the commands to carry out, in order.

        Raises ProtocolError for an event not allowed here: end the RPC with a non-OK status.
        """
        step = _STEPS[self.state].get(type(event))
        if step is None:
            raise ProtocolError(f"{type(event).__name__} in state {self.state.value}")
        state, handler = step
        if handler is None:
            self.state = state
            return []
        try:
            result, commands = handler(self, event, now)
        except RequestError as error:
            # Routed by a part of the body, and the rest is wrong: the endpoint lacks some of it.
            self._give_up_pick(now)
            result, commands = self._reject(error.rejection, now)
        self.state = state if result is None else TABLE[state][result]
        return commands

    @property
    def is_answered(self) -> bool:
        """Whether the data plane waits for no answer."""
        return self.state not in UNANSWERED

    @property
    def awaits_message(self) -> bool:
        """Whether nothing happens before the next message of the data plane."""
        return self.state in (CallState.HEADERS, CallState.BODY)

    @property
    def is_wanted_half_closed(self) -> bool:
        """Whether the data plane wants an answer even though it has closed its side.

        Envoy closes it when the client has left; a data plane that sends no modes, after its last
        message.
        """
        return not self._tells_modes

    def held_bytes(self) -> int:
        """Return how many bytes are kept of the request's body."""
        reader = self._incoming.made_reader if self.state in HOLDING else None
        return 0 if reader is None else reader.held_bytes

    @property
    def is_whole(self) -> bool:
        """Whether no more of the body will be kept."""
        is_reading = self.state is CallState.READING
        return self.state is CallState.WAITING or (is_reading and self._incoming.is_over)

    def abandon(self, *, now: float) -> None:
        """Finish a request whose answer could not be sent: it will not reach its endpoint."""
        if self._list is not None:
            self._list.leave()
        self._let_go(now)
        self.state = CallState.DONE
        self._give_up_pick(now)

    def retire(self) -> None:
        """Let go of its waker: nothing comes after its end.

        Nothing refers to itself then. So it is freed at once and not by the garbage collector,
        whose pauses grow with the garbage of other streams.
        """
        self._wake = _nobody
        self._list = None

    def _give_up_pick(self, now: float) -> None:
        pick, self.pick = self.pick, None
        if pick is not None:
            self._finish(pick, StreamEnd(Outcome.FAILED), now)

    def _finish(self, pick: Pick, end: StreamEnd, now: float) -> None:
        if self._parts.ends.finish(pick, end, now=now):
            self._parts.observer.ended(pick, end.outcome)

    def _let_go(self, now: float) -> None:
        """Free what is held: a peer that reads slowly can keep this object alive."""
        if self.state in HOLDING and self._incoming.made_reader is not None:
            self._incoming.made_reader.clear()
        self._leave(now)

    def _leave(self, now: float) -> None:
        """Wait for no result any more."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._parts.router.leave(ticket, now=now)
        self._parts.observer.left()

    def _on_request_headers(self, event: m.RequestHeaders, now: float) -> _Step:
        self._headers = event.headers
        mode = event.response_body_mode
        self._response_body_mode = body_mode(None, self._settings) if mode is None else mode
        decided = self._parts.decided
        if decided is not None and decided.knows(event.headers, event.subset):
            return self._on_decided(event)
        headers, routes = event.headers, self._settings.routes
        # A listed path is in normal form, and takes POST: all of `match_route` for the usual one.
        is_post = headers.get(":method") == "POST"
        listed = routes.listed.get(headers.get(":path", "")) if is_post else None
        route = listed or match_route(event, routes)
        if type(route) is Rejection:
            return self._reject(route, now)
        self._tells_modes = event.body_mode is not None
        if route.kind in _ANSWERED:
            return self._answer(route, event, now)
        rewrites = self._parts.rewrites
        concerns = rewrites.concerns if rewrites.is_active else None
        incoming = begin(event, route, self._settings, now, concerns, self._envoy)
        self._incoming = incoming
        if not incoming.has_body:
            model = incoming.model_of_headers(event.model)
            if model is not None:
                return self._decide(model, now)
        answer = incoming.await_body(self._settings, event.sends_body_early)
        if "expect" in event.headers and event.headers["expect"].lower() == "100-continue":
            answer.append(m.WakeAt(now + self._settings.max_continue_wait_s))
        return None, answer

    def _on_decided(self, event: m.RequestHeaders) -> _Step:
        """Let the headers of a request go on that another call about it has decided."""
        mode = event.body_mode or self._settings.assumed_body_mode
        self._is_echoing = mode is FULL_DUPLEX
        has_more = mode in IN_CHUNKS and not event.end_of_stream
        return self._go_on(m.ContinueHeaders(), has_more=has_more, result=EventResult.KNOWN)

    def _on_decided_body(self, event: m.BodyChunk, _now: float) -> _Step:
        if not self._is_echoing:
            return self._go_on(m.ContinueBody(), has_more=not event.end_of_stream)
        echo = [m.EchoBody(part, last and event.end_of_stream) for part, last in pieces(event.data)]
        return self._go_on(*echo, has_more=not event.end_of_stream)

    def _on_decided_trailers(self, _event: m.RequestTrailers, _now: float) -> _Step:
        return self._go_on(m.ContinueTrailers(), has_more=False)

    def _on_decided_response(self, _event: m.ResponseHeaders, _now: float) -> _Step:
        return None, [m.ContinueResponseHeaders()]

    def _go_on(
        self, *commands: m.Command, has_more: bool, result: EventResult | None = None
    ) -> _Step:
        """Answer a part of a decided request; the RPC ends once it has nothing more to carry."""
        if has_more or self._response_body_mode is FULL_DUPLEX:
            return result, [*commands]
        return EventResult.OVER, [*commands, m.END]

    def _answer(self, route: Route, event: m.RequestHeaders, now: float) -> _Step:
        if route.kind in (RouteKind.LIST_MODELS, RouteKind.GET_MODEL):
            return self._on_models(route, event, now)
        return self._reply(self._about_us(route, event.subset, now), now)

    def _about_us(self, route: Route, subset: frozenset[str] | None, now: float) -> m.Reply:
        if route.kind is RouteKind.VERSION:
            return responses.version(self._settings.version)
        return responses.health(self._parts.models.outage(subset, now=now))

    def _on_models(self, route: Route, event: m.RequestHeaders, now: float) -> _Step:
        tenant = read_hints(event.headers, self._settings.trusted_headers).fairness_id
        models, subset = self._parts.models, event.subset
        if route.kind is RouteKind.GET_MODEL:
            name = route.resource
            answer = responses.model(name, subset, models, tenant=tenant, now=now)
            if isinstance(answer, Rejection):
                return self._reject(answer, now)
            return self._reply(answer, now)
        self._headers = kept_headers(event.headers)
        lists, clock = self._parts.lists, self._parts.clock
        self._list = ListRequest(models, lists, subset, tenant, self._wake, clock, now=now)
        result, commands = self._on_list_due(event, now)
        return EventResult.LINED_UP if result is None else result, commands

    def _on_list_due(self, _event: m.Event, now: float) -> _Step:
        """Answer a request for a list when its turn has come."""
        asked = self._list
        assert asked is not None
        answer = asked.answer(now=now)
        if isinstance(answer, m.WakeAt):
            return None, [answer]
        if isinstance(answer, Rejection):
            asked.leave()
            return self._reject(answer, now)
        return EventResult.LISTED, [answer, m.END]

    def _on_part_in_line(self, _event: m.Event, _now: float) -> _Step:
        """Ignore what follows the headers: a list is asked for by these alone."""
        return None, []

    def _on_list_left(self, event: m.Event, now: float) -> _Step:
        assert self._list is not None
        self._list.leave()
        return (
            self._on_local_reply(event, now) if isinstance(event, m.ResponseHeaders) else (None, [])
        )

    def _on_no_body(self, _event: m.Wakeup, _now: float) -> _Step:
        """Refuse a client that still waits for a 100, which nobody is going to send."""
        if not self._incoming.reader.num_bytes:
            raise RequestError(rejections.EXPECTATION_FAILED)
        return None, []

    def _on_body(self, event: m.BodyChunk, now: float) -> _Step:
        model = self._incoming.model_at_once(event)
        if model is not None:
            return self._decide(model, now)
        self._incoming.add(event)
        return self._read_on(event, now)

    def _on_trailers(self, event: m.RequestTrailers, now: float) -> _Step:
        self._incoming.add(event)
        if self._incoming.comes_at_once:  # and before the trailers: there is none
            raise RequestError(rejections.EMPTY_BODY)
        return self._read_on(event, now)

    def _read_on(self, _event: m.Event, now: float) -> _Step:
        """Read one pass; decide once all chunks so far are read, and let other streams run in
        between.
        """
        if not self._incoming.read():
            return EventResult.UNREAD, [m.WakeAt(now)]
        model = self._incoming.model()
        return (None, []) if model is None else self._decide(model, now)

    def _on_late_part(self, event: m.BodyChunk | m.RequestTrailers, _now: float) -> _Step:
        """Add more of an undecided request: it is answered with the parts before."""
        self._incoming.add_late(event)
        return None, []

    def _on_held_body(self, event: m.BodyChunk, _now: float) -> _Step:
        """Read more of a streamed body whose beginning named the model; it is answered later."""
        self._incoming.add_late(event)
        self._incoming.read()
        return None, []

    def _decide(self, model: str, now: float) -> _Step:
        incoming, parts = self._incoming, self._parts
        if incoming.concerns is not None:
            model = incoming.rewrite(model, parts.rewrites)
        router, observer, clock = parts.router, parts.observer, parts.clock
        request = self._request = incoming.info(model, router)
        observer.asked(now)
        began_s = clock()
        num_bytes = 0 if incoming.made_reader is None else incoming.made_reader.held_bytes
        result = router.route(request, now=now, wake=self._wake, num_bytes=num_bytes)
        observer.decided(result, clock() - began_s, now=now)
        return self._follow(result, now)

    def _ask_again(self, now: float) -> _Step:
        """Ask for the result of a held request."""
        parts, ticket = self._parts, self._ticket
        assert ticket is not None
        result = parts.router.resume(ticket, now=now)
        if type(result) is not Ticket:
            self._ticket = None
            parts.observer.decided(result, None, now=now)
        return self._follow(result, now)

    def _follow(self, result: Pick | Rejection | Ticket, now: float) -> _Step:
        parts = self._parts
        if type(result) is Pick:
            self.pick = result
            mark = "" if parts.decided is None else parts.decided.of(result)
            return self._routed_on(self._incoming.release(result, parts.rewrites.spelling, mark))
        if type(result) is Rejection:
            parts.rewrites.refused(self._request.drawn_target)
            raise RequestError(result)
        assert type(result) is Ticket
        self._ticket = result
        return EventResult.HELD, self._hold(result, now)

    def _hold(self, ticket: Ticket, now: float) -> list[m.Command]:
        wake = m.WakeAt(ticket.give_up_s)
        if self._is_held:
            return [wake]
        self._is_held = True
        self._headers = kept_headers(self._headers)
        self._request = ticket.request  # one copy of it is enough
        self._incoming.forget(self._headers)
        if not self._incoming.has_timer:
            return [wake]
        give_up_s = self._request.arrived_at_s + self._settings.max_hold_s
        return [m.ExtendTimeout(give_up_s - now + HOLD_MARGIN_S), wake]

    def _on_wakeup(self, _event: m.Wakeup, now: float) -> _Step:
        return self._ask_again(now) if self._incoming.read() else (None, [m.WakeAt(now)])

    def _routed_on(self, commands: list[m.Command]) -> _Step:
        """Return the turn of a routed request whose parts so far are on their way."""
        incoming = self._incoming
        if incoming.mode is STREAMED and not incoming.is_answered:
            return EventResult.ROUTED, commands
        if incoming.made_reader is not None:
            incoming.made_reader.clear()
        # A full-duplex response's body passes through us: ending the RPC would lose parts of it.
        mode, settings = self._response_body_mode, self._settings
        is_ours = mode is FULL_DUPLEX or settings.uses_response_phases
        if mode is not NO_BODY and not is_ours:
            request = self._request if self.pick is None else self.pick.request
            is_ours = may_restore(request, mode, settings)
        if is_ours:
            return EventResult.ANSWERED, commands
        commands.append(m.END)
        return _OVER, commands

    def _on_rest_body(self, event: m.BodyChunk, now: float) -> _Step:
        """Read more of a body whose beginning has decided: no part goes on unread."""
        incoming = self._incoming
        if not incoming.is_streaming:
            return None, [m.ContinueBody()]
        is_reading = not incoming.reader.is_read
        incoming.add(event)
        return (None, []) if is_reading else self._read_rest(event, now)

    def _read_rest(self, _event: m.Event, now: float) -> _Step:
        incoming = self._incoming
        if incoming.reader.is_read:
            return None, []  # an old timer
        is_read = incoming.read()
        result, commands = self._routed_on(incoming.release_read())
        return result, commands if is_read else [*commands, m.WakeAt(now)]

    def _on_rest_trailers(self, event: m.RequestTrailers, _now: float) -> _Step:
        incoming = self._incoming
        incoming.add(event)
        return self._routed_on(incoming.release_read()) if incoming.reader.is_read else (None, [])

    def _on_response_headers(self, event: m.ResponseHeaders, now: float) -> _Step:
        pick = self.pick
        assert pick is not None  # in each state that comes here
        if event.served_by:
            self._parts.ends.served(pick, event.served_by, now=now)
        passing = self._response()
        commands = passing.begin(event, pick, self._settings)
        if self._response_body_mode is NO_BODY or event.end_of_stream:
            self._check_rewrite(passing, None, now)
        return None, commands

    def _on_local_reply(self, event: m.ResponseHeaders, now: float) -> _Step:
        self._let_go(now)
        if self.state is CallState.HEADERS:
            self._response_body_mode = body_mode(event.body_mode, self._settings)
        return None, [m.ContinueResponseHeaders()]

    def _on_response_body(self, event: m.ResponseBody, now: float) -> _Step:
        passing = self._response()
        commands = passing.body(event)
        self._check_rewrite(passing, event.data, now)
        return None, commands

    def _on_response_trailers(self, _event: m.ResponseTrailers, _now: float) -> _Step:
        return None, self._response().trailers()

    def _response(self) -> Passing:
        if self._passing is None:
            self._passing = Passing(self._response_body_mode)
        return self._passing

    def _check_rewrite(self, passing: Passing, data: bytes | None, now: float) -> None:
        """Say so if the pod has read what the client wrote instead of our rewrite."""
        request = passing.take_undone(data)
        if request is not None:
            gateway, written = gateway_of(self._headers), request.written
            self._parts.lost_rewrites.note(gateway, written, request.model, now=now)

    def _on_ended(self, _event: m.StreamEnded, now: float) -> _Step:
        self._leave(now)
        if self.pick is not None and self._settings.uses_response_phases:
            self._finish(self.pick, self._response().end(), now)
        return None, []

    def _on_overloaded(self, event: m.Overloaded, _now: float) -> _Step:
        if event.is_too_large:
            raise RequestError(rejections.too_large(self._settings.max_body_bytes))
        raise RequestError(rejections.NO_MEMORY)

    def _reject(self, rejection: Rejection, now: float) -> _Step:
        self._parts.observer.rejected(rejection, self._headers)
        return self._reply(responses.refusal(rejection), now)

    def _reply(self, reply: m.Reply, now: float) -> _Step:
        self._let_go(now)
        return EventResult.OVER, [reply, m.END]


_Handler = Callable[[Stream, Any, float], _Step]
_HANDLERS: dict[tuple[CallState, type], _Handler] = {
    (CallState.HEADERS, m.RequestHeaders): Stream._on_request_headers,
    (CallState.HEADERS, m.ResponseHeaders): Stream._on_local_reply,
    (CallState.BODY, m.Wakeup): Stream._on_no_body,
    (CallState.BODY, m.BodyChunk): Stream._on_body,
    (CallState.BODY, m.RequestTrailers): Stream._on_trailers,
    (CallState.BODY, m.ResponseHeaders): Stream._on_local_reply,
    (CallState.READING, m.Wakeup): Stream._read_on,
    (CallState.READING, m.BodyChunk): Stream._on_late_part,
    (CallState.READING, m.RequestTrailers): Stream._on_late_part,
    (CallState.READING, m.ResponseHeaders): Stream._on_local_reply,
    (CallState.WAITING, m.Wakeup): Stream._on_wakeup,
    (CallState.WAITING, m.BodyChunk): Stream._on_held_body,
    (CallState.WAITING, m.RequestTrailers): Stream._on_late_part,
    (CallState.WAITING, m.ResponseHeaders): Stream._on_local_reply,
    (CallState.REST, m.ResponseHeaders): Stream._on_response_headers,
    (CallState.RESPONSE, m.ResponseHeaders): Stream._on_response_headers,
}
for _state in (CallState.REST, CallState.RESPONSE):
    _HANDLERS[_state, m.Wakeup] = Stream._read_rest
    _HANDLERS[_state, m.BodyChunk] = Stream._on_rest_body
    _HANDLERS[_state, m.RequestTrailers] = Stream._on_rest_trailers
_HANDLERS[CallState.DECIDED, m.BodyChunk] = Stream._on_decided_body
_HANDLERS[CallState.DECIDED, m.RequestTrailers] = Stream._on_decided_trailers
_HANDLERS[CallState.DECIDED, m.ResponseHeaders] = Stream._on_decided_response
for _state in (CallState.RESPONSE, CallState.LOCAL_REPLY, CallState.DECIDED):
    _HANDLERS[_state, m.ResponseBody] = Stream._on_response_body
    _HANDLERS[_state, m.ResponseTrailers] = Stream._on_response_trailers
_HANDLERS |= {
    (state, m.StreamEnded): Stream._on_ended for state in CallState if state is not CallState.DONE
}
_HANDLERS[CallState.IN_LINE, m.Wakeup] = Stream._on_list_due
_HANDLERS[CallState.IN_LINE, m.BodyChunk] = Stream._on_part_in_line
_HANDLERS[CallState.IN_LINE, m.RequestTrailers] = Stream._on_part_in_line
_HANDLERS[CallState.IN_LINE, m.ResponseHeaders] = Stream._on_list_left
_HANDLERS[CallState.IN_LINE, m.StreamEnded] = _HANDLERS[CallState.LISTED, m.StreamEnded] = (
    Stream._on_list_left
)
# Elsewhere it holds nothing that an answer would free.
_HANDLERS |= {(state, m.Overloaded): Stream._on_overloaded for state in HOLDING}
_STEPS = {
    state: {
        kind: (TABLE[state][kind], _HANDLERS.get((state, kind)))
        for kind in m.EVENT_TYPES
        if kind in TABLE[state]
    }
    for state in CallState
}
"""The state and the handler of each event that is allowed."""
