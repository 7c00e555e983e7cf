"""Long work in passes, between which others may run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def last(passes: Iterator[T]) -> T:
    """Make all passes, one after the other; return what the last one yields."""
    return deque(passes, maxlen=1).pop()


def make_all(passes: Iterator[object]) -> None:
    """Make all passes, one after the other."""
    deque(passes, maxlen=0)
