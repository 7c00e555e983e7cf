"""Hands on what changes often, seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

COALESCE_S = 0.05
"""Changes within this time are handed on together. Reading 500 pods takes 1 ms."""

T = TypeVar("T")


class Publisher(Generic[T]):
    """Hands a value on when it has changed: the first at once, later ones coalesced."""

    def __init__(self, on_change: Callable[[T], None]) -> None:
        self._on_change = on_change
        self._published: T | None = None
        self._read: Callable[[], T | None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Publisher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def publish(self, read: Callable[[], T | None]) -> None:
        """Have `read` called now or soon; it returns the value, None if it is unknown."""
        self._read = read
        if self._published is None:
            self._publish()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._publish)

    def _publish(self) -> None:
        self._timer = None
        value = self._read()
        if value is not None and value != self._published:
            self._published = value
            self._on_change(value)
