"""Core's commands as ext_proc responses.

Header values are written to `raw_value` alone: a mutation with both fields set is an error.
`append_action` is set for other data planes and later versions of Envoy; Envoy itself overwrites by
default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.protocol import (
    ALTERNATE_KEYS,
    ALTERNATES_NAMESPACE,
    DESTINATION_KEY,
    DESTINATION_NAMESPACE,
    MARK_HEADER,
    PICK_ID_KEY,
    PICK_NAMESPACE,
    SCORES_KEY,
)
from extproc.request import messages as m
from extproc.request.messagebytes import varint
from extproc.types import Pick

ORCA_REQUEST_HEADER = "endpoint-load-metrics-format"
"""Request header; vLLM adds a load report to the headers of non-streaming responses for it."""

MAX_TEMPLATES = 4096
"""Encoded responses kept, about 300 bytes each: one per destination and lengths of the rest."""

SHARED_BYTES = 16 * 1024
"""Of a response of ours from which on equal ones are encoded once, and not copied to be sent."""

_TemplateKey = tuple[type, tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""Kind of response, destination, lengths of the pick's id, mark (0 for none) and alternates, and
the headers to remove."""

_Template = tuple[str, Callable[[Any], Any]]
"""A format string of a message in Latin-1, and what takes the values for its places."""

_BLANKS = "\x7f|~}"
"""Placeholders of the id, the mark and the alternates while a template is encoded. They occur in no
address and in no score: the binary form of a fraction by 17 or less has none of these bytes."""

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class Encoder:
    """Encodes commands.

    Args:
        asks_for_load: Also set the request header that asks the pod for an ORCA load report.
        tells_scores: Also set the destinations' scores in the metadata.
    """

    def __init__(self, *, asks_for_load: bool = False, tells_scores: bool = False) -> None:
        self._asks_for_load, self._tells_scores = asks_for_load, tells_scores
        self._templates: dict[_TemplateKey, _Template] = {}
        self._list: m.Reply | None = None
        self._encoded_list = b""
        self._encoders: dict[type, Callable[[Any], bytes]] = {
            m.ContinueHeaders: self._continue_headers,
            m.ContinueBody: self._continue_body,
            m.EchoBody: partial(_echo, "request_body"),
            m.ContinueTrailers: _constant("request_trailers"),
            m.ContinueResponseHeaders: _continue_response_headers,
            m.ContinueResponseBody: _continue_response_body,
            m.EchoResponseBody: partial(_echo, "response_body"),
            m.ContinueResponseTrailers: _constant("response_trailers"),
            m.Reply: self._reply,
            m.ExtendTimeout: _extend_timeout,
        }

    def encode(self, command: m.Command) -> bytes:
        """Encode one command, other than `End` and `WakeAt`."""
        return self._encoders[type(command)](command)

    def _continue_headers(self, command: m.ContinueHeaders) -> bytes:
        if command.pick is not None:
            text = self._routed(m.ContinueHeaders, command.pick, command.mark)
            if command.content_length is None:
                return text
            response = pb.ProcessingResponse.FromString(text)
            _set_length(response.request_headers.response, command.content_length)
            return _encoded(response)
        if command.ask_for_body:
            return _ask_for_body(command)
        return _PLAIN_HEADERS

    def _continue_body(self, command: m.ContinueBody) -> bytes:
        if command.pick is None:
            return _PLAIN_BODY
        text = self._routed(m.ContinueBody, command.pick, command.mark)
        if command.body is None:
            return text
        response = pb.ProcessingResponse.FromString(text)
        if command.content_length is not None:
            _set_length(response.request_body.response, command.content_length)
        return _with_body(response, command.body)

    def _reply(self, command: m.Reply) -> bytes:
        """Encode a response of ours; the last large one, a list, is kept for all who ask for it."""
        if len(command.body) < SHARED_BYTES:
            return _reply(command)
        if command != self._list:
            self._list, self._encoded_list = command, _reply(command)
        return self._encoded_list

    def _routed(self, kind: type, pick: Pick, mark: str) -> bytes:
        """Encode a response that sets a destination.

        Responses for one destination differ in the pick's id, mark and alternates, and rarely in
        the headers to remove. So the rest is encoded once: a new message takes 7 us, this 1 us.
        """
        lengths = len(pick.id), len(mark), *map(len, pick.alternates)
        key = (kind, pick.endpoints, lengths, pick.request.hints.header_names)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._make_template(*key)
        text, values_of = template
        filled: str = text % values_of((pick.id, mark, *pick.alternates))
        return filled.encode("latin-1")

    def _make_template(
        self,
        kind: type,
        endpoints: tuple[str, ...],
        lengths: tuple[int, ...],
        unwanted: tuple[str, ...],
    ) -> _Template:
        """Encode the response without the pick's id (0), mark (1) and alternates (2, 3)."""
        blanks = [blank * length for blank, length in zip(_BLANKS, lengths, strict=False)]
        response = pb.ProcessingResponse()
        phase = response.request_body if kind is m.ContinueBody else response.request_headers
        _set_destination(response, phase.response, ",".join(endpoints), blanks[0])
        if len(blanks) > 2:
            _set_alternates(response, blanks[2:])
        if blanks[1]:
            _set_header(phase.response.header_mutation, MARK_HEADER, blanks[1].encode())
        phase.response.header_mutation.remove_headers.extend(unwanted)
        if self._tells_scores:
            _set_scores(response, endpoints)
        if self._asks_for_load:
            _set_header(phase.response.header_mutation, ORCA_REQUEST_HEADER, b"JSON")
        text = response.SerializeToString().replace(b"%", b"%%")
        # From the end: the byte before an id of 127 characters is its length.
        places = [place for place, length in enumerate(lengths) if length]
        found = {place: text.rindex(blanks[place].encode()) for place in places}
        for place in places:
            text = b"%s".join(text.rsplit(blanks[place].encode(), 1))
        return text.decode("latin-1"), itemgetter(*sorted(places, key=found.__getitem__))


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


def _set_length(common: pb.CommonResponse, content_length: int) -> None:
    _set_header(common.header_mutation, "content-length", b"%d" % content_length)


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
    immediate.details = command.details
    for key, value in {"content-type": "application/json", **command.headers}.items():
        _set_header(immediate.headers, key, value.encode("latin-1"))
    return _around(command.body, (immediate.SerializeToString(), b""), _REPLY_FIELDS)


def _extend_timeout(command: m.ExtendTimeout) -> bytes:
    response = pb.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(round(command.seconds * 1000))
    return _encoded(response)


def _continue_response_headers(command: m.ContinueResponseHeaders) -> bytes:
    return _WITHOUT_LENGTH if command.drops_length else _PLAIN_RESPONSE_HEADERS


def _continue_response_body(command: m.ContinueResponseBody) -> bytes:
    if command.body is None:
        return _PLAIN_RESPONSE_BODY
    response = pb.ProcessingResponse()
    response.response_body.response.body_mutation.body = command.body
    return _encoded(response)


def _without_length() -> bytes:
    response = pb.ProcessingResponse()
    mutation = response.response_headers.response.header_mutation
    mutation.remove_headers.append("content-length")
    return _encoded(response)


def _constant(phase: str) -> Callable[[Any], bytes]:
    """Encode a response without content once: it is always the same bytes."""
    encoded = _plain(phase)
    return lambda _command: encoded


def _plain(phase: str) -> bytes:
    response = pb.ProcessingResponse()
    getattr(response, phase).SetInParent()
    return _encoded(response)


def _with_body(response: pb.ProcessingResponse, body: bytes) -> bytes:
    """Encode the response to a body with another one in its place, which is copied once.

    For 16 MiB that takes 4 ms, and protobuf 14: its buffer grows from copy to copy.
    """
    common = response.request_body.response.SerializeToString()
    response.ClearField("request_body")
    return _around(body, (b"", common, b"", _encoded(response)), _BODY_FIELDS)


def _around(body: bytes, fields: Sequence[bytes], numbers: Sequence[int]) -> bytes:
    """Encode messages in one another, and a body in the innermost.

    Args:
        fields: What else each message has, from the inside.
        numbers: Of the field that the body is in, and of each message in the next.
    """
    head = b""
    for others, number in zip(fields, numbers, strict=True):
        head = others + varint(number << 3 | 2) + varint(len(head) + len(body)) + head
    return head + body


def _encoded(response: pb.ProcessingResponse) -> bytes:
    encoded: bytes = response.SerializeToString()
    return encoded


def _numbers(*fields: tuple[Any, str]) -> list[int]:
    return [message.DESCRIPTOR.fields_by_name[name].number for message, name in fields]


_BODY_FIELDS = _numbers(
    (pb.BodyMutation, "body"),
    (pb.CommonResponse, "body_mutation"),
    (pb.BodyResponse, "response"),
    (pb.ProcessingResponse, "request_body"),
)
"""The fields that a body is in, from the inside."""
_REPLY_FIELDS = _numbers(
    (pb.ImmediateResponse, "body"), (pb.ProcessingResponse, "immediate_response")
)
_PLAIN_HEADERS = _plain("request_headers")
_PLAIN_BODY = _plain("request_body")
_PLAIN_RESPONSE_HEADERS = _plain("response_headers")
_PLAIN_RESPONSE_BODY = _plain("response_body")
_WITHOUT_LENGTH = _without_length()
