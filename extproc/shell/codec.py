"""Between Envoy's ext_proc messages and the core's events and commands, without any decision.

Header values are written to `raw_value` alone: a mutation with both fields set is an error. They
are read from `raw_value`, or from `value` if that is empty: Envoy fills `raw_value`, other data
planes `value`, or either. Most send names in lower case, some as Go writes them. `append_action` is
set for other data planes and later versions of Envoy; Envoy itself overwrites by default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.core import messages as m
from extproc.core.errors import ProtocolError
from extproc.core.hints import CONTROL_HEADERS
from extproc.core.messages import BodyMode
from extproc.core.protocol import (
    ALTERNATE_KEYS,
    ALTERNATES_NAMESPACE,
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    PICK_ID_KEY,
    PICK_NAMESPACE,
    SCORES_KEY,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from extproc.core.types import Pick
from extproc.shell.cutbody import cut_body

ORCA_REQUEST_HEADER = "endpoint-load-metrics-format"
"""Request header; vLLM adds a load report to the headers of non-streaming responses for it."""

NEEDED_HEADERS = CONTROL_HEADERS | {
    *(":method", ":path", "x-request-id"),
    *("content-type", "content-length", "content-encoding"),
}
"""Request headers that the core reads. No others are decoded, credentials among them."""
CUT_FROM_BYTES = 256 * 1024
"""Longer messages are read in place: each copy of a megabyte takes milliseconds."""
MAX_TEMPLATES = 4096
"""Encoded responses kept, about 300 bytes each: one per destination and lengths of the rest."""

_TemplateKey = tuple[type, tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""Kind of response, destination, lengths of the pick's id and alternates, headers to remove."""

_Template = tuple[bytes, tuple[int, ...]]
"""A format string, and for each of its places the id (0) or one of the alternates (1, 2)."""

_BLANKS = "\x7f~}"
"""Placeholders of the id and the alternates while a template is encoded. They occur in no address
and in no score: the binary form of a fraction by 17 or less has none of these bytes."""

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_MODES = {mode.value: mode for mode in BodyMode}


class Codec:
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
        self._asks_for_load = asks_for_load
        self._honours_subset, self._tells_scores = honours_subset, tells_scores
        self._headers = NEEDED_HEADERS | {session_header}
        self._model_key = model_key
        self._templates: dict[_TemplateKey, _Template] = {}
        self._encoders: dict[type, Callable[[Any], bytes]] = {
            m.ContinueHeaders: self._continue_headers,
            m.ContinueBody: self._continue_body,
            m.EchoBody: partial(_echo, "request_body"),
            m.ContinueTrailers: _constant("request_trailers"),
            m.ContinueResponseHeaders: _constant("response_headers"),
            m.ContinueResponseBody: _constant("response_body"),
            m.EchoResponseBody: partial(_echo, "response_body"),
            m.ContinueResponseTrailers: _constant("response_trailers"),
            m.Reply: _reply,
            m.ExtendTimeout: _extend_timeout,
        }

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
        kind = request.WhichOneof("request")
        if kind == "request_body":
            body = request.request_body
            return m.RequestBody(body.body, body.end_of_stream, self._subset(request))
        if kind == "request_headers":
            return self._request_headers(request)
        if kind == "request_trailers":
            return m.RequestTrailers()
        if kind == "response_headers":
            return _response_headers(request)
        if kind == "response_body":
            return m.ResponseBody(request.response_body.body, request.response_body.end_of_stream)
        if kind == "response_trailers":
            return m.ResponseTrailers()
        raise ProtocolError("a ProcessingRequest without a phase")

    def encode(self, command: m.Command) -> bytes:
        """Encode one command, other than `End` and `WakeAt`."""
        return self._encoders[type(command)](command)

    def _continue_headers(self, command: m.ContinueHeaders) -> bytes:
        if command.pick is not None:
            return self._routed(m.ContinueHeaders, command.pick)
        if command.ask_for_body:
            return _ask_for_body(command)
        return _PLAIN_HEADERS

    def _continue_body(self, command: m.ContinueBody) -> bytes:
        if command.pick is not None:
            return self._routed(m.ContinueBody, command.pick)
        return _PLAIN_BODY

    def _routed(self, kind: type, pick: Pick) -> bytes:
        """Encode a response that sets a destination.

        Responses for one destination differ in the pick's id and alternates, and rarely in the
        headers to remove, so the rest is encoded once: a new message takes 7 us, this takes 1 us.
        """
        lengths = (len(pick.id), *[len(each) for each in pick.alternates])
        key = (kind, pick.endpoints, lengths, pick.request.hints.header_names)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._make_template(*key)
        text, order = template
        values = (pick.id, *pick.alternates)
        return text % tuple([values[place].encode() for place in order])

    def _make_template(
        self,
        kind: type,
        endpoints: tuple[str, ...],
        lengths: tuple[int, ...],
        unwanted: tuple[str, ...],
    ) -> _Template:
        """Encode the response without the pick's id (0) and its alternates (1, 2)."""
        blanks = [blank * length for blank, length in zip(_BLANKS, lengths, strict=False)]
        response = pb.ProcessingResponse()
        phase = response.request_body if kind is m.ContinueBody else response.request_headers
        _set_destination(response, phase.response, ",".join(endpoints), blanks[0])
        if len(blanks) > 1:
            _set_alternates(response, blanks[1:])
        phase.response.header_mutation.remove_headers.extend(unwanted)
        if self._tells_scores:
            _set_scores(response, endpoints)
        if self._asks_for_load:
            _set_header(phase.response.header_mutation, ORCA_REQUEST_HEADER, b"JSON")
        text = response.SerializeToString().replace(b"%", b"%%")
        # From the end: the byte before an id of 127 characters is its length.
        found = [text.rindex(blank.encode()) for blank in blanks]
        for blank in blanks:
            text = b"%b".join(text.rsplit(blank.encode(), 1))
        return text, tuple(sorted(range(len(blanks)), key=found.__getitem__))

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
        needed = self._headers
        return m.RequestHeaders(
            {
                name: (h.raw_value or h.value.encode()).decode("latin-1")
                for h in http.headers.headers
                if (name := h.key.lower()) in needed
            },
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
    http, status, served = request.response_headers, 0, None
    for header in http.headers.headers:
        if header.key == ":status":
            # The count of digits first: int() refuses thousands of them with a ValueError.
            value = header.raw_value or header.value.encode()
            status = int(value) if len(value) == 3 and value.isdigit() else 0
    metadata = request.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE in metadata:
        fields = metadata[DESTINATION_NAMESPACE].fields
        if SERVED_KEY in fields:
            served = fields[SERVED_KEY].string_value
    return m.ResponseHeaders(status, http.end_of_stream, served, _response_body_mode(request))


def _response_body_mode(request: pb.ProcessingRequest) -> BodyMode | None:
    """Decode the mode; None if the message has none. Only a stream's first message may have one."""
    if not request.HasField("protocol_config"):
        return None
    return _MODES.get(request.protocol_config.response_body_mode, BodyMode.NONE)


def _set_destination(
    response: pb.ProcessingResponse, common: pb.CommonResponse, destination: str, pick_id: str
) -> None:
    """Set the destination as header and as metadata, always equal, and the pick's id."""
    _set_header(common.header_mutation, DESTINATION_KEY, destination.encode())
    namespaces = response.dynamic_metadata.fields
    fields = namespaces[DESTINATION_NAMESPACE].struct_value.fields
    fields[DESTINATION_KEY].string_value = destination
    namespaces[PICK_NAMESPACE].struct_value.fields[PICK_ID_KEY].string_value = pick_id


def _set_alternates(response: pb.ProcessingResponse, addresses: list[str]) -> None:
    fields = response.dynamic_metadata.fields[ALTERNATES_NAMESPACE].struct_value.fields
    for key, address in zip(ALTERNATE_KEYS, addresses, strict=False):
        fields[key].string_value = address


def _set_scores(response: pb.ProcessingResponse, endpoints: tuple[str, ...]) -> None:
    """Policies rank, they do not measure: scores fall from 1 for the first in even steps."""
    fields = response.dynamic_metadata.fields[PICK_NAMESPACE].struct_value.fields
    scores, number = fields[SCORES_KEY].struct_value.fields, len(endpoints)
    for place, address in enumerate(endpoints):
        scores[address].number_value = (number - place) / number


def _set_header(mutation: pb.HeaderMutation, name: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value
    option.append_action = _OVERWRITE


def _ask_for_body(command: m.ContinueHeaders) -> bytes:
    response = pb.ProcessingResponse()
    response.request_headers.SetInParent()
    mode = response.mode_override
    mode.request_body_mode = processing_mode_pb2.ProcessingMode.BUFFERED
    # An override replaces the whole mode; unset would be SEND for headers, SKIP for trailers.
    sent = processing_mode_pb2.ProcessingMode
    response_mode = sent.SEND if command.keeps_response else sent.SKIP
    mode.response_header_mode = mode.response_trailer_mode = response_mode
    return _encoded(response)


def _echo(phase: str, command: m.EchoBody | m.EchoResponseBody) -> bytes:
    response = pb.ProcessingResponse()
    chunk = getattr(response, phase).response.body_mutation.streamed_response
    chunk.body, chunk.end_of_stream = command.data, command.end_of_stream
    return _encoded(response)


def _reply(command: m.Reply) -> bytes:
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = command.status
    immediate.body = command.body
    immediate.details = command.details
    for key, value in {"content-type": "application/json", **command.headers}.items():
        _set_header(immediate.headers, key, value.encode("latin-1"))
    return _encoded(response)


def _extend_timeout(command: m.ExtendTimeout) -> bytes:
    response = pb.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(round(command.seconds * 1000))
    return _encoded(response)


def _constant(phase: str) -> Callable[[Any], bytes]:
    """Encode a response without content once: it is always the same bytes."""
    encoded = _plain(phase)
    return lambda _command: encoded


def _plain(phase: str) -> bytes:
    response = pb.ProcessingResponse()
    getattr(response, phase).SetInParent()
    return _encoded(response)


def _encoded(response: pb.ProcessingResponse) -> bytes:
    encoded: bytes = response.SerializeToString()
    return encoded


_PLAIN_HEADERS = _plain("request_headers")
_PLAIN_BODY = _plain("request_body")
