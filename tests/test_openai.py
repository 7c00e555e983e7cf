"""What a model's name may be; our own answers have OpenAI's shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Model

from extproc.errors import RequestError
from extproc.openai import (
    MAX_MODEL_BYTES,
    check_model,
    error_body,
    error_type,
    is_model_name,
    model_body,
)
from extproc.types import ModelCard, Reason, Rejection
from tests.builders import models_body

DOCUMENT = (Path(__file__).parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")


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
        r"^\| (\d+) \| \[`(\w+)`\]\(.*?\) \| `(\w+)` \|",
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

    @given(st.permutations(["a", "b", "a2", "base", "base2"]))
    def test_has_base_models_first_then_adapters_by_name(self, order: list[str]) -> None:
        cards = [ModelCard(id=i, parent=None if "base" in i else "base") for i in order]

        listed = json.loads(models_body(iter(cards)))["data"]

        assert [card["id"] for card in listed] == ["base", "base2", "a", "a2", "b"]
