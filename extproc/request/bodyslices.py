"""Read a body slice by slice, in passes of bounded work: what readers of JSON and forms share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

SLICE_BYTES = 32 * 1024
"""Bytes read at once: 2 ms of the densest text (nested brackets), 0.01 of prompts."""

WORK_PER_PASS = 16 * 1024
"""Units of work after which other requests have their turn: 0.5 to 1.5 ms. A unit is a quote or a
bracket to look at (30 to 60 ns); other costs are counted in such units.
"""

_TEXT_BYTES_PER_UNIT = 64

State = Callable[[Any, bytes, int], int]
"""Reads a slice from a position on and returns how far; sets the state that continues there."""


Place = tuple[int, int]
"""Begin and end of a value, in bytes of the whole body."""


class IncrementalReader:
    """A state machine over a body that arrives in pieces."""

    work = 0  # units of work done so far; linear in the bytes read
    _read: State
    _num_read = 0
    _begin = 0  # of the part that is read now, in the body
    _carry = b""

    def feed(self, data: bytes | memoryview, at: int = 0) -> int:
        """Read `data` from `at` on for one pass; return where the next one begins.

        Takes memory of a small multiple of `SLICE_BYTES`. Raises RequestError (400) if the body is
        malformed.
        """
        limit = self.work + WORK_PER_PASS
        while at < len(data) and self.work < limit:
            begin, at = at, self._feed_slice(data, at, limit)
            self._num_read += at - begin
        return at

    def _feed_slice(self, data: bytes | memoryview, at: int, limit: int) -> int:
        stop = min(at + SLICE_BYTES, len(data))
        part, num_carried = self._carry + data[at:stop], len(self._carry)
        self._begin = self._num_read - num_carried
        self._carry = b""
        pos, end = 0, len(part)
        while pos < end:
            if self.work >= limit and pos > num_carried:
                return stop - (end - pos)
            pos = self._read(self, part, pos)
        self.work += 1 + (stop - at) // _TEXT_BYTES_PER_UNIT
        return stop

    def _wait(self, part: bytes, pos: int) -> int:
        """Keep an incomplete token; the state that waits for the rest bounds its length."""
        self._carry = part[pos:]
        return len(part)


def with_values(
    data: bytes | memoryview, values: Iterable[tuple[Place, bytes]], cuts: Iterable[Place] = ()
) -> bytes:
    """Return a body with other values at these places, and nothing at those to be cut out.

    No two overlap.
    """
    changes = sorted([*values, *((place, b"") for place in cuts)])
    pieces: list[bytes | memoryview] = []
    at = 0
    for (begin, end), value in changes:
        pieces += (data[at:begin], value)
        at = end
    return b"".join([*pieces, data[at:]])
