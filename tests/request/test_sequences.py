"""What a body makes an engine run is read, however it is written and cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_SEQUENCES
from extproc.request.bodyslices import WORK_PER_PASS
from extproc.request.jsonmodel import JsonReader
from extproc.request.jsonsmall import LISTS, SMALL_BYTES
from tests.request.test_jsonmodel import read as fed

EMPTY = '""'
TEXTS = st.text(max_size=4)
TOKENS = st.lists(st.integers(0, 9), max_size=4)
PROMPTS = (
    TEXTS
    | st.lists(TEXTS | TOKENS, max_size=6)
    | TOKENS
    | st.lists(st.dictionaries(TEXTS, TEXTS, max_size=1), max_size=3)
    | st.lists(st.lists(st.dictionaries(TEXTS, TEXTS, max_size=1), max_size=2), max_size=3)
)
NUMBERS: st.SearchStrategy[Any] = st.integers(-2, 2 * MAX_SEQUENCES) | st.sampled_from(
    (None, 3.0, "4", " 5 ", "x", [2], {})
)
BODIES = st.dictionaries(st.sampled_from(LISTS), PROMPTS, max_size=3).flatmap(
    lambda prompts: st.fixed_dictionaries(
        {"model": st.just("a")},
        optional={name: NUMBERS for name in ("n", "best_of", "max_tokens")},
    ).map(lambda fields: prompts | fields)
)


def read(*chunks: bytes) -> JsonReader:
    reader = fed(*chunks)
    assert reader.result() == "a"
    return reader


def in_bytes(body: bytes) -> JsonReader:
    return read(*(body[at : at + 1] for at in range(len(body))))


def with_nan(body: bytes) -> JsonReader:
    """A body that msgspec refuses and Python accepts."""
    return read(body[:-1] + b',"x":NaN}')


READINGS = pytest.mark.parametrize("reading", [read, in_bytes, with_nan])


def whole(value: Any) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 1


def num_prompts(value: Any) -> int:
    is_many = isinstance(value, list) and value and isinstance(value[0], str | list)
    return len(value) if is_many else 1


@given(BODIES)
def test_a_body_is_as_many_sequences_as_answers_to_its_prompts(fields: dict[str, Any]) -> None:
    answers = max(1, whole(fields.get("n")), whole(fields.get("best_of")))
    prompts = max([1, *(num_prompts(fields[name]) for name in LISTS if name in fields)])
    body = json.dumps(fields).encode()

    for reading in (read, in_bytes, with_nan):
        assert reading(body).num_sequences == min(MAX_SEQUENCES, answers * prompts)


@READINGS
@pytest.mark.parametrize(
    ("members", "num"),
    [
        ('"prompt":"x"', 1),
        ('"n":30', 30),
        ('"\\u006e":30', 30),
        ('"n":2,"n":3', 3),
        ('"n":3,"n":null', 1),
        ('"n":true', 1),
        ('"n":3e1', 30),
        ('"n":"30"', 30),
        ('"n":"\\u0033"', 3),
        ('"n":1e999', 1),
        (f'"n":{"9" * 30}', MAX_SEQUENCES),
        (f'"n":"{"9" * 5000}"', 1),
        ('"n":2,"best_of":5', 5),
        ('"n":2,"prompt":[[1,2],[3]]', 4),
        ('"n":2,"prompt":[1,2,3]', 2),
        ('"prompt":["a","b"],"prompt":"a"', 1),
        ('"prompt":[ \n["a,b",[",",{"x":"]"}]] , ["]\\""]\t]', 2),
        ('"messages":[{"role":"user","content":"x"},{"role":"user"}]', 1),
        ('"messages":[[{"role":"user"}],[{"role":"user"}],[]]', 3),
        ('"input":["a","b","c"]', 3),
        ('"documents":["a","b"],"query":"c"', 2),
        ('"y":{"n":30,"prompt":["a","b"]}', 1),
        (f'"prompt":[{",".join(2 * MAX_SEQUENCES * ["0"])}]', 1),
        (f'"prompt":[{",".join(2 * MAX_SEQUENCES * [EMPTY])}]', MAX_SEQUENCES),
    ],
)
def test_is_read_however_it_is_written(reading: Any, members: str, num: int) -> None:
    assert reading(b'{"model":"a",%b}' % members.encode()).num_sequences == num


@READINGS
@pytest.mark.parametrize(
    ("members", "num"),
    [
        ('"n":1', None),
        ('"max_tokens":5', 5),
        ('"max_tokens":"5"', 5),
        ('"max_tokens":5,"max_completion_tokens":7', 7),
        ('"max_tokens":5,"max_completion_tokens":null', 5),
        ('"max_output_tokens":9', 9),
    ],
)
def test_the_most_tokens_of_an_answer_are_read(reading: Any, members: str, num: int | None) -> None:
    assert reading(b'{"model":"a",%b}' % members.encode()).max_tokens == num


@pytest.mark.parametrize("prompts", ['["a",1]', '["a"}', '["a" "b"]', '["a",]', '["a",tru]'])
def test_a_list_that_engines_refuse_is_theirs_to_refuse(prompts: str) -> None:
    assert in_bytes(b'{"model":"a","prompt":%b}' % prompts.encode()).num_sequences == 1


def test_prompts_of_a_body_that_is_not_small_are_counted() -> None:
    text = json.dumps("x" * (SMALL_BYTES // 4)).encode()

    assert read(b'{"model":"a","n":2,"prompt":[%b]}' % b",".join(5 * [text])).num_sequences == 10


def test_the_cost_of_a_list_is_linear_in_its_length() -> None:
    reader = read(b'{"model":"a","prompt":[%b]}' % b",".join(SMALL_BYTES * [b'""']))

    assert reader.num_sequences == MAX_SEQUENCES
    assert reader.work < 256 * MAX_SEQUENCES + 3 * SMALL_BYTES + 2 * WORK_PER_PASS
