"""Whether two answers differ, and the answers that are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.effect import (
    MAX_VALUES,
    NUM_LIKELIEST,
    PROMPTS,
    TOLERANCE,
    has_effect,
    question,
    read_answer,
)

ANSWER = {"a": -0.1, "b": -2.5, "c": -7.0, "d": -7.25, "e": -8.0}


def response(*choices: Any) -> bytes:
    return json.dumps({"choices": choices}).encode()


def choice(index: int, *tops: Any) -> dict[str, Any]:
    return {"index": index, "text": "a", "logprobs": {"top_logprobs": tops, "tokens": ["a"]}}


def test_both_are_asked_greedily_for_one_token_after_several_prompts() -> None:
    asked = question("sql")

    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("sql", 1, 0)
    assert (len(asked["prompt"]), asked["logprobs"]) == (len(PROMPTS), NUM_LIKELIEST)


def test_answers_are_in_the_order_of_the_prompts() -> None:
    read = read_answer(response(choice(2, {"c": -3}), choice(0, {"a": -1}), choice(1, {"b": -2})))

    assert read == ({"a": -1}, {"b": -2}, {"c": -3})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"choices":"\xff"}',
        response(choice(0, ANSWER)),
        response(*(choice(index) for index in range(3))),
        response(*(choice(index, None) for index in range(3))),
        response(*({"index": index, "logprobs": None} for index in range(3))),
    ],
)
def test_what_says_no_probabilities_is_no_answer(body: bytes) -> None:
    assert read_answer(body) is None


@given(st.lists(st.floats(-TOLERANCE, TOLERANCE), min_size=5, max_size=5))
def test_what_differs_by_rounding_has_no_effect(errors: list[float]) -> None:
    near = {
        token: value + 0.99 * error
        for (token, value), error in zip(ANSWER.items(), errors, strict=True)
    }

    assert not has_effect([ANSWER, ANSWER], [ANSWER, near])


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"c": -7.002}, True),
        ({"a": -0.5}, True),
        ({"e": None, "f": -8.0}, False),  # two that are alike, at the end
        ({"d": None, "e": None, "f": -7.0, "g": -8.0}, True),
    ],
)
def test_another_probability_or_other_tokens_are_an_effect(
    change: dict[str, float | None], differs: bool
) -> None:
    other = {token: value for token, value in {**ANSWER, **change}.items() if value is not None}

    assert has_effect([ANSWER, ANSWER], [ANSWER, other]) is differs


def test_an_answer_of_more_values_than_any_engine_writes_is_none() -> None:
    first = {"logprobs": {"top_logprobs": [{"a": -1.0}]}}
    said = json.dumps({"choices": [{"index": n, **first} for n in range(len(PROMPTS))]})
    padded = f'{said[:-1]}, "x": [{", ".join(["1"] * MAX_VALUES)}]}}'

    assert read_answer(said.encode()) is not None
    assert read_answer(padded.encode()) is None
