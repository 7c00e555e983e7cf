"""The request's model is what the engine reads; our own answers have OpenAI's shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Model

from extproc.core.errors import RequestError
from extproc.core.openai import (
    MAX_MODEL_BYTES,
    check_model,
    error_body,
    error_type,
    extract_model,
    is_model_name,
    model_body,
    models_body,
    read_body,
)
from extproc.core.types import ModelCard, Reason, Rejection
from tests.core.json_documents import documents

patient = settings(deadline=None)  # a busy machine is no failure

NO_MODEL = object()
DOCUMENT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def engine_reads(body: bytes) -> Any:
    """What the engine's `json.loads` makes of a body; NO_MODEL where it gives no such field."""
    try:
        return json.loads(body)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return NO_MODEL


def is_name(model: Any) -> bool:
    """Whether `check_model` promises to take it: every sane string."""
    return (
        isinstance(model, str)
        and 0 < len(model.encode("utf-8", "surrogatepass")) <= MAX_MODEL_BYTES
        and not any(
            ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in model
        )
    )


def reason_of(body: bytes) -> Reason:
    with pytest.raises(RequestError) as raised:
        read_body(body)

    assert raised.value.rejection.status == 400
    return raised.value.rejection.reason


def agrees_with_the_engine(body: bytes) -> None:
    expected = engine_reads(body)
    if is_name(expected):
        assert extract_model(body) == expected
        return
    try:
        model = extract_model(body)
    except RequestError:
        return
    # Accepted here although json.loads gives no name: only for bodies that the engine refuses.
    assert expected is NO_MODEL, model


class TestModel:
    @patient
    @given(documents(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]))
    def test_is_what_json_loads_gives_in_every_encoding(self, text: str, encoding: str) -> None:
        agrees_with_the_engine(text.encode(encoding))

    @patient
    @given(documents(), st.data())
    def test_is_what_json_loads_gives_after_any_damage(
        self, text: str, data: st.DataObject
    ) -> None:
        body = bytearray(text.encode())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(body)))
            body[at : at + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=2))
        agrees_with_the_engine(bytes(body))

    @patient
    @given(st.binary(max_size=40))
    def test_is_what_json_loads_gives_on_any_bytes(self, body: bytes) -> None:
        agrees_with_the_engine(body)

    @pytest.mark.parametrize(
        ("body", "model"),
        [
            (b'{"model":"a","model":"b"}', "b"),
            (b'{"model":"a","mo\\u0064el":"b"}', "b"),
            (b'{"mo\\u0064el":"b","model":"a"}', "a"),
            (b'{"model":1,"model":"a"}', "a"),
            (b'{"model":"\\ud800","model":"a"}', "a"),
            (b'{"x":{"model":"b"},"model":"a","y":[{"model":"c"}]}', "a"),
            (b'{"model":"a","x":NaN,"y":-Infinity,"z":1e999}', "a"),
            (b'{"model":"a","x":"\\ud800"}', "a"),
            (b'{"model":"a","x":"\xed\xa0\x80"}', "a"),
            (b'\xef\xbb\xbf{"model":"a"}', "a"),
            ('{"model":"é"}'.encode("utf-16"), "é"),
            (b' \t\r\n{ "model" : "a" } ', "a"),
            (b'{"model":"\\ud83d\\ude00"}', "\U0001f600"),
            (b'{"model":"a","x":' + b"[" * 400 + b"]" * 400 + b"}", "a"),
        ],
    )
    def test_survives_what_python_accepts(self, body: bytes, model: str) -> None:
        assert engine_reads(body) == model
        assert extract_model(body) == model

    @pytest.mark.parametrize(
        "body", [b'{"model":"a","x":"\xff"}', b'{"model":"a","x":' + b"9" * 5000 + b"}"]
    )
    def test_of_a_body_that_only_the_engine_refuses_is_the_one_it_shows(self, body: bytes) -> None:
        assert engine_reads(body) is NO_MODEL
        assert extract_model(body) == "a"


class TestRefusedBody:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b" ",
            b"{",
            b'{"model":"a"',
            b'{"model":"a"} {}',
            b'{"model":"a",}',
            b'{"model":"a"}\x00',
            b"{'model':'a'}",
            b'{"model":"a\n"}',
            b'{"model":"\xff"}',
            b"[" * 200_000,
            b'{"x":' + b"[" * 200_000,
            b"[" + b"9" * 5000 + b", NaN]",
        ],
    )
    def test_that_is_no_json_is_invalid_json(self, body: bytes) -> None:
        assert reason_of(body) == Reason.INVALID_JSON

    @pytest.mark.parametrize("body", [b"[]", b'"model"', b"1", b"null", b'[{"model":"a"}]'])
    def test_that_is_no_object_is_an_invalid_body(self, body: bytes) -> None:
        assert reason_of(body) == Reason.INVALID_BODY

    @pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b'{"x":NaN}'])
    def test_without_a_model_says_so(self, body: bytes) -> None:
        assert reason_of(body) == Reason.MISSING_MODEL

    @pytest.mark.parametrize(
        "model", ["1", "[]", "{}", "true", '"\\u0000"', '"a\\n"', '"\\u0085"', '"\\ud800"']
    )
    def test_with_a_model_that_is_no_name_is_an_invalid_body(self, model: str) -> None:
        assert reason_of(b'{"model":%s}' % model.encode()) == Reason.INVALID_BODY

    def test_is_empty_in_so_many_words(self) -> None:
        with pytest.raises(RequestError, match="body is empty"):
            read_body(b"")

    def test_error_neither_quotes_nor_keeps_the_prompt(self) -> None:
        """json's exceptions carry the document; none may hang on the error that is logged."""
        for body in (b'{"prompt": "secret" oops', b'{"prompt": "secret", "model": "\xff"}'):
            with pytest.raises(RequestError) as raised:
                read_body(body)

            assert "secret" not in raised.value.rejection.message
            assert raised.value.__context__ is None
            assert raised.value.__cause__ is None


class TestModelName:
    def test_may_have_exactly_the_longest_length_in_bytes(self) -> None:
        longest = "é" * (MAX_MODEL_BYTES // 2)

        assert check_model(longest) == longest

    @pytest.mark.parametrize("model", ["é" * (MAX_MODEL_BYTES // 2) + "x", "x" * 10_000])
    def test_over_the_longest_length_is_refused(self, model: str) -> None:
        with pytest.raises(RequestError) as raised:
            check_model(model)

        assert raised.value.rejection.reason == Reason.INVALID_BODY

    @pytest.mark.parametrize("model", ["org/name", "a b", "a,b", "日本", "a\u200db", "-", "\u2028"])
    def test_may_be_any_other_text(self, model: str) -> None:
        assert check_model(model) == model


class TestStoredResponse:
    @pytest.mark.parametrize(
        ("member", "expected"),
        [
            (b"", None),
            (b',"previous_response_id":null', None),
            (b',"previous_response_id":"resp_1"', "resp_1"),
            (b',"previous_response_id":"resp_1","x":NaN', "resp_1"),
            (b',"previous_response_id":"resp_1","previous_response_id":null', None),
            (b',"x":{"previous_response_id":"resp_1"}', None),
            (b',"previous_response_id":5', 5),
        ],
    )
    def test_is_read_with_the_model(self, member: bytes, expected: object) -> None:
        fields = read_body(b'{"model":"a"' + member + b"}")

        assert fields.model == "a"
        assert fields.previous_response_id == expected


class TestErrorBody:
    def test_has_the_shape_of_openai(self) -> None:
        rejection = Rejection(404, Reason.MODEL_NOT_FOUND, 'No "x" here.', param="model")

        assert json.loads(error_body(rejection)) == {
            "error": {
                "message": 'No "x" here.',
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        }

    @pytest.mark.parametrize(
        ("status", "word"),
        [
            *((status, "invalid_request_error") for status in (400, 404, 405, 413, 415)),
            (429, "rate_limit_error"),
            (500, "server_error"),
            (503, "service_unavailable_error"),
        ],
    )
    def test_type_follows_the_status(self, status: int, word: str) -> None:
        assert error_type(status) == word

    def test_says_null_where_no_field_is_at_fault(self) -> None:
        body = json.loads(error_body(Rejection(503, Reason.NO_ENDPOINTS, "None ready.")))

        assert body["error"]["param"] is None


class TestErrorTable:
    """docs/errors.md is what clients are told."""

    ROWS = re.findall(
        r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|",
        DOCUMENT,
        re.MULTILINE,
    )

    def test_has_every_reason_once(self) -> None:
        assert sorted(code for _, code, _ in self.ROWS) == sorted(Reason)

    def test_has_the_type_that_the_body_has(self) -> None:
        assert [error_type(int(status)) for status, _, _ in self.ROWS] == [
            word for _, _, word in self.ROWS
        ]

    def test_has_the_longest_model_name(self) -> None:
        (limit,) = re.findall(r"longer than (\d+) bytes", DOCUMENT)

        assert int(limit) == MAX_MODEL_BYTES


@patient
@given(st.text(max_size=300) | st.sampled_from(["", "a" * 256, "a" * 257, "ä" * 129, "a\x00"]))
def test_a_model_name_is_what_a_request_may_name(name: str) -> None:
    try:
        is_allowed = check_model(name) == name
    except RequestError:
        is_allowed = False

    assert is_model_name(name) is is_allowed


class TestModelList:
    BASE = ModelCard(id="base", root="org/base", created_wall_s=7, max_model_len=4096)
    ADAPTER = ModelCard(id="a", parent="base", root="/adapters/a", created_wall_s=8)

    def test_card_is_vllms(self) -> None:
        assert json.loads(model_body(self.BASE)) == {
            "id": "base",
            "object": "model",
            "created": 7,
            "owned_by": "vllm",
            "root": "org/base",
            "parent": None,
            "max_model_len": 4096,
        }

    def test_card_is_read_by_the_official_client(self) -> None:
        model = Model.model_validate_json(model_body(self.ADAPTER), strict=True)

        assert (model.id, model.object, model.owned_by) == ("a", "model", "vllm")

    def test_card_without_a_root_says_null(self) -> None:
        assert json.loads(model_body(ModelCard(id="x")))["root"] is None

    def test_of_an_empty_pool_is_an_empty_list(self) -> None:
        assert json.loads(models_body([])) == {"object": "list", "data": []}

    @patient
    @given(st.permutations(["a", "b", "a2", "base", "base2"]))
    def test_has_base_models_first_then_adapters_by_name(self, order: list[str]) -> None:
        cards = [ModelCard(id=i, parent=None if "base" in i else "base") for i in order]

        listed = json.loads(models_body(iter(cards)))["data"]

        assert [card["id"] for card in listed] == ["base", "base2", "a", "a2", "b"]
