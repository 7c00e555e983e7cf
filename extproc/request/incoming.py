"""One request as far as it has come: its model, and the answers to its parts.

Both depend on the body mode. The answer to the headers is held back where the body comes early
(STREAMED with `send_body_without_waiting_for_header_response`, FULL_DUPLEX_STREAMED) and sent at
once where the body waits for it (BUFFERED, BUFFERED_PARTIAL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import islice

from msgspec import Raw

from extproc import rejections
from extproc.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.errors import ProtocolError, RequestError
from extproc.fleet.prefixes import MARKS_BYTES, prefix_hashes
from extproc.openai import Spelling, check_model
from extproc.paths import GENERATING_PATHS, Route, RouteKind, RouteTable, match_without_path
from extproc.request import messages as m
from extproc.request.body import MAX_ECHOED, BodyReader
from extproc.request.controlheaders import read_hints
from extproc.request.interfaces import StreamSettings
from extproc.request.lostrewrites import AI_GATEWAY_HEADER
from extproc.request.messages import IN_CHUNKS, BodyMode
from extproc.routing.rewrites import Rewrites
from extproc.types import Pick, Reason, Rejection, RequestInfo

_GO_ON = m.ContinueHeaders()
_AT_ONCE = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)


def match_route(event: m.RequestHeaders, routes: RouteTable) -> Route | Rejection:
    """Return the route; some data planes omit the request line: a body then means POST."""
    headers = event.headers
    method, path = headers.get(":method"), headers.get(":path")
    if method is None:
        method = "GET" if event.end_of_stream else "POST"
    if path is None:
        return match_without_path(method, headers.get("content-type", ""))
    return routes.match(method, path)


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those that a response may need: thousands of requests may be held, 1.5 KB each."""
    limits = {":path": MAX_PATH_CHARS, "x-request-id": MAX_REQUEST_ID_CHARS, AI_GATEWAY_HEADER: 1}
    return {name: headers[name][:most] for name, most in limits.items() if name in headers}


class Incoming:
    """A request to be routed; raises RequestError if its headers alone are wrong.

    Args:
        concerns: Returns whether a model, "" for none, may be rewritten; None: no model may.
    """

    __slots__ = (
        *("_arrived_at_s", "_envoy", "_has_body", "_has_length", "_has_trailers", "_hints"),
        *("_concerns", "_fixed", "_is_complete", "_mode", "_named", "_written"),
        *("_request_id", "_route", "_session", "_subset", "reader"),
    )

    def __init__(
        self,
        event: m.RequestHeaders,
        route: Route,
        settings: StreamSettings,
        now: float,
        *,
        concerns: Callable[[str], bool] | None = None,
        envoy: str = "",
    ) -> None:
        headers, name = event.headers, settings.session_header
        session = None if name is None else headers.get(name) or None
        self._route, self._subset, self._arrived_at_s = route, event.subset, now
        self._envoy = envoy
        self._mode = event.body_mode or settings.assumed_body_mode
        self._has_body = not event.end_of_stream and self._mode is not BodyMode.NONE
        self._is_complete = event.end_of_stream
        self._has_trailers = False
        self._hints = read_hints(headers, settings.trusted_headers, settings.removed_headers)
        self._concerns = _every if self._hints._model_rewrite else concerns
        if route.kind is RouteKind.STORED_RESPONSE:
            self._concerns = None
        self._fixed: Rejection | None = rejections.RENAMED
        self._named = ""
        self._written = ""
        self._has_length = "content-length" in headers
        self.reader = BodyReader(
            route,
            headers.get("content-type", ""),
            max_bytes=settings.max_body_bytes,
            allows_stored=session is not None,
            early_bytes=settings.early_decision_bytes,
            is_echoed=self._mode is BodyMode.FULL_DUPLEX_STREAMED,
            takes_adapter=settings.takes_adapter,
            removes=settings.removed_fields,
        )
        if not has_fitting_length(headers, settings.max_body_bytes):
            raise RequestError(rejections.too_large(settings.max_body_bytes))
        if route.kind is RouteKind.STORED_RESPONSE:
            if session is None:
                raise RequestError(rejections.STORED_RESPONSE)
        elif _is_encoded(headers.get("content-encoding", "")):
            raise RequestError(rejections.ENCODED_BODY)
        elif event.end_of_stream:
            raise RequestError(rejections.EMPTY_BODY)
        self._request_id = request_id_of(headers)
        self._session = session_of(headers, name)

    # --- headers -----------------------------------------------------------------------------

    def model_of_headers(self, stated: str | None) -> str | None:
        """Return the model if it is known without the body; "" for a stored response.

        `stated` is the model that the data plane has read itself, "" where it found none: raises
        RequestError (400) if it is not a model's name.
        """
        if self._route.kind is RouteKind.STORED_RESPONSE:
            return None if self._has_body else ""
        if self._mode is not BodyMode.NONE or stated is None:
            return None
        if not stated:
            raise RequestError(rejections.MISSING_MODEL)
        return check_model(stated)

    def await_body(self, settings: StreamSettings, *, comes_early: bool) -> list[m.Command]:
        """Return the answer to headers that do not decide.

        Raises RequestError (500) if the body would come too late or never.
        """
        if self._mode is BodyMode.NONE or (self._mode is BodyMode.STREAMED and not comes_early):
            if not settings.allow_mode_override:
                raise RequestError(rejections.BODY_NOT_SENT)
            self._mode, self._has_body = BodyMode.BUFFERED, True
            keeps_response = settings.uses_response_phases
            answer: list[m.Command] = [
                m.ContinueHeaders(ask_for_body=True, keeps_response=keeps_response)
            ]
        else:
            answer = [_GO_ON] if self._mode in _AT_ONCE else []
        if self._concerns is not None and self._mode is not BodyMode.STREAMED:
            self.reader.keep(self._concerns)
        return answer

    # --- body --------------------------------------------------------------------------------

    @property
    def comes_at_once(self) -> bool:
        """Whether the body comes in one message, before the trailers."""
        return self._mode in _AT_ONCE

    @property
    def is_over(self) -> bool:
        """Whether no more of the body will come."""
        return self._mode in _AT_ONCE or self._is_complete or self._has_trailers

    @property
    def is_streaming(self) -> bool:
        """Whether more of the body comes in chunks, each to be read before it goes on."""
        return self._mode is BodyMode.STREAMED and not self._is_complete

    @property
    def has_timer(self) -> bool:
        """Whether the data plane limits its wait for an answer."""
        return self._mode is not BodyMode.FULL_DUPLEX_STREAMED

    def add(self, part: m.RequestBody | m.RequestTrailers) -> None:
        """Add a part of the body, or the trailers; raise RequestError (413) if it is too large."""
        if isinstance(part, m.RequestTrailers):
            self._has_trailers = True
            return
        self.reader.add(part.data)
        self.note(part)

    def note(self, part: m.RequestBody) -> None:
        """Note what a part says beside its data."""
        self._is_complete = part.end_of_stream
        if part.subset is not None:
            self._subset = part.subset

    def add_late(self, part: m.RequestBody | m.RequestTrailers) -> None:
        """Add a part that comes while earlier ones are read, or while the request is held.

        Raises ProtocolError if the request was complete, and RequestError as `add`.
        """
        is_possible = self._mode in IN_CHUNKS or isinstance(part, m.RequestTrailers)
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
        has_all = self._is_complete or self._mode is not BodyMode.BUFFERED_PARTIAL
        return self._has_body and has_all and self._mode is not BodyMode.STREAMED

    def model(self) -> str | None:
        """Return the model, once all chunks so far are read; None where more have to come.

        "" for a stored response, and for a body without one that may get one: see `rewrite`.
        Raises RequestError for any other without one, or if the body is malformed.
        """
        try:
            return self._model()
        except RequestError as error:
            if self._concerns is not None and error.rejection.reason is Reason.MISSING_MODEL:
                return ""
            raise

    @property
    def is_rewritten(self) -> bool:
        """Whether the body may go on with another model, so that it has to be kept."""
        return self._fixed is None

    def rewrite(self, model: str, rewrites: Rewrites) -> str:
        """Return the model to look for, by the name that pods list; the body goes on with what the
        pick's pod is to read.

        Args:
            model: Of `model` or `model_of_headers`.
            rewrites: The rules, and how the client and pods write models.

        Raises:
            RequestError: 500 if the body is not ours to change; 400 without any model.
        """
        if self._concerns is None:
            return model
        spelling = rewrites.spelling
        target = rewrites.target(spelling.listed(model), self._hints._model_rewrite)
        is_same = spelling.full(target) == model
        is_ours = self._is_changeable
        if is_same and not (is_ours and rewrites.is_declared(target)):
            self._fixed = rejections.RENAMED if is_ours else rejections.NOT_REWRITABLE
            self.reader.leave()
            return target or check_model(None)
        if not is_ours:
            raise RequestError(rejections.NOT_REWRITABLE)
        self._fixed, self._named = None, model
        self._written = "" if is_same else model
        return target

    def _model(self) -> str | None:
        reader, mode = self.reader, self._mode
        if mode is BodyMode.BUFFERED_PARTIAL and not self._is_complete:
            return reader.model_of_part()
        if mode is BodyMode.STREAMED:
            model = reader.model() if self.is_over else reader.model_so_far()
            if model is not None:
                reader.settle(model)
            return model
        return reader.model() if self.is_over else None

    def info(self, model: str, *, with_hashes: bool = False) -> RequestInfo:
        """Return the facts for the choice of an endpoint; takes the prompt from the reader.

        `model` is the pod's, as `rewrite` returns it.
        """
        prompt, path = self.reader.take_prompt(), self._route.path
        num_bytes = self.reader.num_bytes
        hashes = hashes_of(model, prompt, path, num_bytes) if with_hashes else ()
        return RequestInfo(
            model=model,
            path=path[:MAX_PATH_CHARS],
            body_bytes=num_bytes,
            num_sequences=self.reader.num_sequences,
            _max_tokens=self.reader.max_tokens,
            _is_whole=self._mode is BodyMode.BUFFERED or self._is_complete or self._has_trailers,
            request_id=self._request_id,
            session=self._session,
            subset=self._subset,
            arrived_at_s=self._arrived_at_s,
            hints=self._hints,
            _prefix_hashes=hashes,
            _written=self._written,
            _fixed=self._fixed,
            _envoy=self._envoy,
        )

    # --- answers -----------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether, once released, all of it has come and been read."""
        if self._mode is not BodyMode.STREAMED:
            return True
        return self.reader.is_read and (self._is_complete or self._has_trailers)

    def release(self, pick: Pick, spelling: Spelling, mark: str = "") -> list[m.Command]:
        """Let the parts so far go on to the pick's endpoint, which is to read its model."""
        if not self._has_body:
            return [m.ContinueHeaders(pick, mark=mark), *self._trailers()]
        body = self._renamed(spelling.full(pick.request.model)) if self.is_rewritten else None
        if body is None and self.reader.cut:
            body = self.reader.rewrite(None)
        length = None if body is None or not self._has_length else len(body)
        if self._mode in _AT_ONCE:
            return [m.ContinueBody(pick, body, length, mark), *self._trailers()]
        if self._mode is BodyMode.STREAMED:
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


def _every(_model: str) -> bool:
    return True


def _is_encoded(coding: str) -> bool:
    return coding != "" and coding.strip().lower() not in ("identity", "")


def has_fitting_length(headers: Mapping[str, str], limit_bytes: int) -> bool:
    """Return whether the announced body is not too long, if one is."""
    length = headers.get("content-length", "")
    # The count of digits first: int() refuses thousands of them with a ValueError.
    return not length.isdecimal() or (len(length) <= 18 and int(length) <= limit_bytes)


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the request's id as it is kept."""
    return headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]


def session_of(headers: Mapping[str, str], name: str | None) -> str | None:
    """Return a digest of what keeps a client on one endpoint, the header `name`.

    It has a fixed length: sessions are remembered, and clients choose their values.
    """
    session = None if name is None else headers.get(name)
    return blake2b(session.encode(), digest_size=16).hexdigest() if session else None


def hashes_of(model: str, prompt: Iterable[Raw], path: str, num_bytes: int) -> tuple[int, ...]:
    """Return `RequestInfo._prefix_hashes` of a body of so many bytes with these parts."""
    if num_bytes < MARKS_BYTES[0] or path not in GENERATING_PATHS:
        return ()
    return prefix_hashes(model, b"".join(prompt))
