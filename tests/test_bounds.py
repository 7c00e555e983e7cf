"""What others tell us is brought into range."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_COUNT, between, fits_header, has_few_values, plain, total, whole

NUMBERS = st.floats() | st.integers(-(10**400), 10**400)


@given(NUMBERS)
def test_any_number_becomes_one_in_range(value: float) -> None:
    assert 0 <= whole(value, 7) <= 7
    assert 0 <= between(value, 0.5) <= 0.5


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3), (2.9, 2), (9, 7), (-1, 0), (math.inf, 7), (math.nan, 0)]
)
def test_a_whole_number_is_cut_and_kept_in_range(value: float, expected: int) -> None:
    assert whole(value, 7) == expected


@given(st.lists(st.floats(min_value=0)))
def test_a_sum_that_overflows_is_the_bound(counts: list[float]) -> None:
    assert total(counts) == min(sum(counts), MAX_COUNT) // 1


@given(st.text(st.characters(), max_size=9), st.integers(0, 9))
def test_a_plain_text_is_cut_and_can_be_encoded(text: str, max_chars: int) -> None:
    made = plain(text, max_chars)

    assert len(made.encode().decode()) <= max_chars
    assert all(ours == theirs or ours == "?" for ours, theirs in zip(made, text, strict=False))


@pytest.mark.parametrize(
    ("text", "fits"), [("key-1", True), ("a b", True), ("", False), ("a\nb", False), ("ü", False)]
)
def test_a_header_takes_printable_ascii_alone(text: str, fits: bool) -> None:
    assert fits_header(text) is fits


def test_the_values_of_a_text_are_counted_before_it_is_decoded() -> None:
    assert has_few_values(b'{"a":[1,2]}', 3)
    assert not has_few_values(b'{"a":[1,2]}', 2)
