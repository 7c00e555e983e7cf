"""One request as far as it has come: what it asks for, and how its parts go on.

What comes of a request, and what each part is answered with, depends on the body mode. A headers
answer is held back where the body comes early (STREAMED with
`send_body_without_waiting_for_header_response`, FULL_DUPLEX_STREAMED) and given at once where the
body waits for it (BUFFERED, BUFFERED_PARTIAL).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from extproc.core import messages as m
from extproc.core import rejections
from extproc.core.body import BodyReader
from extproc.core.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.core.errors import ProtocolError, RequestError
from extproc.core.hints import read_hints
from extproc.core.messages import BodyMode
from extproc.core.openai import check_model
from extproc.core.ports import StreamSettings
from extproc.core.routes import Route, RouteKind, RouteTable, match_untold
from extproc.core.types import Pick, Rejection, RequestInfo

_AT_ONCE = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
_IN_CHUNKS = (BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


def match_route(event: m.RequestHeaders, routes: RouteTable) -> Route | Rejection:
    """Not every data plane tells the request line: without a method, a body makes it POST."""
    headers = event.headers
    method, path = headers.get(":method"), headers.get(":path")
    if method is None:
        method = "GET" if event.end_of_stream else "POST"
    if path is None:
        return match_untold(method, headers.get("content-type", ""))
    return routes.match(method, path)


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What an answer can still need: thousands may be held, and all headers are 1.5 KB each."""
    limits = {":path": MAX_PATH_CHARS, "x-request-id": MAX_REQUEST_ID_CHARS}
    return {name: headers[name][:most] for name, most in limits.items() if name in headers}


class Incoming:
    """A request that is to be routed.

    Raises:
        RequestError: On construction, where its headers alone are wrong.
    """

    __slots__ = (
        *("_arrived_at_s", "_has_body", "_has_trailers", "_hints", "_is_complete", "_mode"),
        *("_reader", "_request_id", "_route", "_session", "_subset"),
    )

    def __init__(
        self, event: m.RequestHeaders, route: Route, settings: StreamSettings, now: float
    ) -> None:
        headers, name = event.headers, settings.session_header
        session = None if name is None else headers.get(name) or None
        self._route, self._subset, self._arrived_at_s = route, event.subset, now
        self._mode = event.body_mode or settings.assumed_body_mode
        self._has_body = not event.end_of_stream and self._mode is not BodyMode.NONE
        self._is_complete = event.end_of_stream
        self._has_trailers = False
        self._reader = BodyReader(
            route,
            headers.get("content-type", ""),
            max_bytes=settings.max_body_bytes,
            allows_stored=session is not None,
            early_bytes=settings.early_decision_bytes,
            is_echoed=self._mode is BodyMode.FULL_DUPLEX_STREAMED,
        )
        _check_length(headers.get("content-length", ""), settings.max_body_bytes)
        self._hints = read_hints(headers)
        if route.kind is RouteKind.STORED_RESPONSE:
            if session is None:
                raise RequestError(rejections.stored_response())
        elif headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise RequestError(rejections.encoded_body())
        elif event.end_of_stream:
            raise RequestError(rejections.empty_body())
        self._request_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        self._session = None if session is None else _digest(session)

    # --- headers -----------------------------------------------------------------------------

    def model_of_headers(self, told: str | None) -> str | None:
        """The model if no body is needed to know it; "" for a stored response, which names none.

        Args:
            told: The model that the data plane has read itself; "" says that it found none.

        Raises:
            RequestError: 400, it is none.
        """
        if self._route.kind is RouteKind.STORED_RESPONSE:
            return None if self._has_body else ""
        if self._mode is not BodyMode.NONE or told is None:
            return None
        if not told:
            raise RequestError(rejections.missing_model())
        return check_model(told)

    def await_body(self, settings: StreamSettings, *, comes_early: bool) -> list[m.Command]:
        """The answer to headers that do not decide.

        Raises:
            RequestError: 500, the body would come too late or never.
        """
        if self._mode is BodyMode.NONE or (self._mode is BodyMode.STREAMED and not comes_early):
            if not settings.allow_mode_override:
                raise RequestError(rejections.body_not_sent())
            self._mode, self._has_body = BodyMode.BUFFERED, True
            keeps_response = settings.uses_response_phases
            return [m.ContinueHeaders(ask_for_body=True, keeps_response=keeps_response)]
        return [m.ContinueHeaders()] if self._mode in _AT_ONCE else []

    # --- body --------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """What is kept of the body."""
        return self._reader.held_bytes

    @property
    def is_read(self) -> bool:
        """All that came has been read."""
        return self._reader.is_read

    @property
    def comes_at_once(self) -> bool:
        """The body comes in one message, and before the trailers."""
        return self._mode in _AT_ONCE

    @property
    def is_over(self) -> bool:
        """What came of the body is all that will."""
        return self._mode in _AT_ONCE or self._is_complete or self._has_trailers

    @property
    def is_streaming(self) -> bool:
        """More of the body comes in chunks, each to be read before it goes on."""
        return self._mode is BodyMode.STREAMED and not self._is_complete

    @property
    def has_timer(self) -> bool:
        """The data plane waits only so long for an answer."""
        return self._mode is not BodyMode.FULL_DUPLEX_STREAMED

    def add(self, part: m.RequestBody | m.RequestTrailers) -> None:
        """Take a part of the body, or the trailers: what came of the body is all of it then.

        Raises:
            RequestError: 413, the body is too large.
        """
        if isinstance(part, m.RequestTrailers):
            self._has_trailers = True
            return
        self._reader.add(part.data)
        self._is_complete = part.end_of_stream
        if part.subset is not None:
            self._subset = part.subset

    def add_late(self, part: m.RequestBody | m.RequestTrailers) -> None:
        """Take what comes while what came before is read, or while the request is held.

        Raises:
            ProtocolError: The request was complete.
            RequestError: As `add`.
        """
        is_possible = self._mode in _IN_CHUNKS or isinstance(part, m.RequestTrailers)
        if self._is_complete or self._has_trailers or not is_possible:
            raise ProtocolError("more of a request that is complete")
        self.add(part)

    def read(self) -> bool:
        """Read what one pass may cost; whether that was all that came.

        Raises:
            RequestError: Whatever is wrong with the body.
        """
        return self._reader.read(is_over=self.is_over)

    def model(self) -> str | None:
        """The model, once all that came is read; None where more has to come.

        Raises:
            RequestError: There is none, or whatever else is wrong with the body.
        """
        reader, mode = self._reader, self._mode
        if mode is BodyMode.BUFFERED_PARTIAL and not self._is_complete:
            return reader.model_of_part()
        if mode is BodyMode.STREAMED:
            model = reader.model() if self.is_over else reader.model_so_far()
            if model is not None:
                reader.settle(model)
            return model
        return reader.model() if self.is_over else None

    def info(self, model: str) -> RequestInfo:
        """What may be known to choose an endpoint."""
        return RequestInfo(
            model=model,
            path=self._route.path[:MAX_PATH_CHARS],
            body_bytes=self._reader.num_bytes,
            request_id=self._request_id,
            session=self._session,
            subset=self._subset,
            arrived_at_s=self._arrived_at_s,
            hints=self._hints,
        )

    # --- answers -----------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Once it is released: whether nothing of it is still to be read or to come."""
        if self._mode is not BodyMode.STREAMED:
            return True
        return self._reader.is_read and (self._is_complete or self._has_trailers)

    def release(self, pick: Pick) -> list[m.Command]:
        """Let what came go on to the pick's endpoint."""
        if not self._has_body:
            return [m.ContinueHeaders(pick), *self._trailers()]
        if self._mode in _AT_ONCE:
            return [m.ContinueBody(pick), *self._trailers()]
        if self._mode is BodyMode.STREAMED:
            return [m.ContinueHeaders(pick), *self.release_read()]
        is_last = not self._has_trailers
        echo = [m.EchoBody(data, last and is_last) for data, last in self._reader.pieces()]
        return [m.ContinueHeaders(pick), *echo, *self._trailers()]

    def release_read(self) -> list[m.Command]:
        """Let the chunks go on that have been read, and the trailers once all have."""
        commands: list[m.Command] = [m.ContinueBody() for _ in range(self._reader.take_done())]
        return [*commands, *self._trailers()] if self.is_answered else commands

    def _trailers(self) -> list[m.Command]:
        return [m.ContinueTrailers()] if self._has_trailers else []

    def clear(self) -> None:
        """Let go of the body: a peer that reads slowly can keep this object alive."""
        self._reader.clear()


def _check_length(content_length: str, limit: int) -> None:
    # The count of digits first: int() refuses thousands of them with a ValueError.
    if content_length.isdecimal() and (len(content_length) > 18 or int(content_length) > limit):
        raise RequestError(rejections.too_large(limit))


def _digest(session: str) -> str:
    """As long for any value: what is remembered keeps it, and a client chooses the value."""
    return blake2b(session.encode(), digest_size=16).hexdigest()
