"""A large body is found in its message, just as protobuf reads it, or left to protobuf."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.request import messages as m
from extproc.request.codec import CUT_FROM_BYTES, Codec, cut_body


def with_context(request: pb.ProcessingRequest, values: dict[str, str]) -> pb.ProcessingRequest:
    for key, value in values.items():
        fields = request.metadata_context.filter_metadata["a.namespace"].fields
        fields[key].string_value = value
    return request


bodies = st.builds(pb.HttpBody, body=st.binary(max_size=300), end_of_stream=st.booleans())
contexts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
messages = st.builds(
    with_context,
    st.builds(pb.ProcessingRequest, request_body=bodies, observability_mode=st.booleans()),
    contexts,
)


@given(messages)
def test_the_cut_body_is_the_one_that_protobuf_decodes(request: pb.ProcessingRequest) -> None:
    cut = cut_body(request.SerializeToString())
    assert cut is not None
    rest = pb.ProcessingRequest.FromString(cut.rest)

    assert (cut.body, cut.end_of_stream) == (
        request.request_body.body,
        request.request_body.end_of_stream,
    )
    assert rest.WhichOneof("request") is None
    request.ClearField("request_body")
    assert rest == request


damages = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)


@given(messages, damages, st.integers(0, 400))
def test_a_damaged_message_is_cut_as_protobuf_decodes_it_or_not_at_all(
    request: pb.ProcessingRequest, damage: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(request.SerializeToString())
    for place, octet in damage:
        if place < len(damaged):
            damaged[place] = octet
    message = bytes(damaged[: max(length, 1)])
    cut = cut_body(message)
    if cut is None:
        return
    try:
        read = pb.ProcessingRequest.FromString(message)
        rest = pb.ProcessingRequest.FromString(cut.rest)
    except DecodeError:
        with pytest.raises(DecodeError):  # the rest alone is refused where the whole is
            pb.ProcessingRequest.FromString(cut.rest)
        return
    assert rest.WhichOneof("request") is None
    assert (read.request_body.body, read.request_body.end_of_stream) == (
        cut.body,
        cut.end_of_stream,
    )


@pytest.mark.parametrize(
    "message",
    [
        b"",
        pb.ProcessingRequest(request_headers=pb.HttpHeaders()).SerializeToString(),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=b"a")).SerializeToString() * 2,
        b"\x22\x05\x0a\x04abc",
        b"\x22\x04\x0a\x04abcd",
        b"\x22\x03\x0a\x01a\x0b",
        b"\x22\x02\x18\x01",
        b"\xff" * 20,
    ],
    ids=["empty", "no body", "twice", "cut off", "overlong", "group", "unknown", "no varint"],
)
def test_unusual_messages_are_left_to_protobuf(message: bytes) -> None:
    assert cut_body(message) is None


BODY = b'{"model": "a"}' + b" " * CUT_FROM_BYTES


@pytest.mark.parametrize("ends", [False, True])
def test_a_large_body_is_read_in_place(ends: bool) -> None:
    request = pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=ends))
    event = Codec().decode(with_context(request, {"a": "b"}).SerializeToString())

    assert isinstance(event, m.RequestBody)
    assert isinstance(event.data, memoryview)
    assert (bytes(event.data), event.end_of_stream) == (BODY, ends)


def test_a_large_message_of_another_kind_or_none_is_as_any() -> None:
    response = pb.ProcessingRequest(response_body=pb.HttpBody(body=BODY))
    event = Codec().decode(response.SerializeToString())

    assert event == m.ResponseBody(BODY, False)
    both = pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY)).SerializeToString()
    headers = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
    last_wins = Codec().decode(both + headers.SerializeToString())
    assert isinstance(last_wins, m.RequestHeaders)
    last_wins = Codec().decode(headers.SerializeToString() + both)
    assert last_wins == m.RequestBody(BODY)
    with pytest.raises(ProtocolError):
        Codec().decode(both + b"\xff")
