"""What the data plane tells a stream (events) and what a stream asks it to do (commands).

Events and commands are counterparts: each event of the request or response phase that was
delivered is answered by exactly one command of the same phase, in order. `Reply` answers any of
them and ends the HTTP request; `End` closes the RPC and needs no event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from extproc.core.types import Pick


class BodyMode(Enum):
    """How the data plane sends a body (`ProcessingMode.BodySendMode`, by its numbers)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


# --- events ---------------------------------------------------------------------------------


class RequestHeaders(Struct, frozen=True):
    """The first event of a stream, unless the data plane answers before it asks.

    Attributes:
        headers: Names in lower case, pseudo-headers included.
        end_of_stream: The request has no body and no trailers.
        body_mode: How the body will come; None where the data plane does not say.
        sends_body_early: The body comes without waiting for the answer to these headers.
        response_body_mode: How the response's body will come, if it is sent at all; None where the
            data plane does not say.
        model: The model that the data plane itself read from the body; "" where it looked and
            found none, None where it did not look.
        subset: Addresses the data plane allows, None for all.
    """

    headers: Mapping[str, str]
    end_of_stream: bool = False
    body_mode: BodyMode | None = None
    sends_body_early: bool = False
    response_body_mode: BodyMode | None = BodyMode.NONE
    model: str | None = None
    subset: frozenset[str] | None = None


class RequestBody(Struct, frozen=True):
    """A chunk of the request's body, or all of it, by mode.

    Attributes:
        data: Its bytes; a view of them where that saves a copy.
        end_of_stream: Nothing of the request follows.
        subset: Addresses the data plane allows, in place of those it named before; None where this
            message does not say.
    """

    data: bytes | memoryview
    end_of_stream: bool = False
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The request's trailers; nothing of the request follows."""


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The endpoint's response begins.

    Attributes:
        status: HTTP status, 0 where it cannot be read.
        end_of_stream: The response has no body.
        served_by: The address that served, where the data plane reports it.
        body_mode: How the response's body will come, where this is the stream's first event; None
            where the data plane does not say.
    """

    status: int = 0
    end_of_stream: bool = False
    served_by: str | None = None
    body_mode: BodyMode | None = None


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A chunk of the response's body."""

    data: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The response's trailers; the response is complete."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """The time that `WakeAt` asked for has come. Not from the data plane."""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """There is no memory for what the request holds. Not from the data plane."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The data plane closed or reset the RPC. The last event, whoever ended it."""


Event = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | Wakeup
    | Overloaded
    | Ended
)
EVENT_TYPES: tuple[type, ...] = (
    RequestHeaders,
    RequestBody,
    RequestTrailers,
    ResponseHeaders,
    ResponseBody,
    ResponseTrailers,
    Wakeup,
    Overloaded,
    Ended,
)


# --- commands -------------------------------------------------------------------------------


class ContinueHeaders(Struct, frozen=True):
    """Let the request's headers go on: to the pick's endpoint, or undecided (None).

    Attributes:
        pick: Sets the destination header and metadata.
        ask_for_body: Override the body mode to BUFFERED for this request.
        keeps_response: With `ask_for_body`: the response phases are still wanted.
    """

    pick: Pick | None = None
    ask_for_body: bool = False
    keeps_response: bool = False


class ContinueBody(Struct, frozen=True):
    """Let a body message go on unchanged; with a pick, its destination is set now."""

    pick: Pick | None = None


@dataclass(frozen=True, slots=True)
class EchoBody:
    """Send a chunk of a full-duplex request body on."""

    data: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ContinueTrailers:
    """Let the request's trailers go on."""


@dataclass(frozen=True, slots=True)
class ContinueResponseHeaders:
    """Let the response's headers go on unchanged."""


@dataclass(frozen=True, slots=True)
class ContinueResponseBody:
    """Let a response body message go on unchanged."""


@dataclass(frozen=True, slots=True)
class EchoResponseBody:
    """Send a chunk of a full-duplex response body on."""

    data: bytes
    end_of_stream: bool = False


@dataclass(frozen=True, slots=True)
class ContinueResponseTrailers:
    """Let the response's trailers go on."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the client ourselves; the request goes no further.

    Attributes:
        status: HTTP status.
        body: The whole body.
        headers: Besides `content-type: application/json`, which is always set.
        details: Short slug for the data plane's access log.
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    details: str = ""


@dataclass(frozen=True, slots=True)
class ExtendTimeout:
    """Have the data plane wait longer for the answer to its last message. At most once.

    It answers no event, and it never goes out together with the answer (CVE-2026-47207).
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Wakeup` at this time (monotonic seconds), unless the stream ends first."""

    at_s: float


class End(Struct, frozen=True):
    """Close the RPC with OK: everything needed has been answered."""


Command = (
    ContinueHeaders
    | ContinueBody
    | EchoBody
    | ContinueTrailers
    | ContinueResponseHeaders
    | ContinueResponseBody
    | EchoResponseBody
    | ContinueResponseTrailers
    | Reply
    | ExtendTimeout
    | WakeAt
    | End
)
