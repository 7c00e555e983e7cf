"""Counts of the last minutes, for warnings that end with their cause."""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 300.0


class Lately:
    """The growth of counts over the last `WINDOW_S` to twice that.

    Args:
        read: Returns the counts as they are.
    """

    def __init__(self, read: Callable[[], tuple[int, ...]]) -> None:
        self._read = read
        self._rotated_s = -WINDOW_S
        self._last = self._before = read()

    def tick(self, *, now: float) -> None:
        """Forget what is long ago; to be called about once a second."""
        if now - self._rotated_s >= WINDOW_S:
            self._rotated_s, self._before, self._last = now, self._last, self._read()

    def counts(self) -> tuple[int, ...]:
        """Return the growth of each."""
        return tuple(now - before for now, before in zip(self._read(), self._before, strict=True))
