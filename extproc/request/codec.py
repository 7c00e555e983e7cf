"""Between Envoy's ext_proc messages and the core's events and commands, without any decision.

Header values are read from `raw_value`, or from `value` if that is empty: Envoy fills `raw_value`,
other data planes `value`, or either. Most send names in lower case, some as Go writes them. A
header that comes several times, in whatever spelling, has all its values, joined with commas
(RFC 9110, 5.3). How responses are written is in `encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.errors import ProtocolError
from extproc.protocol import (
    DESTINATION_NAMESPACE,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from extproc.request import messages as m
from extproc.request.controlheaders import CONTROL_HEADERS
from extproc.request.encoding import Encoder
from extproc.request.messages import BodyMode

NEEDED_HEADERS = CONTROL_HEADERS | {
    *(":method", ":path", "x-request-id"),
    *("content-type", "content-length", "content-encoding"),
}
"""Request headers that are read. No others are decoded, credentials among them."""
_RESPONSE_HEADERS = frozenset((":status", "content-type", "content-encoding"))
CUT_FROM_BYTES = 256 * 1024
"""Longer messages are read in place: each copy of a megabyte takes milliseconds."""
_MODES = {mode.value: mode for mode in BodyMode}


class Codec(Encoder):
    """Decodes messages to events, and encodes commands.

    Args:
        model_namespace: Metadata namespace in which Envoy's `json_to_metadata` stores the model.
        session_header: Header that keeps a client on one endpoint; "" for none.
        asks_for_load: Also set the request header that asks the pod for an ORCA load report.
        honours_subset: Read the data plane's subset hint; else every request has the whole pool.
        tells_scores: Also set the destinations' scores in the metadata.
    """

    def __init__(
        self,
        *,
        model_namespace: str = "extproc.request",
        model_key: str = "model",
        session_header: str = "",
        asks_for_load: bool = False,
        honours_subset: bool = True,
        tells_scores: bool = False,
    ) -> None:
        self._model_namespace = model_namespace
        self._honours_subset = honours_subset
        self._headers = NEEDED_HEADERS | {session_header}
        self._model_key = model_key
        self._readers: dict[str | None, Callable[[pb.ProcessingRequest], m.Event]] = {
            "request_headers": self._request_headers,
            "request_body": self._request_body,
            "request_trailers": lambda _: m.RequestTrailers(),
            "response_headers": _response_headers,
            "response_body": _response_body,
            "response_trailers": lambda _: m.ResponseTrailers(),
        }
        super().__init__(asks_for_load=asks_for_load, tells_scores=tells_scores)

    def decode(self, message: bytes) -> m.Event:
        """Decode one message of the data plane.

        Raises:
            ProtocolError: Not a ProcessingRequest, or one without a phase.
        """
        cut = cut_body(message) if len(message) > CUT_FROM_BYTES else None
        try:
            request = pb.ProcessingRequest.FromString(message if cut is None else cut.rest)
        except Exception as error:  # upb's DecodeError; garbage must not count as a bug of ours
            raise ProtocolError("not a ProcessingRequest") from error
        if cut is not None:
            return m.RequestBody(cut.body, cut.end_of_stream, self._subset(request))
        read = self._readers.get(request.WhichOneof("request"))
        if read is None:
            raise ProtocolError("a ProcessingRequest without a phase")
        return read(request)

    def _request_body(self, request: pb.ProcessingRequest) -> m.RequestBody:
        body = request.request_body
        return m.RequestBody(body.body, body.end_of_stream, self._subset(request))

    def _request_headers(self, request: pb.ProcessingRequest) -> m.RequestHeaders:
        http = request.request_headers
        mode, early = None, False
        if request.HasField("protocol_config"):
            config = request.protocol_config
            mode = _MODES.get(config.request_body_mode)
            early = config.send_body_without_waiting_for_header_response
        model = subset = None
        if request.HasField("metadata_context"):
            model = self._model(request.metadata_context.filter_metadata)
            subset = self._subset(request)
        return m.RequestHeaders(
            _headers(http.headers.headers, self._headers),
            http.end_of_stream,
            mode,
            early,
            _response_body_mode(request),
            model,
            subset,
        )

    def _subset(self, request: pb.ProcessingRequest) -> frozenset[str] | None:
        if not self._honours_subset or not request.HasField("metadata_context"):
            return None
        return _subset(request.metadata_context.filter_metadata)

    def _model(self, metadata: Any) -> str | None:
        if self._model_namespace not in metadata:
            return None
        fields = metadata[self._model_namespace].fields
        return fields[self._model_key].string_value if self._model_key in fields else ""


def _headers(headers: Iterable[Any], needed: Collection[str]) -> dict[str, str]:
    """Return those that are needed. Who repeats one does not replace it: its values are joined."""
    found: dict[str, str] = {}
    for header in headers:
        name = header.key.lower()
        if name in needed:
            value = (header.raw_value or header.value.encode()).decode("latin-1")
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def _subset(metadata: Any) -> frozenset[str] | None:
    """Decode the subset hint: a list of addresses, or one string with commas. Empty allows none."""
    if SUBSET_NAMESPACE not in metadata:  # reading a missing key would create it
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    value = fields[SUBSET_KEY]
    if value.WhichOneof("kind") == "list_value":
        names = [item.string_value for item in value.list_value.values]
    else:
        names = value.string_value.split(",")
    return frozenset(name.strip() for name in names if name.strip())


def _response_headers(request: pb.ProcessingRequest) -> m.ResponseHeaders:
    http, served = request.response_headers, None
    found = _headers(http.headers.headers, _RESPONSE_HEADERS)
    value = found.get(":status", "")
    # The count of digits first: int() refuses thousands of them with a ValueError.
    status = int(value) if len(value) == 3 and value.isascii() and value.isdigit() else 0
    metadata = request.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE in metadata:
        fields = metadata[DESTINATION_NAMESPACE].fields
        if SERVED_KEY in fields:
            served = fields[SERVED_KEY].string_value
    return m.ResponseHeaders(
        status,
        http.end_of_stream,
        served,
        _response_body_mode(request),
        found.get("content-type", ""),
        found.get("content-encoding", ""),
    )


def _response_body(request: pb.ProcessingRequest) -> m.ResponseBody:
    return m.ResponseBody(request.response_body.body, request.response_body.end_of_stream)


def _response_body_mode(request: pb.ProcessingRequest) -> BodyMode | None:
    """Decode the mode; None if the message has none. Only a stream's first message may have one."""
    if not request.HasField("protocol_config"):
        return None
    return _MODES.get(request.protocol_config.response_body_mode, BodyMode.NONE)


# Finds a large body in an encoded message without decoding it: protobuf would copy it twice.
#
# Field numbers and wire types: envoy/service/ext_proc/v3/external_processor.proto and
# protobuf.dev/programming-guides/encoding.

_VARINT, _BYTES = 0, 2
_PHASES: Final = range(2, 8)  # numbers of ProcessingRequest's fields of which one is set
_REQUEST_BODY: Final = 4 << 3 | _BYTES
_BODY: Final = 1 << 3 | _BYTES  # of HttpBody
_END_OF_STREAM: Final = 2 << 3 | _VARINT
_MAX_VARINT_BYTES: Final = 10


class Cut(NamedTuple):
    """A message and its body.

    Attributes:
        body: The body, within the message.
        end_of_stream: Whether it is the last part.
        rest: The message without its `request_body`, encoded.
    """

    body: memoryview
    end_of_stream: bool
    rest: bytes


def cut_body(message: bytes) -> Cut | None:
    """Cut the body out of a ProcessingRequest; None if it is not in the usual place."""
    try:
        return _cut(message)
    except (IndexError, ValueError):  # truncated or malformed: the decoder reports it
        return None


def _cut(message: bytes) -> Cut | None:
    phases = [field for field in _fields(message, 0, len(message)) if field.tag >> 3 in _PHASES]
    if [field.tag for field in phases] != [_REQUEST_BODY]:
        return None  # another phase, or several: the last one counts, or bodies are merged
    found, body, ends = phases[0], memoryview(b""), False
    for field in _fields(message, found.start, found.end):
        if field.tag == _BODY:
            body = memoryview(message)[field.start : field.end]
        elif field.tag == _END_OF_STREAM:
            ends = bool(_varint(message, field.start)[0])
        else:
            return None
    return Cut(body, ends, message[: found.begin] + message[found.end :])


class _Field(NamedTuple):
    tag: int
    begin: int  # of the tag
    start: int  # of the content
    end: int


def _fields(message: bytes, at: int, end: int) -> Iterator[_Field]:
    """Yield the fields from `at` to `end`, where the last one must end."""
    while at < end:
        begin = at
        tag, at = _varint(message, at)
        start, at = _content(message, at, tag & 7)
        if at > end:
            raise ValueError("cut off")
        yield _Field(tag, begin, start, at)


def _content(message: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return start and end of the content of a field whose tag ends at `at`."""
    if wire_type == _BYTES:
        size, at = _varint(message, at)
        end = at + size
    elif wire_type == _VARINT:
        end = _varint(message, at)[1]
    else:
        raise ValueError("no field of this message")
    return at, end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        octet = message[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ValueError("no varint")
