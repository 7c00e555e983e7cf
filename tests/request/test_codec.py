"""Both ways between bytes and events, judged by a second implementation of the wire."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.protocol import MARK_HEADER
from extproc.request import encoding
from extproc.request import messages as m
from extproc.request.codec import NEEDED_HEADERS, Codec
from extproc.request.encoding import Encoder
from extproc.request.messages import BodyMode
from tests.builders import address, pick
from tests.request import ext_proc
from tests.request.ext_proc import SPELLINGS, destination, phase, read
from tests.request.fakerouter import IN_HEADER

CODEC = Codec()
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
PICK = pick("id-7", endpoints=(address(1), address(2)))
LIST = f"{address(1)},{address(2)}"


# --- events ---------------------------------------------------------------------------------


def test_request_headers_have_the_body_modes_of_the_data_plane() -> None:
    message = ext_proc.request_headers(
        headers={"x-request-id": "r", "content-type": "café"},
        body_mode=ext_proc.STREAMED,
        response_body_mode=ext_proc.FULL_DUPLEX,
        early=True,
        end_of_stream=True,
    )

    assert CODEC.decode(message) == m.RequestHeaders(
        {
            ":method": "POST",
            ":path": "/v1/completions",
            "x-request-id": "r",
            "content-type": "café",
        },
        end_of_stream=True,
        body_mode=BodyMode.STREAMED,
        sends_body_early=True,
        response_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
    )


def test_unused_headers_are_not_decoded() -> None:
    """Credentials above all: what is not here cannot be logged or kept."""
    headers = {"authorization": "Bearer x", "cookie": "c", "x-session": "s", "x-request-id": "r"}
    message = ext_proc.request_headers(headers=headers)

    taken, keeping = CODEC.decode(message), Codec(session_headers=IN_HEADER.headers).decode(message)
    assert isinstance(taken, m.RequestHeaders)
    assert isinstance(keeping, m.RequestHeaders)
    assert set(taken.headers) == {":method", ":path", "x-request-id"}
    assert set(keeping.headers) - set(taken.headers) == {"x-session"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_header_that_comes_several_times_has_all_its_values(spelling: Any) -> None:
    """Whoever adds one neither replaces the other's nor hides behind it."""
    both = [("x-session", "one"), ("content-encoding", "gzip"), ("X-Session", "two")]
    made = [spelling(name, value) for name, value in [*both, ("content-encoding", "identity")]]
    message = ext_proc.message_of_request_headers(made, body_mode=ext_proc.BUFFERED)

    event = Codec(session_headers=IN_HEADER.headers).decode(message)

    assert isinstance(event, m.RequestHeaders)
    assert event.headers == {"x-session": "one,two", "content-encoding": "gzip,identity"}


def test_of_two_fields_of_one_header_the_bytes_count() -> None:
    """Only the data plane can fill both, and the protocol allows it one."""
    header = ext_proc.text("x-request-id", "text")
    header.raw_value = b"bytes"
    message = ext_proc.message_of_request_headers([header], body_mode=ext_proc.BUFFERED)

    event = CODEC.decode(message)

    assert isinstance(event, m.RequestHeaders)
    assert event.headers == {"x-request-id": "bytes"}


needed_names = st.sampled_from(sorted(NEEDED_HEADERS))
other_names = st.sampled_from(("authorization", "cookie", "x-request", "X-Other", ":scheme"))
texts = st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=20)


@given(
    needed=st.dictionaries(needed_names, texts),
    other=st.dictionaries(other_names, texts),
    spelling=st.sampled_from((*SPELLINGS, lambda name, value: ext_proc.raw(name.upper(), value))),
    data=st.data(),
)
def test_headers_are_the_same_however_a_data_plane_spells_them(
    needed: dict[str, str], other: dict[str, str], spelling: ext_proc.Spelling, data: st.DataObject
) -> None:
    """In `raw_value` or `value`, and under names in any case."""
    utf8 = {name: value.encode().decode("latin-1") for name, value in needed.items()}
    order = data.draw(st.permutations([*utf8.items(), *other.items()]))
    made = [spelling(name, value) for name, value in order]
    event = CODEC.decode(ext_proc.message_of_request_headers(made))

    assert isinstance(event, m.RequestHeaders)
    assert event.headers == utf8


def test_of_two_values_of_one_header_the_bytes_count() -> None:
    both = ext_proc.raw("x-request-id", "bytes")
    both.value = "text"
    event = CODEC.decode(ext_proc.message_of_request_headers([both]))

    assert isinstance(event, m.RequestHeaders)
    assert event.headers == {"x-request-id": "bytes"}


def test_without_protocol_config_the_body_mode_is_not_known() -> None:
    event = CODEC.decode(ext_proc.request_headers(body_mode=None))

    assert isinstance(event, m.RequestHeaders)
    assert (event.body_mode, event.response_body_mode) == (None, None)


@pytest.mark.parametrize(
    ("metadata", "model"),
    [
        (None, None),
        ({}, None),
        ({"other": {"model": "a"}}, None),
        ({"extproc.request": {"model": "a"}}, "a"),
        ({"extproc.request": {"model": ""}}, ""),
        ({"extproc.request": {"else": "a"}}, ""),
        ({"extproc.request": {"model": 5}}, ""),
    ],
)
def test_a_model_in_the_metadata_differs_from_an_empty_one_and_from_none(
    metadata: dict[str, Any] | None, model: str | None
) -> None:
    event = CODEC.decode(ext_proc.request_headers(metadata=metadata))

    assert isinstance(event, m.RequestHeaders)
    assert event.model == model


def test_the_place_of_the_model_is_configured() -> None:
    codec = Codec(model_namespace="mine", model_key="name")
    event = codec.decode(ext_proc.request_headers(metadata={"mine": {"name": "a"}}))

    assert isinstance(event, m.RequestHeaders)
    assert event.model == "a"


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        ({}, None),
        ({"x-gateway-destination-endpoint-subset": ["1.1.1.1:1", "2.2.2.2"]}, True),
        ({"x-gateway-destination-endpoint-subset": "1.1.1.1:1, 2.2.2.2,"}, True),
        ({"x-gateway-destination-endpoint-subset": []}, False),
        ({"x-gateway-destination-endpoint-subset": ""}, False),
        ({"x-gateway-destination-endpoint-subset": 3}, False),
    ],
)
def test_a_subset_is_a_list_or_a_string_and_an_empty_one_allows_none(
    hint: dict[str, Any], subset: bool | None
) -> None:
    event = CODEC.decode(ext_proc.request_headers(metadata={"envoy.lb.subset_hint": hint}))

    assert isinstance(event, m.RequestHeaders)
    expected = {None: None, True: frozenset({"1.1.1.1:1", "2.2.2.2"}), False: frozenset()}[subset]
    assert event.subset == expected


def test_an_ipv6_address_of_a_subset_is_one_however_it_is_written() -> None:
    hint = {"x-gateway-destination-endpoint-subset": ["[2001:DB8:0::1]:80", "2001:db8::2"]}
    event = CODEC.decode(ext_proc.request_headers(metadata={"envoy.lb.subset_hint": hint}))

    assert isinstance(event, m.RequestHeaders)
    assert event.subset == frozenset({"[2001:db8::1]:80", "[2001:db8::2]"})


def test_bodies_and_trailers_differ_by_direction() -> None:
    messages = {
        ext_proc.request_body(b"\x00x", False): m.BodyChunk(b"\x00x", False),
        ext_proc.request_body(b"", True): m.BodyChunk(b"", True),
        ext_proc.request_trailers(): m.RequestTrailers(),
        ext_proc.response_body(b"y", True): m.ResponseBody(b"y", True),
        ext_proc.response_trailers(): m.ResponseTrailers(),
    }
    for message, event in messages.items():
        assert CODEC.decode(message) == event


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("status", "read_as"), [("200", 200), ("503", 503), ("", 0), ("2x0", 0), (9999 * "9", 0)]
)
def test_a_response_has_its_status_or_0(
    status: str, read_as: int, spelling: ext_proc.Spelling
) -> None:
    message = ext_proc.response_headers({":status": status}, end_of_stream=True, spelling=spelling)
    event = CODEC.decode(message)

    assert event == m.ResponseHeaders(read_as, end_of_stream=True)


def test_a_response_has_the_type_and_the_encoding_of_its_body() -> None:
    headers = {":status": "200", "Content-Type": "application/json", "content-encoding": "gzip"}

    assert CODEC.decode(ext_proc.response_headers(headers)) == m.ResponseHeaders(
        200, content_type="application/json", content_encoding="gzip"
    )


def test_a_response_names_the_serving_endpoint_and_its_body_mode() -> None:
    served = {"envoy.lb": {"x-gateway-destination-endpoint-served": address(3)}}
    message = ext_proc.response_headers(
        {":status": "200"}, metadata=served, response_body_mode=ext_proc.FULL_DUPLEX
    )

    assert CODEC.decode(message) == m.ResponseHeaders(
        200, served_by=address(3), body_mode=BodyMode.FULL_DUPLEX_STREAMED
    )
    nobody = ext_proc.response_headers({":status": "200"}, metadata={"envoy.lb": {}})
    assert CODEC.decode(nobody) == m.ResponseHeaders(200)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_a_broken_protocol(data: bytes) -> None:
    try:
        event = CODEC.decode(data)
    except ProtocolError:
        return
    assert isinstance(event, m.EVENT_TYPES)


@given(st.sampled_from(SPELLINGS), st.data())
def test_a_damaged_message_is_an_event_or_a_broken_protocol(
    spelling: ext_proc.Spelling, data: st.DataObject
) -> None:
    metadata = {"extproc.request": {"model": "a"}}
    message = bytearray(ext_proc.request_headers(metadata=metadata, spelling=spelling))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    try:
        event = CODEC.decode(bytes(message))
    except ProtocolError:
        return
    assert isinstance(event, m.EVENT_TYPES)


def test_a_message_without_a_phase_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="without a phase"):
        CODEC.decode(b"")


# --- commands -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (m.ContinueHeaders(PICK), "request_headers"),
        (m.ContinueBody(PICK), "request_body"),
    ],
)
def test_a_destination_goes_out_as_header_and_as_metadata_always_equal(
    command: m.Command, name: str
) -> None:
    answer = CODEC.encode(command)

    assert phase(answer) == name
    assert destination(answer) == (LIST, LIST, "id-7")
    assert read(answer).mode_override is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (m.ContinueHeaders(), "request_headers"),
        (m.ContinueBody(), "request_body"),
        (m.ContinueTrailers(), "request_trailers"),
        (m.ContinueResponseHeaders(), "response_headers"),
        (m.ContinueResponseBody(), "response_body"),
        (m.ContinueResponseTrailers(), "response_trailers"),
    ],
)
@pytest.mark.parametrize("asks_for_load", [True, False])
def test_a_response_without_a_destination_changes_nothing(
    command: m.Command, name: str, asks_for_load: bool
) -> None:
    """Whatever is configured: a request that is not routed yet must not be touched."""
    answer = Codec(asks_for_load=asks_for_load).encode(command)

    assert phase(answer) == name
    message = read(answer)
    common = getattr(getattr(message, name), "response", None)
    assert common is None or common == type(common)()
    assert message.dynamic_metadata is message.mode_override is None


@pytest.mark.parametrize(("keeps_response", "response_mode"), [(False, "SKIP"), (True, "SEND")])
def test_the_body_is_requested_whole_and_the_response_only_if_wanted(
    keeps_response: bool, response_mode: str
) -> None:
    command = m.ContinueHeaders(ask_for_body=True, keeps_response=keeps_response)
    mode = read(CODEC.encode(command)).mode_override

    assert mode.request_body_mode.name == "BUFFERED"
    assert mode.response_header_mode.name == response_mode
    assert mode.response_trailer_mode.name == response_mode
    assert mode.response_body_mode.name == "NONE"


@given(st.binary(max_size=50), st.booleans())
def test_echoed_chunks_arrive_byte_for_byte(data: bytes, end_of_stream: bool) -> None:
    request = read(CODEC.encode(m.EchoBody(data, end_of_stream))).request_body
    response = read(CODEC.encode(m.EchoResponseBody(data, end_of_stream))).response_body

    for body in (request, response):
        chunk = body.response.body_mutation.streamed_response
        assert (chunk.body, chunk.end_of_stream) == (data, end_of_stream)


def test_a_large_reply_is_encoded_once_for_all_who_get_it() -> None:
    bodies = [b"a" * 20_000, b"a" * 20_000, b"b" * 20_000]
    codec = Codec()
    first, same, other = (codec.encode(m.Reply(200, each)) for each in bodies)

    assert same is first
    assert [read(each).immediate_response.body for each in (first, other)] == bodies[1:]


def test_a_reply_ends_the_request_with_status_body_headers_and_details() -> None:
    command = m.Reply(429, b'{"error": 1}', {"retry-after": "2"}, "saturated")
    reply = read(CODEC.encode(command)).immediate_response

    assert (reply.status.code.value, reply.body, reply.details) == (
        429,
        b'{"error": 1}',
        "saturated",
    )
    headers = {option.header.key: option.header.raw_value for option in reply.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"2"}
    assert all(option.header.value == "" for option in reply.headers.set_headers)


def test_more_time_is_requested_in_a_separate_message() -> None:
    message = read(CODEC.encode(m.ExtendTimeout(12.5)))

    assert message.override_message_timeout.total_seconds() == 12.5
    assert message.request_headers is message.request_body is message.immediate_response is None


def headers_set(answer: bytes) -> dict[str, bytes]:
    common = getattr(read(answer), phase(answer)).response
    return {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}


@pytest.mark.parametrize("command", [m.ContinueHeaders(PICK), m.ContinueBody(PICK)])
def test_a_load_report_is_requested_if_configured(command: m.Command) -> None:
    asked = Codec(asks_for_load=True).encode(command)

    assert headers_set(asked)["endpoint-load-metrics-format"] == b"JSON"
    assert destination(asked) == (LIST, LIST, "id-7")
    assert "endpoint-load-metrics-format" not in headers_set(CODEC.encode(command))


@pytest.mark.parametrize(
    "command",
    [m.EchoBody(b"x"), m.Reply(404, b""), m.EchoResponseBody(b"x"), m.ExtendTimeout(1.0)],
)
def test_requesting_load_reports_changes_no_other_response(command: m.Command) -> None:
    assert Codec(asks_for_load=True).encode(command) == CODEC.encode(command)


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("body", [b"new", b""])
def test_a_changed_body_goes_out_with_the_destination_and_its_length(
    body: bytes, length: int | None
) -> None:
    answer = CODEC.encode(m.ContinueBody(PICK, body, length))
    common = read(answer).request_body.response

    assert destination(answer) == (LIST, LIST, "id-7")
    assert common.body_mutation.body == body
    assert lengths(common) == ([] if length is None else [b"3"])


@given(st.sampled_from([0, 1, 100, 127, 128, 16_000, 16_384, 2_100_000]), st.booleans())
def test_a_changed_body_is_encoded_as_by_protobuf(num_bytes: int, has_length: bool) -> None:
    command = m.ContinueBody(PICK, b"x" * num_bytes, num_bytes if has_length else None)
    response = pb.ProcessingResponse.FromString(CODEC.encode(command))

    expected = pb.ProcessingResponse.FromString(CODEC.encode(m.ContinueBody(PICK)))
    common = expected.request_body.response
    common.body_mutation.body = command.body
    if has_length:
        header = common.header_mutation.set_headers.add(append_action=_OVERWRITE).header
        header.key, header.raw_value = "content-length", b"%d" % num_bytes
    assert response == expected


def test_the_length_of_a_body_that_is_streamed_goes_out_with_the_headers() -> None:
    answer = CODEC.encode(m.ContinueHeaders(PICK, 12))

    assert destination(answer) == (LIST, LIST, "id-7")
    assert lengths(read(answer).request_headers.response) == [b"12"]


def lengths(common: Any) -> list[bytes]:
    """The values of `content-length` that a response sets."""
    headers = (option.header for option in common.header_mutation.set_headers)
    return [header.raw_value for header in headers if header.key == "content-length"]


@pytest.mark.parametrize("body", [b"new", b""])
def test_a_response_body_is_replaced_by_nothing_too(body: bytes) -> None:
    mutation = read(CODEC.encode(m.ContinueResponseBody(body))).response_body.response.body_mutation

    assert mutation.body == body
    assert mutation.clear_body is None


def test_a_response_whose_body_changes_loses_its_length() -> None:
    answer = read(CODEC.encode(m.ContinueResponseHeaders(drops_length=True)))

    mutation = answer.response_headers.response.header_mutation
    assert mutation.remove_headers == ["content-length"]
    assert mutation.set_headers == []


def marks_of(message: bytes) -> list[str]:
    """The headers that mark the request as decided."""
    common = getattr(read(message), phase(message)).response
    headers = [each.header for each in common.header_mutation.set_headers]
    return [each.raw_value.decode() for each in headers if each.key == MARK_HEADER]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.booleans()), min_size=1, max_size=20
    )
)
def test_a_response_is_the_same_from_a_template_and_without(
    asked: list[tuple[int, int, bool]],
) -> None:
    """Answers for one destination share their encoding, all but the pick's id."""
    used = Codec()
    for number, count, in_body in asked:
        chosen = pick(id=f"router-{count}", endpoints=(address(number), address(9)))
        mark = "" if count % 2 else f"{chosen.id}.0.ab"
        kind = m.ContinueBody if in_body else m.ContinueHeaders
        command = kind(chosen, mark=mark)

        assert marks_of(used.encode(command)) == [mark] * (mark != "")
        assert read(used.encode(command)) == read(Codec().encode(command))
        told = ",".join(chosen.endpoints)
        assert destination(used.encode(command)) == (told, told, chosen.id)


def test_few_encodings_are_kept_and_answers_beyond_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "MAX_TEMPLATES", 3)
    used = Encoder()
    for number in range(10):
        command = m.ContinueHeaders(pick(id="router-1", endpoints=(address(number),)))

        assert read(used.encode(command)) == read(Encoder().encode(command))
        assert len(used._templates) <= 3
