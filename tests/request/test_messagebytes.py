"""Usual messages are read from their bytes as protobuf reads them; all others are left to it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.request import messages as m
from extproc.request.codec import (
    LEARN_EVERY,
    MAX_CONTEXT_BYTES,
    MAX_CONTEXTS,
    MAX_LAYOUTS,
    MAX_LENGTHS,
    Codec,
)
from extproc.request.messagebytes import VIEW_FROM_BYTES, first_body_bytes, read_body
from tests.request.fakerouter import IN_HEADER

GOLDEN = Path(__file__).parent.parent / "golden" / "envoy-1.40-messages.json"
RECORDED = [each.encode("latin-1") for each in json.loads(GOLDEN.read_text())["requests"]]
CODEC = Codec(session_headers=IN_HEADER.headers)


def decoded(message: bytes) -> m.Event | None:
    """What protobuf makes of it; None if it is malformed."""
    try:
        return CODEC.decode_any(message)
    except ProtocolError:
        return None


def decode_usual(codec: Codec, message: bytes) -> Any:
    """What is made of it once its layout is known; None if it is not usual."""
    for _ in range(LEARN_EVERY):
        with suppress(ProtocolError):
            codec.decode(message)
    return decode_known(codec, message)


def decode_known(codec: Codec, message: bytes) -> Any:
    """What is made of it without protobuf; None if it is not usual, or its layout not known."""
    with patch.object(codec, "decode_any", lambda _message, is_kept=False: None):
        return codec.decode(message)


def assert_is_read_alike(message: bytes) -> bool:
    """Whatever is read is right; return whether the message was usual."""
    usual = decode_usual(CODEC, message)
    assert usual is None or usual == decoded(message)
    return usual is not None


def message_of(*headers: tuple[str, bytes], ends: bool = False) -> bytes:
    """As Envoy writes it."""
    made = pb.ProcessingRequest()
    made.request_headers.SetInParent()
    for name, value in headers:
        made.request_headers.headers.headers.add(key=name, raw_value=value)
    made.request_headers.end_of_stream = ends
    made.metadata_context.SetInParent()
    made.protocol_config.request_body_mode = 2
    return bytes(made.SerializeToString())


_PATH = ("x-note", b"a\n\x1d\n\x05:path\x1a\x14/v1/chat/completions")
NAMES = (":method", ":path", "x-session", "content-length", "x-request-id", "accept", "x-a", "")
names = st.sampled_from((*NAMES, "X-Session", "x-r\u212aey", "x-" + "long" * 40)) | st.text(
    max_size=5
)
fields = st.builds(
    lambda name, value: message_of((name, value))[3:-6],
    st.sampled_from(NAMES),
    st.binary(max_size=9),
)
values = st.binary(max_size=20) | fields | st.binary(min_size=100, max_size=300)


@st.composite
def header_messages(draw: st.DrawFn) -> bytes:
    """Also such as no data plane sends: in `value`, repeated, with attributes, with a context."""
    made = pb.ProcessingRequest()
    made.request_headers.SetInParent()
    for name, value in draw(st.lists(st.tuples(names, values), max_size=6)):
        header = made.request_headers.headers.headers.add(key=name)
        kind = draw(st.sampled_from(("raw", "raw", "raw", "raw", "text", "both", "empty")))
        if kind in ("raw", "both"):
            header.raw_value = value
        if kind in ("text", "both"):
            header.value = value.decode("latin-1")
    made.request_headers.end_of_stream = draw(st.booleans())
    if draw(st.integers(0, 9)) == 0:
        made.request_headers.attributes["a"].SetInParent()
    return bytes(made.SerializeToString())


@st.composite
def contexts(draw: st.DrawFn) -> bytes:
    """What follows a phase, now and then another one."""
    made = pb.ProcessingRequest()
    if draw(st.booleans()):
        made.protocol_config.request_body_mode = draw(st.integers(0, 5))
        made.protocol_config.send_body_without_waiting_for_header_response = draw(st.booleans())
    if draw(st.booleans()):
        made.metadata_context.SetInParent()
    for namespace, key in (("extproc.request", "model"), ("envoy.lb.subset_hint", "a")):
        if draw(st.integers(0, 3)) == 0:
            fields = made.metadata_context.filter_metadata[namespace].fields
            fields[key].string_value = draw(st.text(max_size=80))
    if draw(st.integers(0, 9)) == 0:
        made.response_headers.SetInParent()
    if draw(st.integers(0, 9)) == 0:
        made.request_headers.end_of_stream = True
    return bytes(made.SerializeToString())


body_messages = st.builds(
    lambda data, ends: pb.ProcessingRequest(
        request_body=pb.HttpBody(body=data, end_of_stream=ends)
    ).SerializeToString(),
    st.binary(max_size=300),
    st.booleans(),
)
messages = st.builds(
    lambda phase, context: bytes(phase + context), header_messages() | body_messages, contexts()
)


@given(messages)
def test_whatever_is_read_is_what_protobuf_reads(message: bytes) -> None:
    assert_is_read_alike(message)


_ENDS_LIKE_A_CONTEXT = message_of((":path", b"/aB\x00"))[:-6]
OVERLONG = bytearray(_ENDS_LIKE_A_CONTEXT)
"""The header is longer than what has it, and its end looks like what may follow."""
OVERLONG[1] -= 2
OVERLONG[3] -= 2
damages = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)


@given(messages | st.sampled_from(RECORDED), damages, st.integers(1, 600))
@example(b"\x22\x05\x0a\x04abc", [], 600)  # the message is cut off
@example(b"\x22\x04\x0a\x04abcd", [], 600)  # the body is longer than what has it
@example(b"\x12\x04\x0a\x08\x0a\x06\x0a\x01a\x1a\x01b", [], 600)
@example(bytes(OVERLONG), [], 600)
@example(b"\xff" * 20, [], 600)
@example(b"\x22\xff\xff\xff\xff\xff\xff", [], 600)
def test_a_damaged_message_is_read_as_protobuf_reads_it_or_not_at_all(
    message: bytes, damage: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(message)
    for place, octet in damage:
        if place < len(damaged):
            damaged[place] = octet
    assert_is_read_alike(bytes(damaged[:length]))


SHORT = message_of((":path", b"/a"), ("accept", b"*"), ends=True)[:-6]
LONG = message_of((":path", b"/" * 130), ("x-a", b"\n\x02\n\x00"))[:-6]
SMALL_BODY = b"\x22\x07\x0a\x03abc\x10\x01"


@pytest.mark.parametrize(
    "message", [SHORT, LONG, SMALL_BODY, LONG + b"B\x00", SMALL_BODY + b"B\x00"]
)
def test_no_byte_can_be_another_one_unnoticed(message: bytes) -> None:
    """Every length and every tag counts: small ones, and those that differ by one bit."""
    assert assert_is_read_alike(message)
    damaged = bytearray(message)
    for place, octet in enumerate(message):
        for damaged[place] in {*range(0x2C), *(octet ^ 1 << bit for bit in range(8)), 0xFF}:
            assert_is_read_alike(bytes(damaged))
        damaged[place] = octet
        assert_is_read_alike(message[:place])


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES[:-1]), values), unique_by=lambda each: each[0], min_size=1
    )
)
@example([_PATH, (":path", b"/v1/completions")])
@example([("x-session", b"x" * 127), (":path", b"x" * 128)])
def test_no_value_is_taken_for_a_field(headers: list[tuple[str, bytes]]) -> None:
    """Clients choose the values: what looks like a header in one is a part of it."""
    event = decode_usual(CODEC, message_of(*((name, value or b"-") for name, value in headers)))

    assert isinstance(event, m.RequestHeaders)
    assert event == decoded(message_of(*((name, value or b"-") for name, value in headers)))


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_what_envoy_sends_is_usual(number: int) -> None:
    assert assert_is_read_alike(RECORDED[number])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x12",
        message_of((":path", b"/"), (":path", b"/v1/completions")),
        message_of(("", b"a")),
        message_of((":path", b"/")) + b"\x22\x00",
        message_of((":path", b"/")) + b"\x0b",
        b"\x12\x02\x0a\x00\x22\x00",
        b"\x22\x07\x10\x01\x0a\x03abc",
        b"\x22\x07\x0a\x03abc\x18\x01",
        b"\x12\x09\x0a\x07\x0a\x05\x0a\x01a\x12\x00",
    ],
)
def test_unusual_messages_are_left_to_protobuf(message: bytes) -> None:
    assert decode_usual(CODEC, message) is None


@pytest.mark.parametrize("ends", [False, True])
def test_a_large_body_is_not_copied(ends: bool) -> None:
    data = b'{"model": "a"}' + b" " * VIEW_FROM_BYTES
    request = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))
    event = CODEC.decode(request.SerializeToString())

    assert isinstance(event, m.BodyChunk)
    assert isinstance(event.data, memoryview)
    assert (bytes(event.data), event.end_of_stream) == (data, ends)


def test_of_several_phases_the_last_one_counts() -> None:
    body = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"a")).SerializeToString()
    headers = message_of((":path", b"/"))

    assert isinstance(CODEC.decode(body + headers), m.RequestHeaders)
    assert CODEC.decode(headers + body) == m.BodyChunk(b"a")
    with pytest.raises(ProtocolError):
        CODEC.decode(body + b"\xff")


def test_contexts_are_remembered_up_to_a_number() -> None:
    """A data plane may say something else with each message."""
    codec = Codec()

    for name in ("long" * 40, *map(str, range(MAX_CONTEXTS + 5))):
        request = pb.ProcessingRequest()
        request.metadata_context.filter_metadata["a"].fields["b"].string_value = name
        message = SMALL_BODY + request.SerializeToString()
        assert decode_usual(codec, message) == decoded(message)
        assert len(max(codec._contexts, default=b"", key=len)) <= MAX_CONTEXT_BYTES
    assert len(codec._contexts) == MAX_CONTEXTS


@given(st.lists(st.tuples(values, values), min_size=2, max_size=4), st.integers(0, 3))
def test_a_message_of_a_known_layout_is_read_like_the_first(
    pairs: list[tuple[bytes, bytes]], num_needed: int
) -> None:
    """Their values are as long as the first one's, and say something else."""
    codec = Codec(session_headers=IN_HEADER.headers)
    needed = ("x-session", ":path", "x-request-id")[:num_needed]
    for one, other in pairs:
        headers = [(name, (one + b"-")[: len(pairs[0][0]) + 1]) for name in needed]
        made = message_of(*headers, ("accept", other[:9].ljust(9)))
        assert decode_usual(codec, made) == decoded(made)


def test_a_long_message_is_read_and_its_layout_is_not_remembered() -> None:
    """Its names may be most of it."""
    codec = Codec()
    short, long = (
        message_of((":path", b"/v1/models"), ("x-other", b"a" * size)) for size in (100, 20_000)
    )
    assert decode_usual(codec, long) is None
    assert isinstance(codec.decode(long), m.RequestHeaders)
    assert isinstance(decode_usual(codec, short), m.RequestHeaders)

    assert [*codec._layouts] == [len(short)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", 0),
        (b"\x12\x01a", 0),
        (b"\x22", 0),  # the length is missing
        (b"\x22\x02ab\x42\x00", 2),
        (b"\x2a\x01a", 1),
        (b"\x22\x7fabc", 3),  # cut short
    ],
)
def test_a_body_counts_where_a_message_begins_with_it(message: bytes, expected: int) -> None:
    assert first_body_bytes(message) == expected


def test_layouts_are_remembered_up_to_a_number() -> None:
    codec = Codec()
    for size in range(2 * MAX_LENGTHS):
        assert decode_usual(codec, message_of((":path", b"/" * (size + 1)))) is not None
        assert len(codec._layouts) <= MAX_LENGTHS


def test_of_messages_of_one_length_the_last_layouts_are_remembered() -> None:
    codec, size = Codec(), MAX_LAYOUTS + 2
    alike = [
        message_of((":path", b"/" * num), ("x-a", b"1" * (size + 1 - num)))
        for num in range(1, size + 1)
    ]
    assert len({len(each) for each in alike}) == 1
    for message in alike:
        decode_usual(codec, message)
    found = [decode_known(codec, message) for message in alike]

    assert found == [None, None, *map(decoded, alike[2:])]
    assert sum(map(len, codec._layouts.values())) == MAX_LAYOUTS


def test_what_follows_a_body_is_handed_on() -> None:
    message = b"\x22\x07\x0a\x03abc\x10\x01\x42\x00"

    assert read_body(message) == (b"abc", True, b"\x42\x00")
