"""Phrases of bounded length."""

from __future__ import annotations

import pytest

from extproc.phrases import held, shortened


def test_only_what_is_too_long_is_shortened() -> None:
    assert (shortened("12345", 5), shortened("123456", 5)) == ("12345", "1234…")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("slot", "held 310 ms for a slot"),
        ("room", "held 310 ms for room"),
        ("turn", "held 310 ms for its turn"),
        ("x", "held 310 ms (x)"),
    ],
)
def test_a_hold_has_its_time_and_what_it_was_for(reason: str, words: str) -> None:
    assert held(0.31, reason) == words
