"""The straight way of the usual request: headers that only name it, and a small JSON body at once.

It needs no `Stream`: its headers are answered before anything is known, its body decides, and the
RPC ends with the answer. Each step returns None for a request that is not usual, which a stream
then takes over from the beginning. A property test holds both ways equal.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import astuple

from extproc import rejections
from extproc.bounds import MAX_PATH_CHARS
from extproc.errors import RequestError
from extproc.openai import check_model
from extproc.paths import ONE_PROMPT_PATHS, Route, RouteKind
from extproc.queue import Ticket
from extproc.request import messages as m
from extproc.request.incoming import has_fitting_length, hashes_of, request_id_of, session_of
from extproc.request.interfaces import StreamParts, StreamSettings
from extproc.request.jsonsmall import (
    NO_STEERING,
    PROMPT,
    SMALL_BYTES,
    STEERING,
    num_sequences,
    read_members,
)
from extproc.request.messages import BodyMode
from extproc.request.passing import body_mode
from extproc.types import Pick, Rejection, RequestInfo

_BUFFERED, _INFERENCE = BodyMode.BUFFERED, RouteKind.INFERENCE_JSON  # a look-up takes 0.1 us
_NAMES = (":method", ":path", "content-type", "content-length", "x-request-id")


class Head(Struct, frozen=True):
    """A usual request before its body.

    Attributes:
        arrived_at_s: Monotonic seconds.
        envoy: The host of the Envoy that has it.
    """

    event: m.RequestHeaders
    route: Route
    arrived_at_s: float
    envoy: str


class Straight:
    """Decides usual requests.

    Args:
        parts: The parts that it calls, as a stream does.
        settings: As for streams; see `is_possible`.
    """

    def __init__(self, parts: StreamParts, settings: StreamSettings) -> None:
        self._parts, self._settings = parts, settings
        self._names = frozenset((*_NAMES, settings.session_header or ""))
        self._max_bytes = min(SMALL_BYTES, settings.max_body_bytes)
        # Any number with so few digits fits.
        self._num_digits = len(str(settings.max_body_bytes)) - 1
        self._without_response = tuple(
            mode for mode in (BodyMode.NONE, None) if body_mode(mode, settings) is BodyMode.NONE
        )

    @staticmethod
    def is_possible(settings: StreamSettings) -> bool:
        """Return whether a request can be usual: read from `model`, and over once it is routed."""
        return not (settings.uses_response_phases or settings.takes_adapter)

    def begin(self, event: m.Event, envoy: str, *, now: float) -> Head | None:
        """Return a stream's first event if it is that of a usual request."""
        if type(event) is not m.RequestHeaders or event.body_mode is not _BUFFERED:
            return None
        headers, settings = event.headers, self._settings
        if (
            event.end_of_stream
            or event.subset is not None
            or event.response_body_mode not in self._without_response
            or not self._names.issuperset(headers)
            or self._parts.rewrites.is_active
        ):
            return None
        if len(headers.get("content-length", "")) > self._num_digits and not has_fitting_length(
            headers, settings.max_body_bytes
        ):
            return None
        # Where either is missing a stream has to assume it.
        route = settings.routes.match(headers.get(":method", ""), headers.get(":path", ""))
        if isinstance(route, Rejection) or route.kind is not _INFERENCE:
            return None
        return Head(event, route, now, envoy)

    def ask(
        self, head: Head, event: m.Event, *, now: float, wake: Callable[[], None]
    ) -> Pick | Rejection | Ticket | None:
        """Have the router choose for a request whose body this is."""
        if type(event) is not m.RequestBody or event.subset is not None:
            return None
        data = event.data
        if len(data) > self._max_bytes:
            return None
        try:
            is_chat = head.route.path in ONE_PROMPT_PATHS
            members = read_members(data, is_chat=is_chat)
            if members is None or members.previous_response_id is not None:
                return None
            model = check_model(members.model)
        except RequestError:
            return None
        parts, headers, path = self._parts, head.event.headers, head.route.path
        found = astuple(members)
        if found[STEERING] != NO_STEERING:
            return None
        is_one = is_chat and members.n is None and members.best_of is None
        hashes: tuple[int, ...] = ()
        if parts.router.uses_cached_bytes:
            hashes = hashes_of(model, found[PROMPT], path, len(data))
        request = RequestInfo(
            model=model,
            path=path[:MAX_PATH_CHARS],
            body_bytes=len(data),
            num_sequences=1 if is_one else num_sequences(members),
            _max_tokens=members.max_completion_tokens
            or members.max_tokens
            or members.max_output_tokens,
            request_id=request_id_of(headers),
            session=session_of(headers, self._settings.session_header),
            arrived_at_s=head.arrived_at_s,
            _prefix_hashes=hashes,
            _fixed=rejections.RENAMED,
            _envoy=head.envoy,
        )
        return parts.ask(request, now=now, wake=wake, num_bytes=0)
