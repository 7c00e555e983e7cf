"""Phrases of bounded length."""

from __future__ import annotations

from extproc.core.words import shortened


def test_only_what_is_too_long_is_shortened() -> None:
    assert (shortened("12345", 5), shortened("123456", 5)) == ("12345", "1234…")
