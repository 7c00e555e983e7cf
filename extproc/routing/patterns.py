"""Names with `*`, which stands for anything; all else in them stands for itself."""

from __future__ import annotations


def as_fnmatch(pattern: str) -> str:
    """Return a pattern of `fnmatch` to which nothing but `*` is special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
