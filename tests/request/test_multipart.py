"""`model` from a form: what Starlette, and so the engine, reads, or an error."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from extproc.errors import RequestError
from extproc.request.bodyslices import SLICE_BYTES, WORK_PER_PASS
from extproc.request.multipart import (
    MAX_BOUNDARY_BYTES,
    MAX_PART_HEADERS_BYTES,
    MAX_PARTS,
    FormReader,
)
from extproc.types import Reason

BOUNDARY = "b0"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
END = f"--{BOUNDARY}--\r\n".encode()


def part(disposition: str, content: bytes, *more_headers: str) -> bytes:
    headers = "\r\n".join([f"Content-Disposition: {disposition}", *more_headers])
    return f"--{BOUNDARY}\r\n{headers}\r\n\r\n".encode() + content + b"\r\n"


def field(name: str, content: bytes) -> bytes:
    return part(f'form-data; name="{name}"', content)


AUDIO = part(
    'form-data; name="file"; filename="a.mp3"',
    b"\x00\xff\r\n--b\r\nmodel\r\n\r\n-",
    "Content-Type: audio/mpeg",
)
MODEL = field("model", b"adapter-7")


def engine_reads(body: bytes, content_type: str = FORM) -> object:
    """The form's `model` as Starlette gives it to the engine; None for none and for errors."""

    async def read() -> object:
        async def stream() -> AsyncGenerator[bytes, None]:
            yield body

        headers = Headers({"content-type": content_type})
        form = await MultiPartParser(headers, stream()).parse()
        try:
            return form.get("model")
        finally:
            await form.close()

    try:
        return asyncio.run(read())
    except (MultiPartException, KeyError):
        return None


def read(body: bytes, content_type: str = FORM, *, size: int = 1 << 20) -> FormReader:
    """A reader that has read these bytes in chunks of a size."""
    reader = FormReader(content_type)
    for start in range(0, len(body), size):
        chunk, at = body[start : start + size], 0
        while at < len(chunk):
            at = reader.feed(chunk, at)
    return reader


def model_in_form(body: bytes, content_type: str = FORM) -> str:
    return read(body, content_type).result()


def model_in_form_prefix(prefix: bytes, content_type: str = FORM) -> str | None:
    return read(prefix, content_type).model


def reason_of(body: bytes, content_type: str = FORM) -> Reason:
    with pytest.raises(RequestError) as raised:
        model_in_form(body, content_type)

    rejection = raised.value.rejection
    assert rejection.status == (415 if rejection.reason == Reason.UNSUPPORTED_MEDIA_TYPE else 400)
    return rejection.reason


names = st.sampled_from(["model", "model", "file", "Model", "model[]", "language", ""])
contents = st.sampled_from(
    [
        b"adapter-7",
        b"a",
        "é".encode(),
        b"\xff",
        b"",
        b"\r\n",
        b"--b0",
        b"\r\n--b",
        b"\r\n--b0x",
        b"-",
    ]
) | st.binary(max_size=8)
dispositions = st.sampled_from(
    [
        'form-data; name="{}"',
        "form-data; name={}",
        'form-data;name="{}"',
        'Form-Data; NAME="{}"',
        'form-data; name="{}"; filename="x.wav"',
        "form-data; name={}; filename=x.wav; filename*=utf-8''x.wav",
        'form-data; filename="a; name=b"; name="{}"',
        'form-data; filename="\\"; name=model; x="; name="{}"',
        'form-data; filename="\\\\"; name="{}"',
        'form-data; name="x"; name="{}"',
        "form-data; name=\"x\"; name*=utf-8''{}",
        'form-data; name="{}',
        'attachment; name="{}"',
        'form-data; name="{}" ; x',
    ]
)
more_headers = st.lists(
    st.sampled_from(
        [
            "Content-Type: text/plain; charset=utf-8",
            "Content-Transfer-Encoding: base64",
            "content-disposition: form-data; name=other",
            "X-A: 1\n2",
            " folded",
            "no colon",
            "--b0",
        ]
    ),
    max_size=2,
)
parts = st.builds(
    lambda disposition, name, content, more: part(disposition.format(name), content, *more),
    dispositions,
    names,
    contents,
    more_headers,
)
plain_parts = st.builds(field, names, contents) | st.just(AUDIO)
clean_parts = (
    st.builds(field, st.just("model"), st.sampled_from([b"a", "org/é".encode()]))
    | st.builds(field, st.sampled_from(["file", "Model", "model[]", ""]), st.binary(max_size=8))
    | st.just(AUDIO)
).filter(lambda part: part.count(b"--b0") == 1)
preambles = st.sampled_from([b""] * 5 + [b"\r\n", b"x\r\n", b"\n-", b"--b0--\r\n"])
endings = st.sampled_from([END] * 5 + [END[:-2], b"", b"--b0", b"--b0-", b"--b0 --", END + MODEL])


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    drawn = draw(st.lists(plain_parts | parts, max_size=4))
    return draw(preambles) + b"".join(drawn) + draw(endings)


class TestModel:
    @given(forms())
    def test_is_what_the_engine_reads_or_an_error(self, form: bytes) -> None:
        try:
            model = model_in_form(form, FORM)
        except RequestError:
            return
        assert model == engine_reads(form)

    @given(forms(), st.data())
    def test_is_what_the_engine_reads_or_an_error_after_damage(
        self, form: bytes, data: st.DataObject
    ) -> None:
        at = data.draw(st.integers(0, len(form)))
        damaged = form[:at] + data.draw(st.binary(max_size=2)) + form[at + 1 :]
        try:
            model = model_in_form(damaged, FORM)
        except RequestError:
            return
        assert model == engine_reads(damaged)

    @given(forms(), st.integers(1, 20))
    def test_does_not_depend_on_how_the_form_is_cut(self, form: bytes, size: int) -> None:
        def outcome(size: int) -> str | Reason:
            try:
                return read(form, size=size).result()
            except RequestError as error:
                return error.rejection.reason

        assert outcome(size) == outcome(1 << 20)

    @given(st.lists(clean_parts, max_size=3), st.lists(clean_parts, max_size=3))
    def test_of_every_well_formed_form_is_read(
        self, before: list[bytes], after: list[bytes]
    ) -> None:
        """Whatever stands around it; the last `model` counts."""
        body = b"".join([*before, MODEL, *after]) + END

        assert model_in_form(body, FORM) == engine_reads(body)

    @pytest.mark.parametrize(
        "disposition",
        [
            'form-data; name="model"',
            "form-data; name=model",
            'form-data;name="model"',
            'FORM-DATA; Name="model"',
        ],
    )
    def test_is_read_as_clients_write_it(self, disposition: str) -> None:
        body = AUDIO + part(disposition, b"adapter-7", "Content-Type: text/plain") + END

        assert model_in_form(body, FORM) == engine_reads(body) == "adapter-7"

    @pytest.mark.parametrize(
        "content_type",
        [
            "multipart/form-data; boundary=b0",
            'Multipart/Form-Data;Boundary="b0"',
            "multipart/form-data; charset=UTF-8; boundary=b0",
        ],
    )
    def test_is_read_under_every_spelling_of_the_content_type(self, content_type: str) -> None:
        body = MODEL + END

        assert model_in_form(body, content_type) == engine_reads(body, content_type) == "adapter-7"

    def test_given_twice_is_the_last_one(self) -> None:
        body = field("model", b"first") + AUDIO + field("model", b"last") + END

        assert model_in_form(body, FORM) == engine_reads(body) == "last"

    def test_beside_a_file_with_an_extended_name_is_read(self) -> None:
        """As .NET's client writes it."""
        file = part("form-data; name=file; filename=a.mp3; filename*=utf-8''a.mp3", b"\x00")

        assert model_in_form(file + MODEL + END, FORM) == "adapter-7"

    def test_behind_the_last_boundary_does_not_count(self) -> None:
        body = MODEL + END + field("model", b"other") + END

        assert model_in_form(body, FORM) == engine_reads(body) == "adapter-7"


class TestRefusedForm:
    @pytest.mark.parametrize(
        "content_type",
        [
            "",
            "application/json",
            "application/x-www-form-urlencoded",
            "multipart/mixed; boundary=b0",
        ],
    )
    def test_of_another_media_type_is_unsupported(self, content_type: str) -> None:
        assert reason_of(b"model=a", content_type) == Reason.UNSUPPORTED_MEDIA_TYPE

    @pytest.mark.parametrize(
        "content_type",
        [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            'multipart/form-data; boundary=""',
            "multipart/form-data; boundary=b0; boundary=b1",
            "multipart/form-data; boundary=b0; BOUNDARY=b0",
            "multipart/form-data; boundary*=b0",
            "multipart/form-data; boundary=b0; charset=latin-1",
            "multipart/form-data; boundary=b0, text/plain",
            "multipart/form-data; boundary=b{0}",
            f"multipart/form-data; boundary={'b' * (MAX_BOUNDARY_BYTES + 1)}",
        ],
    )
    def test_without_one_plain_boundary_is_invalid(self, content_type: str) -> None:
        assert reason_of(MODEL + END, content_type) == Reason.INVALID_BODY

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"model=a",
            b"--b1--\r\n",
            b"\r\n" + MODEL + END,
            b"preamble\r\n" + MODEL + END,
            MODEL,
            MODEL + AUDIO,
            MODEL + b"--b0",
            MODEL + b"--b0 --",
            MODEL + b"--b0\t\r\n" + END,
            MODEL.replace(b"\r\n", b"\n") + END,
            b"--b0\r\n\r\nadapter-7\r\n" + END,
            part('attachment; name="model"', b"a") + END,
            part("form-data", b"a") + END,
            part('form-data; name="x"; name="model"', b"a") + END,
            part("form-data; name*=utf-8''model", b"a") + END,
            part('form-data; name="model', b"a") + END,
            part('form-data; name="mo\\del"', b"a") + END,
            part('form-data; name="x"', b"a", 'Content-Disposition: form-data; name="model"') + END,
            part('form-data; name="model"', b"a", "no colon") + END,
            part('form-data; name="model"', b"a", " folded: 1") + END,
            part('form-data; name="model"; filename="m.txt"', b"a") + END,
            part("form-data; name=\"model\"; filename*=utf-8''m.txt", b"a") + END,
            field("model", b"\xff") + END,
            field("model", b"a\x00b") + END,
            field("model", b"x" * 255 + "é".encode()) + END,
            field("model", b"x" * 100_000) + END,
            MODEL * (MAX_PARTS + 1) + END,
            part('form-data; name="model"', b"a", f"X: {'x' * MAX_PART_HEADERS_BYTES}") + END,
        ],
    )
    def test_that_readers_could_disagree_about_is_invalid(self, body: bytes) -> None:
        assert reason_of(body) == Reason.INVALID_BODY

    @pytest.mark.parametrize(
        "body", [END, AUDIO + END, field("Model", b"a") + END, field("model", b"") + END]
    )
    def test_without_a_model_says_so(self, body: bytes) -> None:
        assert reason_of(body) == Reason.MISSING_MODEL

    def test_of_the_greatest_number_of_parts_is_read(self) -> None:
        assert model_in_form(MODEL * MAX_PARTS + END, FORM) == "adapter-7"


class TestPrefix:
    BODY = AUDIO + MODEL + field("language", b"en") + END

    def test_gives_the_model_from_the_boundary_behind_it_on(self) -> None:
        complete_at = len(AUDIO + MODEL) + len(f"--{BOUNDARY}\r\n")

        found = [model_in_form_prefix(self.BODY[:cut], FORM) for cut in range(len(self.BODY) + 1)]

        assert found == [None] * complete_at + ["adapter-7"] * (len(self.BODY) + 1 - complete_at)

    @given(forms(), st.data())
    def test_never_gives_another_model_than_the_whole_form_with_one(
        self, form: bytes, data: st.DataObject
    ) -> None:
        try:
            expected = model_in_form(form, FORM)
        except RequestError:
            return
        if form.lower().count(b"name=model") + form.lower().count(b'name="model"') != 1:
            return
        cut = data.draw(st.integers(0, len(form)))

        assert model_in_form_prefix(form[:cut], FORM) in (None, expected)

    @pytest.mark.parametrize(
        "prefix",
        [b"-", b"--b0", b"--b0\r", MODEL[:-2], MODEL + b"--b", MODEL + b"--b0-", END, b"", AUDIO],
    )
    def test_gives_nothing_before_the_model_is_complete(self, prefix: bytes) -> None:
        assert model_in_form_prefix(prefix, FORM) is None

    @pytest.mark.parametrize(
        "prefix",
        [
            b"x",
            MODEL + b"--b0x",
            b"--b0\r\nX: " + b"x" * MAX_PART_HEADERS_BYTES,
            b"--b0\r\nX:" + b" " * (MAX_PART_HEADERS_BYTES - 10) + b"\x01\r\n\r\n",
        ],
    )
    def test_is_refused_as_soon_as_it_can_be_seen(self, prefix: bytes) -> None:
        with pytest.raises(RequestError) as raised:
            model_in_form_prefix(prefix, FORM)

        assert raised.value.rejection.reason == Reason.INVALID_BODY

    def test_of_another_media_type_is_unsupported(self) -> None:
        with pytest.raises(RequestError) as raised:
            model_in_form_prefix(b"", "text/plain")

        assert raised.value.rejection.status == 415


class TestCost:
    @pytest.mark.parametrize(
        "form",
        [
            MODEL + part('form-data; name="file"; filename="x"', 700_000 * b"\r\n--b") + END,
            part("form-data; name=x", b"") * 999 + END,
            part('form-data; name="x"', b"", f"X: {'x' * 4000}") * 999 + END,
            MODEL + END + 4_000_000 * b"x",
        ],
        ids=["near-boundaries", "parts", "headers", "epilogue"],
    )
    def test_of_a_form_is_a_bounded_amount_of_work_and_memory_per_pass(self, form: bytes) -> None:
        reader, at, passes = FormReader(FORM), 0, 0
        tracemalloc.start()
        try:
            while at < len(form):
                before, at = reader.work, reader.feed(form, at)
                assert reader.work - before <= 2 * WORK_PER_PASS
                passes += 1
            assert tracemalloc.get_traced_memory()[1] < 8 * SLICE_BYTES
        finally:
            tracemalloc.stop()

        assert reader.is_whole
        assert passes <= 2 + 2 * reader.work // WORK_PER_PASS
        assert reader.work <= 8 * len(form)
