"""Chunks in, the model out: complete bodies, parts of bodies, and what may be sent on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.body import MAX_ECHO_BYTES, MAX_WHOLE_TRIES, BodyReader, pieces
from extproc.core.errors import RequestError
from extproc.core.routes import Route, RouteKind
from extproc.core.types import Reason
from tests.builders import body

FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\na\r\n--b--\r\n'


def reader(
    kind: RouteKind = RouteKind.INFERENCE_JSON,
    *,
    path: str = "/v1/responses",
    max_bytes: int = 1000,
    allows_stored: bool = False,
    first_look_bytes: int = 1,
    chunks: tuple[bytes, ...] = (),
) -> BodyReader:
    content_type = "multipart/form-data; boundary=b"
    made = BodyReader(
        Route(kind, path),
        content_type,
        max_bytes=max_bytes,
        allows_stored=allows_stored,
        first_look_bytes=first_look_bytes,
    )
    for chunk in chunks:
        made.add(chunk)
    return made


def reason_of(error: pytest.ExceptionInfo[RequestError]) -> Reason:
    return error.value.rejection.reason


@given(st.lists(st.integers(0, 60), max_size=5))
def test_the_model_does_not_depend_on_how_the_body_is_cut(cuts: list[int]) -> None:
    data = body()
    edges = [0, *sorted(cuts), len(data)]
    chunks = tuple(data[a:b] for a, b in pairwise(edges))

    assert reader(chunks=chunks).model() == "a"


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


def test_a_prefix_is_looked_at_from_the_first_size_on_and_again_when_it_has_doubled() -> None:
    """Looking at every chunk would cost the square of the body's length."""
    made = reader(first_look_bytes=10)
    found = []
    for _ in range(6):
        made.add(8 * b" ")
        found.append(made.model_so_far())
    made.add(b'{"model": "a", ')

    assert found == [None] * 6
    assert made.model_so_far() is None  # looked at 16 bytes and at 32; not due before 64
    made.add(b" ")
    assert made.model_so_far() == "a"


def test_a_streamed_body_that_is_whole_gives_its_model_with_nothing_to_say_so() -> None:
    """Trailers follow it, and the data plane keeps them until the headers are answered."""
    made = reader(first_look_bytes=1000)
    made.add(b'{"model": "a", "metadata": {}')
    before = made.model_so_far()
    made.add(b"} \n")

    assert (before, made.model_so_far()) == (None, "a")


def test_a_streamed_body_that_is_whole_and_wrong_is_refused() -> None:
    made = reader(first_look_bytes=1000)
    made.add(b'{"prompt": "hi"}')
    with pytest.raises(RequestError) as error:
        made.model_so_far()

    assert reason_of(error) is Reason.MISSING_MODEL


def test_a_client_can_not_have_its_body_read_again_for_every_brace() -> None:
    made = reader(first_look_bytes=1000)
    made.add(b'{"a": ')
    for _ in range(MAX_WHOLE_TRIES):
        made.add(b"{}, ".rstrip(b", "))
        assert made.model_so_far() is None
    made.chunks[:] = [b'{"model": "a"}']

    assert made.model_so_far() is None


def test_a_prefix_of_a_form_gives_the_model_once_its_field_is_complete() -> None:
    made = reader(RouteKind.INFERENCE_FORM)
    made.add(FORM[:-10])
    before = made.model_so_far()
    made.add(FORM[-10:] + 100 * b" ")

    assert (before, made.model_so_far()) == (None, "a")


def test_clearing_forgets_the_bytes_and_keeps_the_count() -> None:
    made = reader(chunks=(b"1", b"23"))
    made.clear()

    assert (made.chunks, made.num_bytes) == ([], 3)


@given(st.integers(0, 4), st.integers(-1, 1))
def test_pieces_fit_and_make_up_the_whole_and_only_the_last_is_the_last(
    times: int, more: int
) -> None:
    data = bytes(i % 251 for i in range(max(times * MAX_ECHO_BYTES + more, 0)))
    cut = list(pieces(data))

    assert b"".join(chunk for chunk, _ in cut) == data
    assert all(len(chunk) <= MAX_ECHO_BYTES for chunk, _ in cut)
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]


def test_an_empty_body_is_one_empty_piece_and_no_body_is_none() -> None:
    assert list(reader(chunks=(b"",)).pieces()) == [(b"", True)]
    assert list(reader().pieces()) == []
