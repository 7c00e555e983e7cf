"""The Prometheus text format: the lines of a page, found by the names of their families.

A page has hundreds of lines, so only those of the families that are asked for are touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from extproc.errors import ExpositionError
from extproc.fleet.remembered import Remembered

MAX_REMEMBERED_BYTES: Final = 16 * 1024 * 1024
"""A series once written comes again in every scrape: to read its labels costs 5 us, to look them up
0.3 us. A remembered result is some four times as large as its text."""

_MAX_NAME_BYTES = 4096  # of a metric's name; a page may be one line of megabytes
_END = b"# EOF"  # of an OpenMetrics page: with a line feed, or without
_NAME = re.compile(rb"[a-zA-Z_:][\w:]*+(?=[{ \t])")
_LABEL_BLOCK = re.compile(rb'[ \t]*\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\}')
_INDENT = re.compile(rb"\n[ \t]+")
_OPENING = re.compile(rb"[ \t]*\{[ \t]*")
_LABEL = re.compile(
    rb'[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,[ \t]*|\Z)'
)
_ESCAPE = re.compile(r'\\([\\n"])')
_MAX_QUOTED_BYTES = 120  # of a line in an error message

Row = tuple[list[float], int]
"""Some values, and the place of one among them."""


class Lines:
    """The lines of a page.

    Attributes:
        page: Begins and ends with a line feed, and has no byte that no line of text has. No line
            begins with a blank.
        is_cut: Its end is missing.
        unreadable: Why the first line that could not be read was not; "" if all were.
        rows: By where the line of a series begins, less the first line feed: the values that it was
            read into, and its place among them; None where a line says more, or another thing.
        at: Where that of the last series that `series` yielded begins.
    """

    __slots__ = ("at", "is_cut", "num_unreadable", "page", "rows", "unreadable")

    def __init__(self, page: bytes) -> None:
        self.rows: dict[int, Row | None] = {}
        self.at = 0
        self.unreadable, self.num_unreadable, self.is_cut = "", 0, False
        if page and not page.endswith(b"\n"):
            whole_lines, _, last = page.rpartition(b"\n")
            self.is_cut = last.strip() != _END  # where it is optional
            page = whole_lines + b"\n"
        if b"\0" in page:
            page = b"".join(line for line in page.splitlines(keepends=True) if b"\0" not in line)
            self.note("a line of binary data")
        if self.is_cut:
            self.note("the metrics page is incomplete: no line feed at its end")
        _require_text_format(page, is_empty=not (page.strip() or self.unreadable))
        self.page = _INDENT.sub(b"\n", b"\n" + page)

    def note(self, why: str) -> None:
        """Note that a line cannot be read."""
        self.unreadable, self.num_unreadable = self.unreadable or why, self.num_unreadable + 1

    def series(self, family: str) -> Iterator[tuple[bytes, float]]:
        """Yield label block and value of each series of a family.

        Ends with the first group of lines; to search the rest costs 9 us. "All lines for a given
        metric must be provided as one single group" (Prometheus, "Exposition formats"). One line
        between them may be damaged.
        """
        page, name = self.page, b"\n" + family.encode()
        at = page.find(name)
        while at >= 0:
            rest = at + len(name)
            end = page.find(b"\n", rest)
            if page[rest] in b"{ \t":  # else a longer name that begins with this one
                self.at, self.rows[at] = at, None
                try:
                    yield split_line(page[rest:end])
                except ExpositionError as error:
                    self.note(str(error))
                at = end
                if not page.startswith(name, at):
                    at = page.find(b"\n", at + 1)
                    if at < 0 or not page.startswith(name, at):
                        return
            else:
                at = page.find(name, end)

    def labels(self, block: bytes) -> Mapping[str, str] | None:
        """Return the labels of a series; None where they cannot be read."""
        try:
            return read_labels(block)
        except ExpositionError as error:
            self.note(str(error))
            return None


def _require_text_format(page: bytes, *, is_empty: bool) -> None:
    """Raise unless the page is empty, or begins as the text format does, or has a series."""
    if is_empty or page.lstrip().startswith(b"#"):
        return
    if not any(map(_is_series, page.split(b"\n"))):
        raise ExpositionError(f"not a metrics page: it begins with {_quote(page.lstrip())}")


def _is_series(line: bytes) -> bool:
    name = _NAME.match(line, 0, _MAX_NAME_BYTES)
    if name is None:
        return False
    try:
        read_labels(split_line(line[name.end() :])[0])
    except ExpositionError:
        return False
    return True


def split_line(rest: bytes) -> tuple[bytes, float]:
    """Split the rest of a line, after the name, into label block (without its brace) and value.

    A timestamp and an exemplar after the value are ignored.
    """
    if b"#" in rest:
        labels = _LABEL_BLOCK.match(rest)
        before, _, _ = rest[labels.end() if labels else 0 :].partition(b"#")
        rest = (labels[0] if labels else b"") + before
    # A value or a timestamp has no brace in it, so the last one closes the labels.
    block, _, after = rest.rpartition(b"}")
    try:
        if b"_" not in after:  # float() takes 1_000, Prometheus not
            return block, float(after)
    except ValueError:
        pass  # a timestamp follows, or there is no number
    numbers = after.split()
    if not 1 <= len(numbers) <= 2 or b"_" in numbers[0]:
        raise ExpositionError(f"no value in {_quote(rest)}")
    try:
        return block, float(numbers[0])
    except ValueError:
        raise ExpositionError(f"not a number in {_quote(rest)}") from None


def _parse_labels(block: bytes) -> Mapping[str, str]:
    """Parse labels from their opening brace on, without the closing one."""
    labels: dict[str, str] = {}
    opening = _OPENING.match(block)
    if block and opening is None:
        raise ExpositionError(f"labels do not begin: {_quote(block)}")
    at = opening.end() if opening else 0
    while at < len(block):
        label = _LABEL.match(block, at)
        if label is None:
            raise ExpositionError(f"labels cannot be read: {_quote(block)}")
        try:
            value = label[2].decode()
        except UnicodeDecodeError:
            raise ExpositionError(f"labels are not UTF-8: {_quote(block)}") from None
        if "\\" in value:
            value = _ESCAPE.sub(lambda escape: escape[1].replace("n", "\n"), value)
        labels[label[1].decode()] = value
        at = label.end()
    return MappingProxyType(labels)


def _quote(text: bytes) -> str:
    return repr(text[:_MAX_QUOTED_BYTES].decode(errors="replace"))


read_labels = Remembered(_parse_labels, MAX_REMEMBERED_BYTES)
"""Returns the labels of a block; see `_parse_labels`."""
