"""Contents of stores: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.declared import Declaration, DeclarationError, LoadMode
from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    decode,
    decode_all,
    decode_asked,
    encode,
    tag_of,
)
from tests.adapters.stores.media import declared

names = st.text(
    st.characters(exclude_categories=["C"], exclude_characters=",*"), min_size=1
).filter(lambda name: name == name.strip() and len(name.encode()) <= 200 and "\x7f" not in name)


@st.composite
def declarations(draw: st.DrawFn) -> Declaration:
    least = draw(st.integers(0, 5))
    return Declaration(
        name=draw(names),
        source=draw(st.sampled_from(["", "/adapters/a", "hf:org/repo"])),
        version=draw(st.sampled_from(["", "1", "2026-11-23"])),
        base=draw(st.sampled_from(["", "base"])),
        rank=draw(st.none() | st.integers(1, 512)),
        min_replicas=least,
        max_replicas=draw(st.none() | st.integers(max(1, least), 9)),
        load=draw(st.sampled_from(LoadMode)),
        origin="store",
    )


@given(declarations(), st.booleans())
def test_what_is_encoded_is_decoded(declaration: Declaration, is_deleted: bool) -> None:
    stored = decode(encode(declaration, is_deleted=is_deleted))

    assert (stored.declaration, stored.is_deleted) == (declaration, is_deleted)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "source", "replicas", "load", "min"]), inner, max_size=4
    ),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_garbage_is_refused_or_is_a_declaration_that_stands(content: bytes) -> None:
    with suppress(DeclarationError):
        decode(content).declaration.check()


@given(declarations(), st.data())
def test_a_part_of_a_content_is_none(declaration: Declaration, data: st.DataObject) -> None:
    """So a file that is half written cannot be taken for one that is whole."""
    content = encode(declaration)
    part = content[: data.draw(st.integers(0, len(content) - 1))]
    with pytest.raises(DeclarationError, match="not a declaration"):
        decode(part)


def test_defaults_are_left_out_and_replicas_are_written_as_people_write_them() -> None:
    assert json.loads(encode(declared())) == {"name": "org/a", "source": "/adapters/a"}
    assert json.loads(encode(declared(min_replicas=2)))["replicas"] == {"min": 2, "max": None}


def test_fields_of_newer_versions_are_ignored_in_stores_and_refused_from_clients() -> None:
    content = b'{"name": "a", "colour": "red"}'

    assert decode(content).declaration == declared("a", "")
    with pytest.raises(DeclarationError, match="unknown field `colour`"):
        decode_asked(content)


def test_a_client_cannot_declare_something_deleted() -> None:
    with pytest.raises(DeclarationError, match="unknown field `deleted`"):
        decode_asked(b'{"name": "a", "deleted": true}')


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "name"),
        (b"[]", "Expected `object`"),
        (b'{"name": "a,b"}', "without commas"),
        (b'{"name": "a", "source": "../a"}', "must be an absolute path"),
        (b'{"name": "a", "replicas": {"min": 3, "max": 2}}', "at least min"),
        (b'{"name": "a", "replicas": {"maximum": 2}}', "unknown field `maximum`"),
        (b'{"name": "a", "rank": "16"}', "Expected `int | null`"),
        (b'{"name": "\xff"}', "not a declaration"),
        (b"[" * 8_000, "not a declaration"),
        (b" " * (MAX_CONTENT_BYTES + 1), "larger than 8192 bytes"),
    ],
)
def test_what_cannot_stand_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    for read in (decode, decode_asked):
        with pytest.raises(DeclarationError, match=reason):
            read(content)


def test_a_tag_is_that_of_the_content() -> None:
    assert tag_of(b"a") == tag_of(b"a") != tag_of(b"b")
    assert decode(b'{"name": "a"}').tag == tag_of(b'{"name": "a"}')


def test_the_errors_of_a_list_keep_none_of_the_frames_that_they_were_raised_in() -> None:
    """A list has a thousand, which live as long as its answer."""
    errors = [each for each in decode_all(b"[[],{},5]", 10) if isinstance(each, DeclarationError)]

    assert len(errors) == 3
    assert {(each.__traceback__, each.__cause__, each.__context__) for each in errors} == {
        (None, None, None)
    }
