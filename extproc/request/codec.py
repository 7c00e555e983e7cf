"""Between Envoy's ext_proc messages and events and commands of a stream, without any decision.

Header values are read from `raw_value`, or from `value` if that is empty: Envoy fills `raw_value`,
other data planes `value`, or either. Most send names in lower case, some as Go writes them. A
header that comes several times, in whatever spelling, has all its values, joined with commas
(RFC 9110, 5.3). How responses are written is in `encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from msgspec.structs import astuple

from extproc.address import as_envoy_writes
from extproc.errors import ProtocolError
from extproc.protocol import (
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    MARK_HEADER,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from extproc.request import messages as m
from extproc.request.controlheaders import REMOVED_HEADERS
from extproc.request.encoding import Encoder
from extproc.request.lostrewrites import AI_GATEWAY_HEADER
from extproc.request.messagebytes import (
    BODY,
    HEADERS,
    MessageLayout,
    first_body_bytes,
    layout_of,
    read_body,
)
from extproc.request.messages import BodyMode

NEEDED_HEADERS = REMOVED_HEADERS | {
    *(":method", ":path", "x-request-id"),
    *("content-type", "content-length", "content-encoding", "expect", "upgrade"),
    *(AI_GATEWAY_HEADER, DESTINATION_KEY, MARK_HEADER),
}
"""Request headers that are read, beside those that may name a session. No other headers are
decoded, credentials among them."""
_RESPONSE_HEADERS = frozenset((":status", "content-type", "content-encoding"))
MAX_CONTEXTS = 256
MAX_CONTEXT_BYTES = 64
"""Of what follows bodies, which a data plane says with each in the same words."""
MAX_LENGTHS, MAX_LAYOUTS = 128, 4
"""Lengths of messages with headers that are remembered, with the last layouts of each; 2 KB a
layout."""
MAX_LAYOUT_BYTES = 16 * 1024
"""Longest message whose layout is remembered."""
LEARN_EVERY = 8
"""One in so many of the messages with headers that have no known layout gives theirs: to find one
takes eight times as long as to read the message by protobuf."""
MAX_BESIDE_BODY_BYTES = 1024 * 1024
"""Of a message, without a body that it begins with: headers and metadata. A byte of these takes up
to 40 of memory. Envoy's own limit of headers is 60 KiB, if nothing else is configured."""
_MODES = {mode.value: mode for mode in BodyMode}


class Codec(Encoder):
    """Decodes messages to events, and encodes commands.

    Args:
        model_namespace: Metadata namespace in which Envoy's `json_to_metadata` stores the model.
        session_headers: Headers that may name a session.
        asks_for_load: Also set the request header that asks the pod for an ORCA load report.
        honours_subset: Read the data plane's subset hint; else every request has the whole pool.
        tells_scores: Also set the destinations' scores in the metadata.
    """

    def __init__(
        self,
        *,
        model_namespace: str = "extproc.request",
        model_key: str = "model",
        session_headers: frozenset[str] = frozenset(),
        asks_for_load: bool = False,
        honours_subset: bool = True,
        tells_scores: bool = False,
    ) -> None:
        self._model_namespace = model_namespace
        self._honours_subset = honours_subset
        self._headers = NEEDED_HEADERS | session_headers
        self._contexts: dict[bytes, tuple[frozenset[str] | None]] = {}
        self._num_unknown = 0  # messages without a known layout
        self._layouts: dict[int, list[tuple[MessageLayout, tuple[Any, ...]]]] = {}
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
        tag = message[0] if message else 0
        if tag == HEADERS:
            for layout, others in self._layouts.get(len(message), ()):
                headers = layout.read(message)
                if headers is not None:
                    return m.RequestHeaders(headers, *others)
            self._num_unknown += 1
            is_kept = self._num_unknown % LEARN_EVERY == 0 and len(message) <= MAX_LAYOUT_BYTES
            return self.decode_any(message, is_kept=is_kept)
        if tag == BODY:
            body = read_body(message)
            if body is not None:
                data, ends, rest = body
                said = self._contexts.get(rest) or self._new_context(rest)
                if said is not None:
                    return m.BodyChunk(data, ends, *said)
        return self.decode_any(message)

    def decode_any(self, message: bytes, *, is_kept: bool = False) -> m.Event:
        """Decode a message of any form by protobuf, as `decode`; with headers, its layout may be
        kept for others."""
        if len(message) - first_body_bytes(message) > MAX_BESIDE_BODY_BYTES:
            raise ProtocolError(f"more than {MAX_BESIDE_BODY_BYTES} bytes beside a body")
        try:
            request = pb.ProcessingRequest.FromString(message)
        except Exception as error:  # upb's DecodeError; garbage must not count as a bug of ours
            raise ProtocolError("not a ProcessingRequest") from error
        read = self._readers.get(request.WhichOneof("request"))
        if read is None:
            raise ProtocolError("a ProcessingRequest without a phase")
        event = read(request)
        if is_kept and type(event) is m.RequestHeaders:
            layout = layout_of(message, request.request_headers, event.headers)
            if layout is not None:
                self._remember(len(message), layout, event)
        return event

    def _remember(self, num_bytes: int, layout: MessageLayout, event: m.RequestHeaders) -> None:
        if len(self._layouts) >= MAX_LENGTHS and num_bytes not in self._layouts:
            self._layouts.clear()
        known = self._layouts.setdefault(num_bytes, [])
        known.insert(0, (layout, astuple(event)[1:]))
        del known[MAX_LAYOUTS:]

    def _new_context(self, rest: bytes) -> tuple[frozenset[str] | None] | None:
        """Read all of a message but its body; None if that is malformed, too long, or has another
        phase.
        """
        if len(rest) > MAX_BESIDE_BODY_BYTES:
            return None
        try:
            request = pb.ProcessingRequest.FromString(rest)
        except DecodeError:
            return None
        if request.WhichOneof("request") is not None:
            return None
        context = (self._subset(request),)
        if len(rest) <= MAX_CONTEXT_BYTES and len(self._contexts) < MAX_CONTEXTS:
            self._contexts[rest] = context
        return context

    def _request_body(self, request: pb.ProcessingRequest) -> m.BodyChunk:
        body = request.request_body
        return m.BodyChunk(body.body, body.end_of_stream, self._subset(request))

    def _request_headers(self, request: pb.ProcessingRequest) -> m.RequestHeaders:
        http, mode, early, model = request.request_headers, None, False, None
        if request.HasField("protocol_config"):
            config = request.protocol_config
            mode = _MODES.get(config.request_body_mode)
            early = config.send_body_without_waiting_for_header_response
        if request.HasField("metadata_context"):
            model = self._model(request.metadata_context.filter_metadata)
        return m.RequestHeaders(
            _headers(http.headers.headers, self._headers),
            http.end_of_stream,
            mode,
            early,
            _response_body_mode(request),
            model,
            self._subset(request),
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
    """Return those that are needed. A repeated header does not replace the first: the values are
    joined.
    """
    found: dict[str, list[str]] = {}
    for header in headers:
        name = header.key.lower()
        if name in needed:
            value = (header.raw_value or header.value.encode()).decode("latin-1")
            found.setdefault(name, []).append(value)
    return {name: ",".join(values) for name, values in found.items()}


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
    return frozenset(as_envoy_writes(name.strip()) for name in names if name.strip())


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
