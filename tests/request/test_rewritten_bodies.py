"""Another `model` in a body: at every place of it, and no other byte changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.request.jsonmodel import JsonReader
from extproc.request.multipart import FormReader
from extproc.types import Reason
from tests.request.json_documents import documents, requests
from tests.request.test_jsonmodel import cut

FORM_TYPE = "multipart/form-data; boundary=b"
TARGETS = st.sampled_from(["b", "org/adapter@2", "日本", 'say "b"\\', "x" * 256])


def rewritten(body: bytes, target: str, cuts: list[int] | None = None) -> bytes | None:
    """The body with another model; None where it is refused, but not for want of one."""
    reader = JsonReader(lambda _model: True)
    return by(reader, body, target, cuts)


def by(
    reader: JsonReader | FormReader, body: bytes, target: str, cuts: list[int] | None = None
) -> bytes | None:
    try:
        for chunk in cut(body, cuts or []):
            at = 0
            while at < len(chunk):
                at = reader.feed(chunk, at)
        reader.result()
    except RequestError as error:
        if error.rejection.reason is not Reason.MISSING_MODEL:
            return None
    return reader.rewritten(body, target)


def members(text: bytes) -> list[tuple[str, Any]]:
    """The members of an object in order, repeated ones too; NaN is made equal to itself."""
    pairs: list[tuple[str, Any]] = json.loads(
        text, object_pairs_hook=list, parse_constant=lambda name: ("constant", name)
    )
    return pairs


@given(documents(), TARGETS, st.booleans(), st.lists(st.integers(0, 500), max_size=5))
def test_a_rewritten_object_differs_in_model_alone_and_in_each_of_them(
    text: str, target: str, has_mark: bool, cuts: list[int]
) -> None:
    body = text.encode("utf-8-sig" if has_mark else "utf-8")
    new = rewritten(body, target, cuts)
    try:
        before = members(body)
    except ValueError:
        return
    if new is None:
        return
    keys = [key for key, _ in before]
    wanted = [(key, target if key == "model" else value) for key, value in before]
    missing = [] if "model" in keys else [("model", target)]

    assert members(new) == missing + wanted


@given(requests(), TARGETS, st.lists(st.integers(0, 500), max_size=5))
def test_every_byte_outside_of_the_value_stays(
    request: tuple[str, str, int], target: str, cuts: list[int]
) -> None:
    text, model, end = request
    body, token = text.encode(), json.dumps(model).encode()
    value = json.dumps(target, ensure_ascii=False).encode()

    new = rewritten(body, target, cuts)
    assert new in (None, body[: end - len(token)] + value + body[end:])


PLACES = [
    (b'{"model":"a"}', b'{"model":"b"}'),
    (b' { "model" :\n"a" , "x" : 1 } \n', b' { "model" :\n"b" , "x" : 1 } \n'),
    (b'{"model":"a","model":"c"}', b'{"model":"b","model":"b"}'),
    (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"b"}'),
    (b'{"model":"\\u0061\\"\\\\"}', b'{"model":"b"}'),
    (b'{"model":1,"model":"a"}', b'{"model":"b","model":"b"}'),
    (b'{"model":[1,{"model":2}],"model":"a"}', b'{"model":"b","model":"b"}'),
    (b'{"model":"' + 2000 * b"x" + b'","model":"a"}', b'{"model":"b","model":"b"}'),
    (
        b'{"x":{"model":"c"},"y":"model","model":"a"}',
        b'{"x":{"model":"c"},"y":"model","model":"b"}',
    ),
    (b'{"model":null}', b'{"model":"b"}'),
    (b'{"model":"","x":NaN}', b'{"model":"b","x":NaN}'),
    (b'{"x":1}', b'{"model":"b","x":1}'),
    (b'{"x":"\\u0000"}', b'{"model":"b","x":"\\u0000"}'),
    (b" { } ", b' {"model":"b" } '),
    (b'\xef\xbb\xbf{"x":{"model":"a"}}', b'\xef\xbb\xbf{"model":"b","x":{"model":"a"}}'),
]


@pytest.mark.parametrize(("body", "expected"), PLACES)
def test_every_top_level_model_is_rewritten_or_one_is_put_in(body: bytes, expected: bytes) -> None:
    every_byte = list(range(len(body)))

    assert rewritten(body, "b") == expected
    assert rewritten(body, "b", every_byte) == expected


def test_the_usual_small_body_is_rewritten_without_reading_it_twice() -> None:
    reader = JsonReader(lambda _model: True)
    body = b'{"messages":[{"role":"user","content":"say \\"model\\""}],"model":"a"}'

    assert by(reader, body, "b") == body.replace(b'"a"', b'"b"')
    assert reader.work == 0
    assert reader.prompt


def test_a_small_body_that_is_read_twice_keeps_its_prompt() -> None:
    reader = JsonReader(lambda _model: True)
    by(reader, b'{"prompt":"p","model":"a","x":{"model":1}}', "b")

    assert reader.work > 0
    assert [bytes(part) for part in reader.prompt if part] == [b'"p"']


def field(name: str, content: str) -> str:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{content}\r\n'


@given(
    st.lists(
        st.tuples(st.sampled_from(["model", "file", "x"]), st.sampled_from(["a", "", "\r\n", "b"])),
        max_size=4,
    ),
    st.lists(st.integers(0, 500), max_size=5),
)
def test_a_rewritten_form_differs_in_model_alone_and_in_each_of_them(
    fields: list[tuple[str, str]], cuts: list[int]
) -> None:
    text = "".join(field(*each) for each in fields) + "--b--\r\n"
    wanted = "".join(field(name, "é" if name == "model" else it) for name, it in fields)
    missing = "" if any(name == "model" for name, _ in fields) else field("model", "é")
    new = by(FormReader(FORM_TYPE), text.encode(), "é", cuts)

    assert new in (None, f"{missing}{wanted}--b--\r\n".encode())
    assert new is not None or ("model", "\r\n") in fields
