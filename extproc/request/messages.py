"""Events that the data plane sends to a stream, and commands that a stream sends back.

Events and commands are counterparts: each event of the request or response phase that was
delivered is answered by exactly one command of the same phase, in order. `Reply` answers any of
them and ends the HTTP request; `EndStream` closes the RPC and needs no event. A `body_mode` is None
where the data plane does not state it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import get_args

from msgspec import Struct, field

from extproc.types import Pick


class BodyMode(Enum):
    """How the data plane sends a body (`ProcessingMode.BodySendMode`, by its numbers)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


NO_BODY, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = BodyMode
"""Its members: to find one in its class takes CPython 3.11 six times as long."""

IN_CHUNKS = (BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
"""Modes in which a body comes in several messages."""

# --- events ---------------------------------------------------------------------------------


class RequestHeaders(Struct, frozen=True):
    """The first event of a stream, unless the data plane replies to the client before it asks.

    Attributes:
        sends_body_early: The body comes without waiting for the answer to these headers.
        response_body_mode: How the response's body will come, if it is sent at all.
        model: The model that the data plane itself read from the body; "" where it looked and
            found none, None where it did not look.
    """

    headers: Mapping[str, str]  # names in lower case, pseudo-headers included
    end_of_stream: bool = False  # the request has no body and no trailers
    body_mode: BodyMode | None = None
    sends_body_early: bool = False
    response_body_mode: BodyMode | None = BodyMode.NONE
    model: str | None = None
    subset: frozenset[str] | None = None  # addresses the data plane allows, None for all


class BodyChunk(Struct, frozen=True):
    """A chunk of the request's body, or all of it, by mode.

    Attributes:
        subset: Addresses the data plane allows, in place of those it named before; None where this
            message does not say.
    """

    data: bytes | memoryview  # a view where that saves a copy
    end_of_stream: bool = False  # nothing of the request follows
    subset: frozenset[str] | None = None


class RequestTrailers(Struct, frozen=True):
    """The request's trailers; nothing of the request follows."""


class ResponseHeaders(Struct, frozen=True):
    """The endpoint's response begins."""

    status: int = 0  # HTTP status, 0 where it cannot be read
    end_of_stream: bool = False  # the response has no body
    served_by: str | None = None  # the address that served, where the data plane reports it
    body_mode: BodyMode | None = None  # of the response, where this is the stream's first event
    content_type: str = ""
    content_encoding: str = ""


class ResponseBody(Struct, frozen=True):
    """A chunk of the response's body."""

    data: bytes
    end_of_stream: bool = False


class ResponseTrailers(Struct, frozen=True):
    """The response's trailers; the response is complete."""


class Wakeup(Struct, frozen=True):
    """The time that `WakeAt` asked for has come. Not from the data plane."""


class Overloaded(Struct, frozen=True):
    """There is no memory for what the request holds, or its next part is larger than any may be.
    Not from the data plane.
    """

    is_too_large: bool = False


class StreamEnded(Struct, frozen=True):
    """The data plane closed or reset the RPC. The last event, whoever ended it."""


Event = (
    RequestHeaders
    | BodyChunk
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | Wakeup
    | Overloaded
    | StreamEnded
)
EVENT_TYPES: tuple[type, ...] = get_args(Event)


# --- commands -------------------------------------------------------------------------------


class ContinueHeaders(Struct, frozen=True):
    """Let the request's headers go on: to the pick's endpoint, or undecided (None)."""

    pick: Pick | None = None  # sets the destination header and metadata
    content_length: int | None = None  # of a body that we change; None leaves the header alone
    mark: str = ""  # with a pick: of the decision, for further askings; "" for none
    ask_for_body: bool = False  # override the body mode to BUFFERED for this request
    keeps_response: bool = False  # with `ask_for_body`: the response phases are still wanted


class ContinueBody(Struct, frozen=True):
    """Let a body message go on; with a pick, its destination is set now."""

    pick: Pick | None = None
    body: bytes | None = None  # goes on in its place; only with a pick
    content_length: int | None = None  # as in `ContinueHeaders`
    mark: str = ""  # likewise


class EchoBody(Struct, frozen=True):
    """Send a chunk of a full-duplex request body on."""

    data: bytes
    end_of_stream: bool = False


class EchoRest(Struct, frozen=True):
    """Send the rest of a large body on, some chunks at a time, before the commands that follow.

    Attributes:
        chunks: Made one by one.
        num_bytes: Of them all, about.
    """

    chunks: Iterator[EchoBody]
    num_bytes: int


class ContinueTrailers(Struct, frozen=True):
    """Let the request's trailers go on."""


class ContinueResponseHeaders(Struct, frozen=True):
    """Let the response's headers go on."""

    drops_length: bool = False  # without `content-length`: we change the body


class ContinueResponseBody(Struct, frozen=True):
    """Let a response body message go on."""

    body: bytes | None = None  # goes on in its place


class EchoResponseBody(Struct, frozen=True):
    """Send a chunk of a full-duplex response body on."""

    data: bytes
    end_of_stream: bool = False


class ContinueResponseTrailers(Struct, frozen=True):
    """Let the response's trailers go on."""


class Reply(Struct, frozen=True):
    """Respond to the client ourselves; the request goes no further."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # besides `content-type`: always JSON
    details: str = ""  # a short slug for the data plane's access log


class ExtendTimeout(Struct, frozen=True):
    """Have the data plane wait longer for the answer to its last message. At most once.

    It answers no event, and it never goes out together with the answer (CVE-2026-47207).
    """

    seconds: float


class WakeAt(Struct, frozen=True):
    """Send `Wakeup` at this time (monotonic seconds), unless the stream ends first."""

    at_s: float


class EndStream(Struct, frozen=True):
    """Close the RPC with OK: everything needed has been answered."""


END = EndStream()
"""The only one."""


Command = (
    ContinueHeaders
    | ContinueBody
    | EchoBody
    | EchoRest
    | ContinueTrailers
    | ContinueResponseHeaders
    | ContinueResponseBody
    | EchoResponseBody
    | ContinueResponseTrailers
    | Reply
    | ExtendTimeout
    | WakeAt
    | EndStream
)
