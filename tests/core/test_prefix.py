"""`model` from the beginning of a body: what is found is what the whole body says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.errors import RequestError
from extproc.core.prefix import MAX_MEMBERS, model_in_prefix
from extproc.core.types import Reason
from tests.core.json_documents import documents, requests

patient = settings(deadline=None)  # a busy machine is no failure


@patient
@given(requests())
def test_every_cut_gives_nothing_before_the_value_is_complete_and_the_model_after(
    request: tuple[str, str, int],
) -> None:
    text, model, complete_at = request
    body = text.encode()
    assert json.loads(body)["model"] == model  # the strategy keeps its word

    found = [model_in_prefix(body[:cut]) for cut in range(len(body) + 1)]

    assert found == [None] * complete_at + [model] * (len(body) + 1 - complete_at)


@patient
@given(documents())
def test_of_a_whole_document_is_what_json_loads_gives(text: str) -> None:
    """Duplicates included: the last one wins."""
    document = json.loads(text)
    model = document.get("model") if isinstance(document, dict) else None
    try:
        expected = model if isinstance(model, str) and model.encode() else None
    except UnicodeEncodeError:  # a lone surrogate is no model's name
        expected = None
    try:
        found = model_in_prefix(text.encode())
    except RequestError:
        found = None

    assert found == expected or (found is None and expected and not expected.isprintable())


@patient
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ model1\n', max_size=60).map(str.encode))
def test_any_bytes_give_a_name_nothing_or_a_request_error(prefix: bytes) -> None:
    try:
        found = model_in_prefix(prefix)
    except RequestError:
        return
    assert found is None or found.encode() in prefix or b"\\" in prefix


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b" ",
        b"{",
        b'{"mod',
        b'{"model"',
        b'{"model":',
        b'{"model": "adap',
        b'{"model": "adap\\"',
        b'{"model": "adap\\u00',
        b'{"x": {"model": "a"}, ',
        b'{"x": [{"model": "a"}, ',
        b'{"x": "\\"model\\": \\"a\\", ',
        b'{"mo\\qdel": "a", ',
        b'{"mo\\u006": "a", ',
        b'{"Model": "a", ',
        b'{model: "a", ',
        b"{'model': 'a', ",
        b'["model", "a", ',
        b'"model": "a", ',
        b'{"model" "a", ',
        b'{"x": 1 "model": "a", ',
        b'{"x": 1; "model": "a", ',
        b'{"x": tru, "model": "a", ',
        b'{,"model": "a", ',
        b'{"model": "a\nb", ',
        b'{"model": null, ',
        b'{"model": 5, ',
        b'{"model": ["a"], ',
        b'{"x": ' + b"[" * 100_000,
        '{"model": "a", '.encode("utf-16"),
        '{"model": "a", '.encode("utf-16-le"),
    ],
)
def test_is_nothing_where_no_complete_top_level_string_stands(prefix: bytes) -> None:
    assert model_in_prefix(prefix) is None


@pytest.mark.parametrize(
    ("prefix", "model"),
    [
        (b'{"model": "a"', "a"),
        (b'{"model": "a", "messages": [{"role": "us', "a"),
        (b'{"messages": ["\\"", {"model": "b"}], "model": "a", "x": 1', "a"),
        (b'{"mo\\u0064el": "\\u0061"', "a"),
        (b'{"model": "a", "model": "b", "model": "c', "b"),
        (b'\xef\xbb\xbf{"model": "a", ', "a"),
        ('{"model": "é", "x": "é'.encode()[:-1], "é"),
        (b'{"model": "a", "x": "\xed\xa0', "a"),
        (b'{"x": "\xed\xa0\x80", "model": "a"', "a"),
        (b'{"x": [NaN, -Infinity, 1e9], "model": "a"', "a"),
        (b'{"model": "a"} trailing', "a"),
    ],
)
def test_is_found_once_its_value_is_complete(prefix: bytes, model: str) -> None:
    assert model_in_prefix(prefix) == model


def test_that_is_no_models_name_is_refused_at_once() -> None:
    with pytest.raises(RequestError) as raised:
        model_in_prefix(b'{"model": "a\\u0000", ')

    assert raised.value.rejection.reason == Reason.INVALID_BODY


def test_is_looked_for_in_so_many_members_only() -> None:
    """Else a body of nothing but tiny members would hold the event loop."""
    members = b'"x": 1, ' * (MAX_MEMBERS - 1)

    assert model_in_prefix(b"{" + members + b'"model": "a", ') == "a"
    assert model_in_prefix(b"{" + members + b'"x": 1, "model": "a", ') is None
