"""The model that is read is the engine's, however a body is cut; its length bounds the cost."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from cProfile import Profile
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.openai import MAX_MODEL_BYTES
from extproc.request import jsonsmall
from extproc.request.bodyslices import SLICE_BYTES, WORK_PER_PASS
from extproc.request.jsonmodel import MAX_MEMBERS, JsonReader
from extproc.request.jsonsmall import SMALL_BYTES, is_cut_off
from extproc.types import Reason
from tests.request.json_documents import documents, requests

NO_MODEL = object()
ODD_MEMBERS = [
    *('"x":NaN', '"x":-Infinity', '"x":[Infinity,1]', '"x":-', '"x":Inf', '"x":nan', '"x":tru'),
    *('"model":"a"', '"model":NaN', '"model":[1]', '"model":"NaN"', '"\\u006dodel":"c"'),
    *(
        '"x":"\\ud800"',
        '"x":"\\udc00 y"',
        '"x":"\\ud800\\u0041"',
        '"\\ud800":1',
        '"x":"\\ud800abcdef"',
    ),
    *(
        '"x":"\\ud83d\\ude00"',
        '"x":"\\u12"',
        '"x":"\\q"',
        '"x":01',
        '"x":1.',
        '"x" 1',
        '"x":"\x01"',
    ),
    *('"x":"\\ud800\\q"', '"x":"\\ud800\\u12"', '"x":"\\uD9aa\\n"', '"x":{"y":NaN}', "x:1"),
]
"""What JSON, Python and msgspec differ in, legal or not, beside what is nothing for any of them."""
LONG_NAME = f'"{1600 * "x"}"'


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


def read(*chunks: bytes) -> JsonReader:
    reader = JsonReader()
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            at = reader.feed(chunk, at)
    return reader


def in_bytes(body: bytes) -> JsonReader:
    """Byte by byte: never by msgspec, and cut everywhere."""
    return read(*(body[at : at + 1] for at in range(len(body))))


READINGS = pytest.mark.parametrize("reading", [read, in_bytes], ids=["whole", "byte-by-byte"])
Reading = Callable[[bytes], JsonReader]


def agrees_with_the_engine(body: bytes, *chunks: bytes, is_utf8: bool = True) -> None:
    expected = engine_reads(body)
    try:
        model = read(*(chunks or (body,))).result()
    except RequestError:
        assert not (is_utf8 and is_name(expected))
        return
    # Accepted here although json.loads gives no name: only for bodies that the engine refuses.
    assert expected in (model, NO_MODEL)


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(each % (len(body) + 1) for each in cuts), len(body)]
    return [body[a:b] for a, b in pairwise(edges)]


class TestModel:
    @given(documents(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]))
    def test_is_what_json_loads_gives_or_an_error_in_other_encodings(
        self, text: str, encoding: str
    ) -> None:
        agrees_with_the_engine(text.encode(encoding), is_utf8=encoding.startswith("utf-8"))

    @given(documents(), st.booleans(), st.lists(st.integers(0, 500), max_size=9))
    def test_is_what_json_loads_gives_however_the_body_is_cut(
        self, text: str, has_mark: bool, cuts: list[int]
    ) -> None:
        body = text.encode("utf-8-sig" if has_mark else "utf-8")
        agrees_with_the_engine(body, *cut(body, cuts))

    @given(
        st.lists(documents(), max_size=40),
        st.integers(0, 400),
        st.sampled_from(["[%s]", '{"m":[%s]}', '[{"model":"b","x":[%s]}]']),
        st.lists(st.integers(0, 9000), max_size=4),
    )
    def test_stands_behind_values_of_any_length(
        self, items: list[str], num_escapes: int, shape: str, cuts: list[int]
    ) -> None:
        escapes = json.dumps(num_escapes * '\\"')
        value = shape % ",".join([*items, escapes])
        body = f'{{"a":{escapes},"x":{value},"model":"a"}}'.encode()
        agrees_with_the_engine(body, *cut(body, cuts), b" ")

    @given(documents(), st.data())
    def test_is_what_json_loads_gives_after_any_damage(
        self, text: str, data: st.DataObject
    ) -> None:
        body = bytearray(text.encode())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(body)))
            body[at : at + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=2))
        agrees_with_the_engine(bytes(body))
        agrees_with_the_engine(bytes(body), *cut(bytes(body), [len(body) // 2]))

    @given(requests())
    def test_is_there_from_its_closing_quote_on(self, request: tuple[str, str, int]) -> None:
        text, model, complete_at = request
        body, reader = text.encode(), JsonReader()
        found = []
        for at in range(len(body)):
            reader.feed(body[at : at + 1])
            found.append(reader.model)

        assert found == [None] * (complete_at - 1) + [model] * (len(body) + 1 - complete_at)

    @READINGS
    @pytest.mark.parametrize(
        ("body", "model"),
        [
            (b'{"model":"a","model":"b"}', "b"),
            (b'{"model":"a","mo\\u0064el":"b"}', "b"),
            (b'{"mo\\u0064el":"b","model":"a"}', "a"),
            (b'{"model":1,"model":"a"}', "a"),
            (b'{"model":null,"model":"a"}', "a"),
            (b'{"model":["b"],"model":"a"}', "a"),
            (b'{"model":"%s","model":"a"}' % (2000 * b"x"), "a"),
            (b'{"%s":"b","model":"a"}' % (2000 * b"x"), "a"),
            (b'{"%s":"b","model":"a"}' % (200 * b'\\"'), "a"),
            (b'{"model":"\\ud800","model":"a"}', "a"),
            (b'{"x":{"model":"b"},"model":"a","y":[{"model":"c"}]}', "a"),
            (b'{"model":"a","x":NaN,"y":-Infinity,"z":1e999}', "a"),
            (b'{"model":"a","x":"\\ud800"}', "a"),
            (b'{"model":"a","x":"\xed\xa0\x80"}', "a"),
            (b'\xef\xbb\xbf{"model":"a"}', "a"),
            (b' \t\r\n{ "model" : "a" } ', "a"),
            (b'{"model":"\\ud83d\\ude00"}', "\U0001f600"),
            (b'{"model":"%s"}' % (MAX_MODEL_BYTES * b"\\u0061"), MAX_MODEL_BYTES * "a"),
            (b'{"model":"a","x":' + b"[" * 400 + b"]" * 400 + b"}", "a"),
            (b'{"x":' + b"[" * 400 + b'"]"' + b"]" * 400 + b',"model":"a"}', "a"),
        ],
    )
    def test_survives_what_python_accepts(self, reading: Reading, body: bytes, model: str) -> None:
        assert engine_reads(body) == model
        assert reading(body).result() == model

    @pytest.mark.parametrize("value", [b"\xff", b"tru", b"1 ,,", b"[1,,2]", b"'", b"[}"])
    def test_is_never_another_one_where_the_engine_refuses_the_body(self, value: bytes) -> None:
        """What is skipped is not checked: such a body goes to the engine, which answers 400."""
        body = b'{"model":"a","x":' + value + b"}"
        assert engine_reads(body) is NO_MODEL
        agrees_with_the_engine(body)


class TestRefusedBody:
    @staticmethod
    def reason_of(reading: Reading, body: bytes) -> Reason:
        with pytest.raises(RequestError) as raised:
            reading(body).result()

        assert raised.value.rejection.status == 400
        return raised.value.rejection.reason

    @READINGS
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b" ",
            b"\xef\xbb",
            b"hello",
            b"{",
            b'{"model":"a"',
            b'{"model":"a","x":"y',
            b'{"model":"a","x',
            b'{"model":"a","x":1',
            b'{"model":"a","x":',
            b'{"model":"a","x"',
            b'{"model":"a"} {}',
            b'{"model":"a",}',
            b'{"model":"a" "x":1}',
            b'{"model" "a"}',
            b'{"model":,"x":1}',
            b'{"x":,"model":"a"}',
            b'{"mo\\qdel":"a"}',
            b'{,"model":"a"}',
            b'{"model":"a"}\x00',
            b"{'model':'a'}",
            b'{"model":"a\n"}',
            b'{"model":"\xff"}',
            b'{"x":' + b"[" * 200_000,
            '{"model":"a"}'.encode("utf-16"),
            '{"model":"a"}'.encode("utf-16-le"),
            '{"model":"a"}'.encode("utf-32-be"),
        ],
    )
    def test_that_is_no_json_is_invalid_json(self, reading: Reading, body: bytes) -> None:
        assert self.reason_of(reading, body) == Reason.INVALID_JSON

    @READINGS
    @pytest.mark.parametrize("body", [b"[]", b'"model"', b"1", b"null", b'[{"model":"a"}]'])
    def test_that_is_no_object_is_an_invalid_body(self, reading: Reading, body: bytes) -> None:
        assert self.reason_of(reading, body) == Reason.INVALID_BODY

    @READINGS
    @pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b'{"x":NaN}'])
    def test_without_a_model_says_so(self, reading: Reading, body: bytes) -> None:
        assert self.reason_of(reading, body) == Reason.MISSING_MODEL

    @READINGS
    @pytest.mark.parametrize(
        "model",
        [
            "1",
            "[]",
            "{}",
            "true",
            '"\\u0000"',
            '"a\\n"',
            '"\\u0085"',
            '"\\ud800"',
            LONG_NAME,
        ],
    )
    def test_with_a_model_that_is_no_name_is_an_invalid_body(
        self, reading: Reading, model: str
    ) -> None:
        body = b'{"model":%s}' % model.encode()

        assert self.reason_of(reading, body) == Reason.INVALID_BODY

    def test_has_an_adapter_beside_the_model_whose_name_is_too_long(self) -> None:
        reader = JsonReader(takes_adapter=True)

        with pytest.raises(RequestError, match="the name of one adapter"):
            reader.feed(
                b'{"model":"a","lora_path":%s,"x":"%s"}' % (LONG_NAME.encode(), SMALL_BYTES * b"x"),
                0,
            )

    def test_is_empty_in_so_many_words(self) -> None:
        with pytest.raises(RequestError, match="body is empty"):
            read(b"").result()

    @READINGS
    def test_error_neither_quotes_nor_keeps_the_prompt(self, reading: Reading) -> None:
        """Exceptions of parsers carry the text; none may hang on the error that is logged."""
        for body in (b'{"prompt": "secret" oops', b'{"prompt": "secret", "model": "\xff"}'):
            with pytest.raises(RequestError) as raised:
                reading(body).result()

            assert "secret" not in raised.value.rejection.message
            assert raised.value.__context__ is None
            assert raised.value.__cause__ is None

    def test_has_more_members_than_are_read(self) -> None:
        """Each costs some microseconds, a thousand times what a byte of a prompt costs."""
        members = b'"x":1,' * (MAX_MEMBERS - 1)

        assert read(b"{", members, b'"model":"a"}').result() == "a"
        with pytest.raises(RequestError, match="1024 top-level fields"):
            read(b"{", members, b'"x":1,"model":"a"}')


@READINGS
@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (b"", False),
        (b',"previous_response_id":null', False),
        (b',"previous_response_id":"resp_1"', True),
        (b',"previous_response_id":"resp_1","x":NaN', True),
        (b',"previous_response_id":"resp_1","previous_response_id":null', False),
        (b',"x":{"previous_response_id":"resp_1"}', False),
        (b',"previous_response_id":5', True),
        (b',"previous_response_id":[]', True),
    ],
)
def test_a_reference_to_a_stored_response_is_seen(
    reading: Reading, member: bytes, expected: bool
) -> None:
    reader = reading(b'{"model":"a"' + member + b"}")

    assert reader.result() == "a"
    assert reader.refers_back is expected


NEST = 900 * b"[" + 900 * b"]" + b","
DENSE: dict[str, Callable[[int], bytes]] = {
    "text": lambda n: b'{"x":"' + n * b"x" + b'"',
    "escapes": lambda n: b'{"x":"' + n // 2 * b'\\"' + b'"',
    "spaces": lambda n: b"{" + n * b" " + b'"x":1',
    "lists": lambda n: b'{"x":[' + n // 3 * b"[]," + b"1]",
    "objects": lambda n: b'{"x":[' + n // 8 * b'{"":[]},' + b"1]",
    "strings": lambda n: b'{"x":[' + n // 3 * b'"",' + b"1]",
    "brackets-in-strings": lambda n: b'{"x":[' + n // 9 * b'["]",{}],' + b"1]",
    "nested": lambda n: b'{"x":[' + n // len(NEST) * NEST + b"1]",
    "deep": lambda n: b'{"x":' + n // 2 * b"[" + n // 2 * b"]",
    "model-of-lists": lambda n: b'{"model":[' + n // 3 * b"[]," + b"1]",
    "values": lambda n: b"{" + b",".join(1000 * [b'"x":[' + n // 2000 * b"[]" + b"1]"]),
    "members": lambda n: b"{" + n // 12 * b'"model":"a",' + b'"x":1',
    "number": lambda n: b'{"x":' + n * b"9",
    "key": lambda n: b'{"' + n * b"x" + b'":1',
}
ENDINGS = {"accepted": b',"model":"a"}', "refused": b',"model":"a"}x', "cut": b""}


class TestCost:
    """Counted in calls and bytes, not in time: each call is C code that is linear in a slice."""

    @staticmethod
    def read(body: bytes) -> int:
        """The work that it was."""
        reader, at = JsonReader(), 0
        with suppress(RequestError):
            while at < len(body):
                before, at = reader.work, reader.feed(body, at)
                assert reader.work - before <= WORK_PER_PASS + 4 * SLICE_BYTES
            reader.result()
        return reader.work

    def steps(self, body: bytes) -> int:
        profile = Profile()
        work = profile.runcall(self.read, body)
        return work + sum(entry.callcount for entry in profile.getstats())

    @pytest.mark.parametrize("kind", DENSE)
    def test_is_linear_in_the_length_and_that_of_a_refused_body_is_an_accepted_one_s(
        self, kind: str
    ) -> None:
        size = SMALL_BYTES + 8192
        short, long = DENSE[kind](size), DENSE[kind](4 * size)
        of_long: dict[str, int] = {}
        for name, ending in ENDINGS.items():
            of_long[name] = self.steps(long + ending)
            assert of_long[name] <= 6 * self.steps(short + ending), name
            assert of_long[name] <= 4 * len(long), name

        assert of_long["refused"] <= 1.1 * of_long["accepted"]

    @pytest.mark.parametrize(("kind", "ending"), [*zip(DENSE, cycle(ENDINGS), strict=False)])
    def test_in_memory_is_that_of_a_slice(self, kind: str, ending: str) -> None:
        body = DENSE[kind](4 * (SMALL_BYTES + 8192)) + ENDINGS[ending]
        tracemalloc.start()
        try:
            self.read(body)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

        assert peak <= 16 * SLICE_BYTES

    @pytest.mark.parametrize("ending", [b'},"model":"a"', b'"x"}', b"x}", b",}"])
    def test_of_a_small_body_that_is_no_json_is_one_reading(self, ending: bytes) -> None:
        """Of msgspec's, which has found the place: no work is done after it."""
        reader = JsonReader()
        with pytest.raises(RequestError) as error:
            reader.feed(b'{"model":"a","x":[1,2,3]' + ending + b"}")

        assert error.value.rejection.reason == Reason.INVALID_JSON
        assert reader.work == 0

    @given(st.lists(st.sampled_from(ODD_MEMBERS), max_size=4), st.sampled_from(["", "x", ",", "}"]))
    def test_is_spent_twice_only_where_python_reads_more_than_json(
        self, members: list[str], rest: str
    ) -> None:
        text = "{" + ",".join([*members, '"model":"b"']) + rest + "}"

        agrees_with_the_engine(text.encode())

    def test_no_second_parser_reads_a_body(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`json.loads` sees single names and keys, msgspec bodies that are small."""
        loads, sizes = json.loads, []

        def measured(text: str) -> object:
            sizes.append(len(text))
            return loads(text)

        monkeypatch.setattr(json, "loads", measured)
        monkeypatch.setattr(jsonsmall, "_DECODERS", (lambda _body: 1 / 0,) * 2)
        size = SMALL_BYTES
        for kind, dense in DENSE.items():
            if kind not in ("members", "model-of-lists"):
                assert read(dense(size + 3000) + ENDINGS["accepted"]).result() == "a"

        assert set(sizes) == {len('"a"')}


@given(st.lists(st.text(), max_size=3), st.data())
def test_a_body_that_is_cut_anywhere_is_cut_off_and_a_whole_one_is_not(
    texts: list[str], data: st.DataObject
) -> None:
    whole = json.dumps({"model": "a", "messages": [{"content": each} for each in texts]}).encode()
    at = data.draw(st.integers(1, len(whole) - 1))

    assert is_cut_off(whole[:at])
    assert not is_cut_off(whole)


@pytest.mark.parametrize("body", [b'{"model":1}', b'{"a":' + b"[" * 100_000 + b"}", b"{]}", b"{}}"])
def test_a_body_that_msgspec_refuses_is_not_cut_off(body: bytes) -> None:
    assert not is_cut_off(body)
