"""Responses name the model that the client wrote, however they are cut, and stay the same else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.restoring import EventRestorer, JsonRestorer, Restorer, restorer_of
from tests.request.json_documents import documents, objects, values

SSE = "text/event-stream"
JSON = "application/json"


def restored(
    body: bytes, kind: str = JSON, cuts: list[int] | None = None, served: str = "p"
) -> bytes:
    """The whole body as the client gets it."""
    made = restorer_of(kind, "", served=served, written="c")
    assert made is not None
    edges = [0, *sorted(each % (len(body) + 1) for each in cuts or []), len(body)]
    return b"".join(made.feed(body[a:b]) for a, b in pairwise(edges)) + made.end()


def every_byte(body: bytes) -> list[int]:
    return list(range(len(body)))


BODIES = [
    (b'{"id":"x","model":"p","choices":[]}', b'{"id":"x","model":"c","choices":[]}'),
    (b'{ "model" : "\\u0070" }', b'{ "model" : "c" }'),
    (b'{"choices":[{"model":"p"}],"model":"p"}\n', b'{"choices":[{"model":"p"}],"model":"c"}\n'),
    (b'{"type":"r","response":{"id":1,"model":"p"},"x":1}',
     b'{"type":"r","response":{"id":1,"model":"c"},"x":1}'),
    (b'{"message":{"content":[],"model":"p"}}', b'{"message":{"content":[],"model":"c"}}'),
    (b'{"model":"other","model":"p"}', b'{"model":"other","model":"c"}'),
    (b'{"x":NaN,"model":"p"}', b'{"x":NaN,"model":"c"}'),
]  # fmt: skip
UNCHANGED = [
    b'{"model":"other"}',
    b'{"model":null}',
    b'{"model":["p"]}',
    b'{"model":p}',
    b'{"error":{"message":"the model `p`","model":"p"}}',
    b'{"response":"p","message":[{"model":"p"}]}',
    b'{"response":{"response":{"model":"p"}}}',
    b'["p"]',
    b'{"model":"p',
    b'{"model":"p\n"}',
    b'{"model":"' + 5000 * b"p" + b'"}',
    b"",
    b"Internal Server Error",
]


@pytest.mark.parametrize(("body", "expected"), BODIES)
def test_the_model_that_the_pod_read_is_put_back_in_json(body: bytes, expected: bytes) -> None:
    assert restored(body) == expected
    assert restored(body, cuts=every_byte(body)) == expected


@pytest.mark.parametrize("body", UNCHANGED)
def test_nothing_else_is_changed_in_json(body: bytes) -> None:
    assert restored(body) == body
    assert restored(body, cuts=every_byte(body)) == body


@given(documents(), st.lists(st.integers(0, 500), max_size=6))
def test_a_json_body_differs_in_one_model_alone_however_it_is_cut(
    text: str, cuts: list[int]
) -> None:
    body = text.encode()
    new = restored(body, cuts=cuts, served="a")

    if new != body:
        before, after = (json.loads(each, object_pairs_hook=list) for each in (body, new))
        before[before.index(("model", "a"))] = ("model", "c")
        assert json.dumps(before) == json.dumps(after)  # NaN is not equal to itself
    assert new == restored(body, served="a")


ENDS = st.sampled_from(["\n", "\r\n", "\r"])
BEFORE = '{"id":"x","object":"chunk","model":'


@st.composite
def events(draw: st.DrawFn) -> str:
    """A stream as pods write it, and as they may: of several kinds of events and ends of lines."""
    end = draw(ENDS)
    lines = []
    for kind in draw(st.lists(st.integers(0, 6), max_size=6)):
        payload = draw(objects(values, st.sampled_from(['"x"', '"y"'])))
        lines += {
            0: [f'data: {BEFORE}"p","choices":{payload}}}'],
            1: [f'data: {BEFORE}"other","choices":{payload}}}'],
            2: ["data: [DONE]"],
            3: [": keep-alive"],
            4: [
                "event: x",
                "id: 1",
                f'data:{{"type":"t","response":{{"model":"p","y":{payload}}}}}',
            ],
            5: ["data: {", 'data:"model":"p"', "data", "dat", "data: }"],
            6: [f"data: {payload}"],
        }[kind]
        lines.append("")
    return end.join([*lines, ""])


@given(events(), st.lists(st.integers(0, 2000), max_size=8))
def test_a_stream_of_events_comes_out_the_same_however_it_is_cut(
    text: str, cuts: list[int]
) -> None:
    body = text.encode()
    whole = restored(body, SSE)

    assert restored(body, SSE, cuts) == whole
    assert restored(body, SSE, every_byte(body)) == whole


@given(events())
def test_each_event_names_what_the_client_wrote_and_is_the_same_else(text: str) -> None:
    new = restored(text.encode(), SSE).decode()
    wanted = text.replace(f'{BEFORE}"p"', f'{BEFORE}"c"')
    wanted = wanted.replace('"response":{"model":"p"', '"response":{"model":"c"')
    for end in ("\n", "\r\n", "\r"):
        wanted = wanted.replace(f'data: {{{end}data:"model":"p"', f'data: {{{end}data:"model":"c"')

    assert new == wanted


STREAM = "".join(f'data: {BEFORE}"p","choices":[{n}]}}\n\n' for n in range(4)) + "data: [DONE]\n\n"


def test_the_usual_stream_is_read_once_and_then_known_by_its_beginning() -> None:
    made = EventRestorer("p", "c")
    body = STREAM.encode()
    cuts = [0, 60, len(body) // 2 - 3, len(body)]
    found = b"".join(made.feed(body[a:b]) for a, b in pairwise(cuts))

    assert found.decode() == STREAM.replace('"p"', '"c"')
    assert made._prefix == f'data: {BEFORE}"p"'.encode()


def test_a_part_of_a_known_event_is_read_like_any() -> None:
    made = EventRestorer("p", "c")
    event = f'data: {BEFORE}"p","x":1}}\n\n'.encode()
    parts = [made.feed(event), made.feed(event[:-1]), made.feed(event[-1:])]

    assert parts[0] == parts[1] + parts[2] == event.replace(b'"p"', b'"c"')


def test_bytes_go_on_as_they_come_but_for_a_part_of_the_model() -> None:
    made: Restorer = EventRestorer("p", "c")
    assert made.feed(b'data: {"x":1,"mo') == b'data: {"x":1,"mo'
    assert made.feed(b'del": "') == b'del": '
    assert made.feed(b"p") == b""
    assert made.feed(b'","y') == b'"c","y'
    assert made.feed(b'":[') == b'":['


def test_a_value_that_never_ends_goes_on_at_the_end() -> None:
    assert restored(b'data: {"model":"p', SSE) == b'data: {"model":"p'
    assert restored(b'data: {"model":"p\n\n', SSE) == b'data: {"model":"p\n\n'
    assert restored(b'data: {"model":"p\ndata: "}\n\n', SSE) == b'data: {"model":"p\ndata: "}\n\n'


@pytest.mark.parametrize(
    ("kind", "encoding", "made"),
    [
        ("text/event-stream; charset=utf-8", "", EventRestorer),
        ("Application/JSON", "identity", JsonRestorer),
        ("application/json", "gzip", type(None)),
        ("text/plain", "", type(None)),
        ("", "", type(None)),
    ],
)
def test_compressed_and_other_bodies_stay_as_they_are(kind: str, encoding: str, made: type) -> None:
    assert type(restorer_of(kind, encoding, served="p", written="c")) is made
