from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.reports.remembered import ENTRY_BYTES, Remembered


def test_what_was_read_is_not_read_again() -> None:
    read: list[bytes] = []

    def measure(text: bytes) -> int:
        read.append(text)
        return len(text)

    lengths = Remembered(measure, 100_000, lambda _: 0)

    assert [lengths(text) for text in (b"a", b"bb", b"a")] == [1, 2, 1]
    assert read == [b"a", b"bb"]


@given(st.lists(st.binary(max_size=2 * ENTRY_BYTES)))
def test_the_volume_is_kept_whatever_is_read(texts: list[bytes]) -> None:
    max_bytes = 40 * ENTRY_BYTES
    lengths = Remembered(len, max_bytes, lambda length: 10 * length)

    for text in texts:
        assert lengths(text) == len(text)
        assert lengths.num_bytes <= max_bytes


def test_an_error_is_not_remembered() -> None:
    numbers = Remembered(int, 10_000, lambda _: 0)

    for _ in range(2):
        with pytest.raises(ValueError, match="invalid"):
            numbers("x")
    assert numbers.num_bytes == 0


def test_a_result_of_more_than_its_share_is_read_again_and_throws_nothing_out() -> None:
    texts = Remembered(bytes.decode, 100_000, len)

    assert texts(b"a") == "a"
    before = texts.num_bytes
    assert texts(b"b" * 9000) == "b" * 9000
    assert texts.num_bytes == before


def test_all_is_forgotten_when_the_volume_is_full() -> None:
    read: list[bytes] = []

    def measure(text: bytes) -> int:
        read.append(text)
        return len(text)

    lengths = Remembered(measure, 20 * ENTRY_BYTES, lambda _: 0)
    texts = [bytes([number]) for number in range(40)]
    for text in [*texts, *texts[:1]]:
        lengths(text)
        assert lengths.num_bytes <= 20 * ENTRY_BYTES

    assert read == [*texts, texts[0]]
