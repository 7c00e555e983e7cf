"""The results of a pure function of texts, remembered up to a volume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_V = TypeVar("_V")

ENTRY_BYTES = 300
"""Of an entry's own objects, besides its text and its result."""


class Remembered(Generic[_V]):
    """A function of one or more texts, remembered; all is forgotten when it outgrows its volume.

    `functools.lru_cache` counts entries, and the length of one is chosen by whoever is read.

    Args:
        read: The function of bytes or strings; exceptions are not remembered.
        max_bytes: Limit of all texts and results, with `ENTRY_BYTES` for each. A result that
            takes more than a sixth of it is not remembered.
        size_bytes: Of a result.
    """

    def __init__(
        self, read: Callable[..., _V], max_bytes: int, size_bytes: Callable[[_V], int]
    ) -> None:
        self._read, self._size_bytes = read, size_bytes
        self._max_bytes = max_bytes
        self._answers: dict[object, _V] = {}
        self.num_bytes = 0

    def __call__(self, *texts: bytes | str) -> _V:
        """Return the result of `read` for `texts`."""
        answer = self._answers.get(texts)
        if answer is None:
            answer = self._read(*texts)
            num_bytes = ENTRY_BYTES + sum(map(len, texts)) + self._size_bytes(answer)
            if num_bytes > self._max_bytes / 6:
                return answer
            if self.num_bytes + num_bytes > self._max_bytes:
                self._answers.clear()
                self.num_bytes = 0
            self.num_bytes += num_bytes
            self._answers[texts] = answer
        return answer
