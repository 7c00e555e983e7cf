"""Skip a JSON value that arrives in pieces: find its end, keep nothing, check nothing.

A few passes of C code over a piece do it: escapes blanked, all but quotes and brackets deleted,
closing brackets counted.
"""

from __future__ import annotations

import re
from itertools import accumulate
from operator import indexOf
from typing import Any

_ESCAPED_BYTES_PER_UNIT = 8
_STEPWISE_BYTES = 64
"""Bytes of a value that are read mark by mark, where most values end."""

_MARKS = re.compile(rb'["\[\]{}]')
_ALL_BUT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1 and -1


class _Skipper:
    """The state of skipping one value.

    `skip` returns the position behind the value's end, or the end of the piece.
    """

    has_ended = False
    work = 0  # units of work done so far (`bodyslices.WORK_PER_PASS`)
    _is_escaped = False

    def _unescaped(self, piece: bytes) -> bytes:
        """Blank every escape of the piece; remember one that continues behind it."""
        if self._is_escaped:
            piece, self._is_escaped = b"_" + piece[1:], False
        if b"\\" in piece:
            self.work += len(piece) // _ESCAPED_BYTES_PER_UNIT
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._is_escaped = piece.endswith(b"\\")
        return piece


class StringSkipper(_Skipper):
    """Skips a string from behind its opening quote. Looks at twice as much each time."""

    def skip(self, part: bytes, pos: int) -> int:
        """Go on behind the closing quote, or to the end of `part` where it is not here."""
        size = _STEPWISE_BYTES
        while pos < len(part):
            if not self._is_escaped:
                pos = _before_mark(part, pos)
            found = self._unescaped(part[pos : pos + size]).find(b'"')
            if found >= 0:
                self.has_ended = True
                return pos + found + 1
            pos, size = min(pos + size, len(part)), 2 * size
        return pos


class ContainerSkipper(_Skipper):
    """Skips a list or an object from behind its opening bracket.

    Doubles its steps until one contains the end, then halves them, so that the cost is linear in
    the value and not in the slice.
    """

    _depth = 1
    _is_in_string = False

    def skip(self, part: bytes, pos: int) -> int:
        """Go on behind the bracket that ends it, or to the end of `part`."""
        size, is_growing = _STEPWISE_BYTES, True
        while pos < len(part):
            piece = part[pos : pos + size]
            if len(piece) <= _STEPWISE_BYTES:
                found = self._walk(piece)
                if found:
                    self.has_ended = True
                    return pos + found
            elif self._ends_within(piece):
                size, is_growing = len(piece) // 2, False
                continue
            pos += len(piece)
            size = 2 * size if is_growing else size
        return pos

    def _walk(self, piece: bytes) -> int:
        """Read a piece mark by mark; return the position behind the value's end, or 0."""
        depth, is_in_string = self._depth, self._is_in_string
        self.work += 2 * len(piece)
        for found in _MARKS.finditer(self._unescaped(piece)):
            mark = found[0]
            if mark == b'"':
                is_in_string = not is_in_string
            elif not is_in_string:
                depth += 1 if mark in b"[{" else -1
                if not depth:
                    return found.end()
        self._depth, self._is_in_string = depth, is_in_string
        return 0

    def _ends_within(self, piece: bytes) -> bool:
        """Return whether the value ends in a piece; if not, the piece has been skipped.

        Deleting pairs changes nothing: two adjacent quotes end where they began, in or outside a
        string, and `[]` ends nothing that was open before it.
        """
        was_escaped = self._is_escaped
        marks = self._unescaped(piece).translate(None, _ALL_BUT_MARKS)
        self.work += len(marks)
        if self._is_in_string:
            marks = b'"' + marks
        marks = marks.replace(b'""', b"").replace(b"[]", b"").replace(b"{}", b"")
        outside = b"".join(marks.split(b'"')[::2])
        num_closers = outside.count(b"]") + outside.count(b"}")
        if num_closers >= self._depth:
            steps = memoryview(outside.translate(_STEPS)).cast("b")
            if _has_zero(accumulate(steps, initial=self._depth)):
                self._is_escaped = was_escaped
                return True
        self._depth += len(outside) - 2 * num_closers
        self._is_in_string = marks.count(b'"') % 2 == 1
        return False


def _before_mark(part: bytes, pos: int) -> int:
    """Return the position of the first quote or backslash from `pos` on, or the end."""
    quote = part.find(b'"', pos)
    end = len(part) if quote < 0 else quote
    backslash = part.find(b"\\", pos, end)
    return end if backslash < 0 else backslash


def _has_zero(depths: Any) -> bool:
    try:
        indexOf(depths, 0)
    except ValueError:
        return False
    return True
