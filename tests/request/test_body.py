"""Chunks in, the model out: complete bodies, parts of bodies, and what may be sent on."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.paths import Route, RouteKind
from extproc.request import jsonmodel
from extproc.request.body import CHUNK_OVERHEAD_BYTES, MAX_ECHO_BYTES, BodyReader, pieces
from extproc.request.jsonmodel import JsonReader
from extproc.types import Reason
from tests.builders import body

FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\na\r\n--b--\r\n'


def reader(
    kind: RouteKind = RouteKind.INFERENCE_JSON,
    *,
    path: str = "/v1/responses",
    max_bytes: int = 1000,
    allows_stored: bool = False,
    early_bytes: int = 1,
    is_echoed: bool = False,
    takes_adapter: bool = False,
    chunks: tuple[bytes, ...] = (),
) -> BodyReader:
    content_type = "multipart/form-data; boundary=b"
    made = BodyReader(
        Route(kind, path),
        content_type,
        max_bytes=max_bytes,
        allows_stored=allows_stored,
        early_bytes=early_bytes,
        is_echoed=is_echoed,
        takes_adapter=takes_adapter,
    )
    tell(made, *chunks)
    return made


def tell(made: BodyReader, *chunks: bytes) -> None:
    """Have it take and read chunks."""
    for chunk in chunks:
        made.add(chunk)
        while not made.read():
            pass


def reason_of(error: pytest.ExceptionInfo[RequestError]) -> Reason:
    return error.value.rejection.reason


def read_of(data: bytes, *, takes_adapter: bool, is_sliced: bool) -> object:
    """The result of a body."""
    with patch.dict(vars(jsonmodel), {"SMALL_BYTES": 0} if is_sliced else {}):
        made = reader(allows_stored=False, takes_adapter=takes_adapter)
        try:
            tell(made, data)
            return made.model()
        except RequestError as error:
            return error.rejection.reason


PARTS: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(("a", "", "\n", "x" * 257, "\u00e9", None, 7)),
        "previous_response_id": st.none() | st.text(max_size=2),
        "lora_path": st.sampled_from(("b", "", None, ["b"], {}, 7, "x" * 2000)),
        "prompt": st.text(max_size=5),
    },
)


@given(PARTS, st.booleans())
@example({"model": "a", "lora_path": "b"}, True)
@example({"model": "a", "lora_path": None}, True)
@example({"model": "a", "lora_path": ["b"]}, True)
@example({"model": "a", "lora_path": "x" * 2000}, True)
@example({"model": "a", "previous_response_id": "r"}, False)
def test_a_small_body_is_read_at_once_as_it_is_in_slices(
    parts: dict[str, object], takes_adapter: bool
) -> None:
    data = json.dumps(parts).encode()
    at_once = read_of(data, takes_adapter=takes_adapter, is_sliced=False)

    assert at_once == read_of(data, takes_adapter=takes_adapter, is_sliced=True)


@given(st.lists(st.integers(0, 60), max_size=5))
def test_the_model_does_not_depend_on_how_the_body_is_cut(cuts: list[int]) -> None:
    data = body()
    edges = [0, *sorted(cuts), len(data)]
    chunks = tuple(data[a:b] for a, b in pairwise(edges))

    assert reader(chunks=chunks).model() == "a"


@pytest.mark.parametrize("is_echoed", [True, False])
def test_a_small_body_in_chunks_is_read_at_once_when_it_is_over(is_echoed: bool) -> None:
    made = reader(early_bytes=10_000, is_echoed=is_echoed)
    data = body()
    for at in range(0, len(data), 7):
        made.add(data[at : at + 7])
        assert made.read(is_over=at + 7 >= len(data))

    assert made.model() == "a"
    assert made.take_done() == len(range(0, len(data), 7))
    assert isinstance(made._reader, JsonReader)
    assert made._reader.work == 0


def test_a_streamed_body_that_looks_whole_is_read_although_nobody_says_that_it_is_over() -> None:
    """With trailers the end is told only after the decision."""
    made = reader(early_bytes=10_000)
    for chunk in (b'{"model":', b'"a"', b"} "):
        assert made.model_so_far() is None
        tell(made, chunk)

    assert made.model_so_far() == "a"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_limit_holds_for_all_chunks_together(sizes: list[int]) -> None:
    fits = reader(max_bytes=sum(sizes))
    over = reader(max_bytes=sum(sizes) - 1)
    for size in sizes:
        fits.add(size * b" ")
    for size in sizes[:-1]:
        over.add(size * b" ")
    with pytest.raises(RequestError) as error:
        over.add(sizes[-1] * b" ")

    assert reason_of(error) is Reason.BODY_TOO_LARGE
    assert fits.num_bytes == sum(sizes)


def test_a_form_is_read_as_a_form() -> None:
    assert reader(RouteKind.INFERENCE_FORM, chunks=(FORM[:9], FORM[9:])).model() == "a"


def test_a_stored_response_names_no_model_whatever_its_body_is() -> None:
    assert reader(RouteKind.STORED_RESPONSE, chunks=(b"garbage",)).model() == ""


def test_a_previous_response_needs_permission() -> None:
    data = (body(previous_response_id="r"),)
    with pytest.raises(RequestError) as error:
        reader(chunks=data).model()

    assert reason_of(error) is Reason.STORED_RESPONSE
    assert reader(chunks=data, allows_stored=True).model() == "a"
    assert reader(chunks=data, path="/v1/completions").model() == "a"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (RouteKind.INFERENCE_JSON, body()),
        (RouteKind.INFERENCE_JSON, body()[:-5]),
        (RouteKind.INFERENCE_FORM, FORM),
        (RouteKind.INFERENCE_FORM, FORM.replace(b"--b--", b"--b") + b"content-dispo"),
    ],
)
def test_a_part_gives_the_model_if_it_is_whole_or_if_the_model_stands_in_it(
    kind: RouteKind, part: bytes
) -> None:
    assert reader(kind, chunks=(part,)).model_of_part() == "a"


@pytest.mark.parametrize(
    ("kind", "part"),
    [(RouteKind.INFERENCE_JSON, b'{"mod'), (RouteKind.INFERENCE_FORM, FORM[:20])],
)
def test_a_part_that_ends_before_the_model_is_too_large(kind: RouteKind, part: bytes) -> None:
    with pytest.raises(RequestError) as error:
        reader(kind, chunks=(part,)).model_of_part()

    assert reason_of(error) is Reason.BODY_TOO_LARGE


def test_a_part_that_is_whole_and_names_no_model_is_told_so() -> None:
    with pytest.raises(RequestError) as error:
        reader(chunks=(b"{}",)).model_of_part()

    assert reason_of(error) is Reason.MISSING_MODEL


def test_a_part_decides_from_a_size_on() -> None:
    made = reader(early_bytes=16)
    tell(made, b'{"model": "a", ')
    before = made.model_so_far()
    tell(made, b" ")

    assert (before, made.model_so_far()) == (None, "a")


def test_a_part_that_refers_to_a_stored_response_needs_permission() -> None:
    chunk = b'{"model": "a", "previous_response_id": "r", '
    with pytest.raises(RequestError) as error:
        reader(chunks=(chunk,)).model_so_far()

    assert reason_of(error) is Reason.STORED_RESPONSE
    assert reader(chunks=(chunk,), allows_stored=True).model_so_far() == "a"


def test_a_streamed_body_that_is_whole_gives_its_model_with_nothing_to_say_so() -> None:
    """Trailers follow it, and the data plane keeps them until the headers are answered."""
    made = reader(early_bytes=1000)
    tell(made, b'{"model": "a", "metadata": {}')
    before = made.model_so_far()
    tell(made, b"} \n")

    assert (before, made.model_so_far()) == (None, "a")


def test_a_streamed_body_that_is_whole_and_wrong_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        reader(early_bytes=1000, chunks=(b'{"prompt": "hi"}',)).model_so_far()

    assert reason_of(error) is Reason.MISSING_MODEL


def test_a_prefix_of_a_form_gives_the_model_once_its_field_is_complete() -> None:
    made = reader(RouteKind.INFERENCE_FORM)
    tell(made, FORM[:-10])
    before = made.model_so_far()
    tell(made, FORM[-10:] + 100 * b" ")

    assert (before, made.model_so_far()) == (None, "a")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (b'"model": "b"}', Reason.INVALID_BODY),
        (b'"model": null}', Reason.INVALID_BODY),
        (b'"mo\\u0064el": 1}', Reason.INVALID_BODY),
        (b'"previous_response_id": "r"}', Reason.STORED_RESPONSE),
        (b'"x": 1} {', Reason.INVALID_JSON),
    ],
)
def test_what_follows_a_decision_is_held_to_it(more: bytes, reason: Reason) -> None:
    made = reader(chunks=(b'{"model": "a", ',))
    made.settle("a")
    tell(made, b'"model": "a", "x": {"model": "b"}, ')
    with pytest.raises(RequestError) as error:
        tell(made, more)

    assert reason_of(error) is reason


def test_what_follows_the_decision_on_a_stored_response_is_not_read() -> None:
    made = reader(RouteKind.STORED_RESPONSE, chunks=(b"garbage",))
    assert made.model_so_far() == ""
    made.settle("")
    tell(made, b"more")

    assert made.take_done() == 2


@pytest.mark.parametrize("kind", [RouteKind.INFERENCE_JSON, RouteKind.INFERENCE_FORM])
def test_a_body_is_let_go_as_it_is_read_and_kept_until_it_is_echoed(kind: RouteKind) -> None:
    chunks = (FORM[:20], FORM[20:]) if kind is RouteKind.INFERENCE_FORM else (b'{"x":', b"1")
    plain = reader(kind)
    for chunk in chunks:
        plain.add(chunk)
    unread = plain.held_bytes
    tell(plain, b"")
    echoed = reader(kind, is_echoed=True, chunks=chunks)
    kept = echoed.held_bytes
    echoed.clear()

    assert unread == kept == len(b"".join(chunks)) + len(chunks) * CHUNK_OVERHEAD_BYTES
    assert (plain.held_bytes, plain.is_read, plain.take_done(), plain.take_done()) == (
        0,
        True,
        3,
        0,
    )
    assert (echoed.held_bytes, list(echoed.pieces())) == (0, [])
    assert echoed.num_bytes == len(b"".join(chunks))


def test_of_a_large_body_a_pass_reads_some_and_nothing_is_copied() -> None:
    data = b'{"x": [' + 100_000 * b"[]," + b'0], "model": "a"}'
    made = reader(max_bytes=1_000_000)
    made.add(data)
    passes = 1
    tracemalloc.start()
    while not made.read():
        passes += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert 3 <= passes <= 12
    assert peak < len(data) / 2
    assert made.model() == "a"


@given(st.integers(0, 4), st.integers(-1, 1))
def test_pieces_fit_and_make_up_the_whole_and_only_the_last_is_the_last(
    times: int, more: int
) -> None:
    data = bytes(i % 251 for i in range(max(times * MAX_ECHO_BYTES + more, 0)))
    cut = list(pieces(data))

    assert b"".join(chunk for chunk, _ in cut) == data
    assert len(cut) == max(1, -(-len(data) // MAX_ECHO_BYTES)), "as few as can be"
    assert all(len(chunk) <= MAX_ECHO_BYTES for chunk, _ in cut)
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]


@given(
    st.lists(st.sampled_from([0, 1, 30_000, 61_999, 62_000, 62_001, 65_536, 130_000]), max_size=6)
)
def test_pieces_are_cut_alike_whatever_chunks_the_body_came_in(sizes: list[int]) -> None:
    chunks = [bytes([number]) * size for number, size in enumerate(sizes)]

    assert list(pieces(*chunks)) == list(pieces(b"".join(chunks)))


def test_an_empty_body_is_one_empty_piece_and_no_body_is_none() -> None:
    assert list(reader(is_echoed=True, chunks=(b"",)).pieces()) == [(b"", True)]
    assert list(reader(is_echoed=True).pieces()) == []


# --- prompts ---------------------------------------------------------------------------------


def test_a_prompt_is_taken_once() -> None:
    made = reader(chunks=(body(prompt="x", max_tokens=3, tools=[1]),))

    assert b"".join(made.take_prompt()) == b'[1]"x"'
    assert made.take_prompt() == ()


def test_a_prompt_is_let_go_with_the_body() -> None:
    made = reader(chunks=(body(prompt="x"),))
    made.clear()

    assert made.take_prompt() == ()


def test_a_form_has_no_prompt() -> None:
    assert reader(RouteKind.INFERENCE_FORM, chunks=(FORM,)).take_prompt() == ()
