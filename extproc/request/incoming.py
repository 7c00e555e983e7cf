"""One request as far as it has come: its model, and the answers to its parts.

Both depend on the body mode. The answer to the headers is held back where the body comes early
(STREAMED with `send_body_without_waiting_for_header_response`, FULL_DUPLEX_STREAMED) and sent at
once where the body waits for it (BUFFERED, BUFFERED_PARTIAL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from msgspec import Raw, Struct
from msgspec.structs import astuple

from extproc import rejections
from extproc.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.errors import ProtocolError, RequestError
from extproc.learned.prefixes import MARKS_BYTES, prefix_hashes
from extproc.openai import Spelling, check_model
from extproc.paths import (
    GENERATING_PATHS,
    ONE_PROMPT_PATHS,
    RESPONSES_PATH,
    Route,
    RouteKind,
    RouteTable,
    match_without_path,
)
from extproc.request import messages as m
from extproc.request.body import MAX_ECHOED, BodyReader
from extproc.request.controlheaders import read_hints
from extproc.request.interfaces import Chooser, StreamSettings
from extproc.request.jsonsmall import (
    NO_STEERING,
    PROMPT,
    SMALL_BYTES,
    STEERING,
    AllMembers,
    Members,
    max_tokens,
    num_sequences,
    read_members,
)
from extproc.request.lostrewrites import AI_GATEWAY_HEADER
from extproc.request.messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX,
    IN_CHUNKS,
    NO_BODY,
    STREAMED,
    BodyMode,
)
from extproc.request.sessions import NO_SESSION, Session
from extproc.routing.rewrites import Rewrites
from extproc.types import NO_HINTS, Hints, Pick, Reason, Rejection, RequestInfo

_GO_ON = m.ContinueHeaders()
_FEW_DIGITS, _FEW_DIGITS_BYTES = 4, 10_000
_JSON, _STORED = RouteKind.INFERENCE_JSON, RouteKind.STORED_RESPONSE
_AT_ONCE = (BUFFERED, BUFFERED_PARTIAL)


def match_route(event: m.RequestHeaders, routes: RouteTable) -> Route | Rejection:
    """Return the route; some data planes omit the request line: a body then means POST.

    A websocket on the path of responses is refused by the status after which coding agents go on
    by POST.
    """
    headers = event.headers
    method, path = headers.get(":method"), headers.get(":path")
    if method is None:
        method = "GET" if event.end_of_stream else "POST"
    if path is None:
        return match_without_path(method, headers.get("content-type", ""))
    if headers.get("upgrade", "").lower() == "websocket":
        wanted = routes.match("POST", path)
        if isinstance(wanted, Route) and wanted.path == RESPONSES_PATH:
            return rejections.NO_WEBSOCKETS
    return routes.match(method, path)


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those that a response may need: thousands of requests may be held, 1.5 KB each."""
    limits = {":path": MAX_PATH_CHARS, "x-request-id": MAX_REQUEST_ID_CHARS, AI_GATEWAY_HEADER: 1}
    return {name: headers[name][:most] for name, most in limits.items() if name in headers}


class Incoming(Struct, eq=False):
    """A request to be routed; made by `begin`.

    Attributes:
        mode: How the body comes.
        has_body: Whether the data plane sends it.
        made_reader: Of the body; None before it is needed.
        concerns: Returns whether a model, "" for none, may be rewritten; None: no model may.
    """

    _headers: Mapping[str, str]
    _route: Route
    _settings: StreamSettings
    _arrived_at_s: float
    _envoy: str
    _subset: frozenset[str] | None
    mode: BodyMode
    has_body: bool
    _is_complete: bool
    _has_length: bool
    _hints: Hints = NO_HINTS
    _session: Session = NO_SESSION
    concerns: Callable[[str], bool] | None = None
    _has_trailers: bool = False
    _fixed: str = "held"
    _named: str = ""
    _written: str = ""
    _drawn: int = 0
    made_reader: BodyReader | None = None
    _members: Members | None = None
    _prompt: tuple[Raw, ...] = ()
    _num_bytes: int = 0

    @property
    def reader(self) -> BodyReader:
        """Reads the body; made when it is needed."""
        if self.made_reader is None:
            settings = self._settings
            self.made_reader = BodyReader(
                self._route,
                self._headers.get("content-type", ""),
                max_bytes=settings.max_body_bytes,
                allows_stored=self._session is not NO_SESSION,
                early_bytes=settings.early_decision_bytes,
                is_echoed=self.mode is FULL_DUPLEX,
                takes_adapter=settings.takes_adapter,
                removes=settings.removed_fields,
                sessions=settings.sessions,
            )
        return self.made_reader

    # --- headers -----------------------------------------------------------------------------

    def model_of_headers(self, stated: str | None) -> str | None:
        """Return the model of a request without a body, if it is known; "" for a stored response.

        `stated` is the model that the data plane has read itself, "" where it found none: raises
        RequestError (400) if it is not a model's name.
        """
        if self._route.kind is _STORED:
            return ""
        if self.mode is not NO_BODY or stated is None:
            return None
        if not stated:
            raise RequestError(rejections.MISSING_MODEL)
        return check_model(stated)

    def await_body(self, settings: StreamSettings, comes_early: bool) -> list[m.Command]:
        """Return the answer to headers that do not decide.

        Raises RequestError (500) if the body would come too late or never.
        """
        mode = self.mode
        answer: list[m.Command] = [_GO_ON] if mode in _AT_ONCE else []
        if mode is NO_BODY or (mode is STREAMED and not comes_early):
            if not settings.allow_mode_override:
                raise RequestError(rejections.BODY_NOT_SENT)
            self.mode, self.has_body = BUFFERED, True
            keeps_response = settings.uses_response_phases
            answer = [m.ContinueHeaders(ask_for_body=True, keeps_response=keeps_response)]
        if self.concerns is not None and self.mode is not STREAMED:
            self.reader.keep(self.concerns)
        return answer

    # --- body --------------------------------------------------------------------------------

    @property
    def comes_at_once(self) -> bool:
        """Whether the body comes in one message, before the trailers."""
        return self.mode in _AT_ONCE

    @property
    def is_over(self) -> bool:
        """Whether no more of the body will come."""
        return self.mode in _AT_ONCE or self._is_complete or self._has_trailers

    @property
    def is_streaming(self) -> bool:
        """Whether more of the body comes in chunks, each to be read before it goes on."""
        return self.mode is STREAMED and not self._is_complete

    @property
    def has_timer(self) -> bool:
        """Whether the data plane limits its wait for an answer."""
        return self.mode is not FULL_DUPLEX

    def model_at_once(self, part: m.BodyChunk) -> str | None:
        """Return the model of a small body of JSON that comes whole and stays as it is; None where
        `add` and `read` have to find it.

        It saves 45 thousand instructions of 765 of a request and its log entry: no reader is made.

        Raises:
            RequestError: As `model`.
        """
        data, settings = part.data, self._settings
        if (
            self.mode is not BUFFERED
            or self.concerns is not None
            or len(data) > SMALL_BYTES
            or len(data) > settings.max_body_bytes
            or self._route.kind is not _JSON
            or settings.takes_adapter
        ):
            return None
        has_one_prompt = self._route.path in ONE_PROMPT_PATHS
        members = read_members(data, has_one_prompt, settings.sessions.decoders)
        if members is None or members.previous_response_id is not None:
            return None
        found = astuple(members)
        if found[STEERING] != NO_STEERING:
            return None
        self._prompt = found[PROMPT]
        self._is_complete = part.end_of_stream
        if part.subset is not None:
            self._subset = part.subset
        self._members, self._num_bytes = members, len(data)
        return check_model(members.model)

    def add(self, part: m.BodyChunk | m.RequestTrailers) -> None:
        """Add a part of the body, or the trailers; raise RequestError (413) if it is too large."""
        if isinstance(part, m.RequestTrailers):
            self._has_trailers = True
            return
        self.reader.add(part.data)
        self._is_complete = part.end_of_stream
        if part.subset is not None:
            self._subset = part.subset

    def add_late(self, part: m.BodyChunk | m.RequestTrailers) -> None:
        """Add a part that comes while earlier ones are read, or while the request is held.

        Raises ProtocolError if the request was complete, and RequestError as `add`.
        """
        is_possible = self.mode in IN_CHUNKS or isinstance(part, m.RequestTrailers)
        if self._is_complete or self._has_trailers or not is_possible:
            raise ProtocolError("more of a request that is complete")
        self.add(part)

    def read(self) -> bool:
        """Read one pass, as `BodyReader.read`; return whether all chunks so far have been read.

        Raises RequestError also for what is to be cut out of a body that cannot be changed.
        """
        is_read = self.reader.read(is_over=self.is_over)
        if self.reader.cut and not self._is_changeable:
            raise RequestError(rejections.steers(self.reader.cut))
        return is_read

    @property
    def _is_changeable(self) -> bool:
        """Whether the body can go on as another one."""
        has_all = self._is_complete or self.mode is not BUFFERED_PARTIAL
        return self.has_body and has_all and self.mode is not STREAMED

    def model(self) -> str | None:
        """Return the model, once all chunks so far are read; None where more have to come.

        "" for a stored response, and for a body without one that may get one: see `rewrite`.
        Raises RequestError for any other without one, or if the body is malformed.
        """
        try:
            return self._model()
        except RequestError as error:
            if self.concerns is not None and error.rejection.reason is Reason.MISSING_MODEL:
                return ""
            raise

    @property
    def is_rewritten(self) -> bool:
        """Whether the body may go on with another model, so that it has to be kept."""
        return not self._fixed

    def rewrite(self, model: str, rewrites: Rewrites) -> str:
        """Return the model to look for, by the name that pods list; the body goes on with what the
        pick's pod is to read. Only where there are `concerns`.

        Args:
            model: Of `model` or `model_of_headers`.
            rewrites: The rules, and how the client and pods write models.

        Raises:
            RequestError: 500 if the body is not ours to change; 400 without any model.
        """
        spelling = rewrites.spelling
        target, self._drawn = rewrites.draw(spelling.listed(model), self._hints.model_rewrite)
        is_same = spelling.full(target) == model
        is_ours = self._is_changeable
        if is_same and not (is_ours and rewrites.is_declared(target)):
            self._fixed = "held" if is_ours else "gateway"
            self.reader.leave()
            return target or check_model(None)
        if not is_ours:
            raise RequestError(rejections.NOT_REWRITABLE)
        self._fixed, self._named = "", model
        self._written = "" if is_same else model
        return target

    def _model(self) -> str | None:
        reader, mode = self.reader, self.mode
        if mode is BUFFERED_PARTIAL and not self._is_complete:
            return reader.model_of_part()
        if mode is STREAMED:
            model = reader.model() if self.is_over else reader.model_so_far()
            if model is not None:
                reader.settle(model)
            return model
        return reader.model() if self.is_over else None

    def info(self, model: str, chooser: Chooser) -> RequestInfo:
        """Return the facts for the choice of an endpoint; takes the prompt from the reader.

        `model` is the pod's, as `rewrite` returns it.
        """
        members, path, headers = self._members, self._route.path, self._headers
        session, sessions = self._session, self._settings.sessions
        if sessions.fields:
            fields = self.reader.fields if members is None else sessions.fields_of(members)
            session = sessions.find(headers, fields)
        prompt: Iterable[Raw]
        if members is None:
            reader = self.reader
            prompt, num_bytes = reader.take_prompt(), reader.num_bytes
            num, most_tokens = reader.num_sequences, reader.max_tokens
        else:
            self._members, num_bytes = None, self._num_bytes
            prompt, self._prompt = self._prompt, ()
            is_one = members.n is members.best_of is None and not isinstance(members, AllMembers)
            num = 1 if is_one else num_sequences(members)
            most_tokens = max_tokens(members)
        hashes: tuple[int, ...] = ()
        if num_bytes >= MARKS_BYTES[0] and path in GENERATING_PATHS and chooser.uses_cached_bytes:
            hashes = prefix_hashes(model, b"".join(prompt))
        # The first ten by their places: by names, all of them take five times as long.
        return RequestInfo(
            model,
            None,
            path[:MAX_PATH_CHARS],
            num_bytes,
            headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS],
            session[0],
            self._subset,
            self._arrived_at_s,
            self._hints,
            hashes,
            num_sequences=num,
            max_tokens=most_tokens,
            is_whole=self._is_complete or self.mode is BUFFERED or self._has_trailers,
            session_source=session[1],
            written=self._written,
            fixed=self._fixed,
            envoy=self._envoy,
            drawn_target=self._drawn,
        )

    def forget(self, headers: Mapping[str, str]) -> None:
        """Keep no more of a held request than these headers, and the body if it may change."""
        self._headers = headers
        if self.made_reader is not None and self.mode in _AT_ONCE and not self.is_rewritten:
            self.made_reader.forget()

    # --- answers -----------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether, once released, all of it has come and been read."""
        return self.mode is not STREAMED or (
            self.reader.is_read and (self._is_complete or self._has_trailers)
        )

    def release(self, pick: Pick, spelling: Spelling, mark: str = "") -> list[m.Command]:
        """Let the parts so far go on to the pick's endpoint, which is to read its model."""
        if not self.has_body:
            return [m.ContinueHeaders(pick, mark=mark), *self._trailers()]
        body = length = None
        if self.made_reader is not None:
            body = self._renamed(spelling.full(pick.request.model)) if self.is_rewritten else None
            if body is None and self.made_reader.cut:
                body = self.made_reader.rewrite(None)
            length = None if body is None or not self._has_length else len(body)
        if self.mode in _AT_ONCE:
            answer: list[m.Command] = [m.ContinueBody(pick, body, length, mark)]
            return answer if not self._has_trailers else [*answer, *self._trailers()]
        if self.mode is STREAMED:
            return [m.ContinueHeaders(pick, mark=mark), *self.release_read()]
        is_last, num_bytes = not self._has_trailers, self.reader.held_bytes
        echo = (m.EchoBody(data, last and is_last) for data, last in self.reader.pieces())
        first = list[m.Command](islice(echo, MAX_ECHOED))
        if len(first) == MAX_ECHOED:
            first.append(m.EchoRest(echo, num_bytes))
        return [m.ContinueHeaders(pick, length, mark), *first, *self._trailers()]

    def _renamed(self, model: str) -> bytes | None:
        """Return the body with the model that the pod reads; None if it may stay as it is."""
        return None if model == self._named else self.reader.rewrite(model)

    def release_read(self) -> list[m.Command]:
        """Let the chunks read so far go on, and the trailers once all are read."""
        commands: list[m.Command] = [m.ContinueBody() for _ in range(self.reader.take_done())]
        return [*commands, *self._trailers()] if self.is_answered else commands

    def _trailers(self) -> list[m.Command]:
        return [m.ContinueTrailers()] if self._has_trailers else []


def begin(
    event: m.RequestHeaders,
    route: Route,
    settings: StreamSettings,
    now: float,
    concerns: Callable[[str], bool] | None,
    envoy: str,
) -> Incoming:
    """Return a request by its headers; raises RequestError if these alone are wrong."""
    headers, is_over = event.headers, event.end_of_stream
    hints, mode = NO_HINTS, event.body_mode or settings.assumed_body_mode
    session = NO_SESSION
    if not settings.noticed_headers.isdisjoint(headers):
        session = settings.sessions.find(headers, {})
        hints = read_hints(headers, settings.trusted_headers, settings.removed_headers)
        concerns = _every if hints.model_rewrite else concerns
    length, limit_bytes = headers.get("content-length"), settings.max_body_bytes
    if length is not None and (len(length) > _FEW_DIGITS or limit_bytes < _FEW_DIGITS_BYTES):
        _check_length(length, limit_bytes)
    has_body = not is_over and mode is not NO_BODY
    incoming = Incoming(
        headers,
        route,
        settings,
        now,
        envoy,
        event.subset,
        mode,
        has_body,
        is_over,
        length is not None,
        hints,
        session,
        concerns,
    )
    if route.kind is _STORED:
        incoming.concerns = None
        if session is NO_SESSION:
            raise RequestError(rejections.STORED_RESPONSE)
    elif "content-encoding" in headers and _is_encoded(headers["content-encoding"]):
        raise RequestError(rejections.ENCODED_BODY)
    elif is_over:
        raise RequestError(rejections.EMPTY_BODY)
    return incoming


def _every(_model: str) -> bool:
    return True


def _is_encoded(coding: str) -> bool:
    return coding != "" and coding.strip().lower() not in ("identity", "")


def _check_length(length: str, limit_bytes: int) -> None:
    # The count of digits first: int() refuses thousands of them with a ValueError.
    if length.isdecimal() and (len(length) > 18 or int(length) > limit_bytes):
        raise RequestError(rejections.too_large(limit_bytes))
