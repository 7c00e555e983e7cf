"""The Prometheus text format: the lines of a page, found by the names of their families.

A page has hundreds of lines, so only those of the families that are asked for are touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Final

from extproc.errors import ExpositionError
from extproc.passes import no_rest
from extproc.reports.remembered import Remembered

MAX_REMEMBERED_BYTES: Final = 8 * 1024 * 1024
"""Of labels, and as much of what series of adapters say. A series once written comes again in every
scrape: to read its labels costs 5 us, to look them up 0.3 us."""

MAX_LINE_BYTES: Final = 256 * 1024
"""Of one series: a thousand adapters' names of a hundred bytes in each of two labels. To read one
takes some times as much memory."""

_MAX_LEADING_LINES = 4096  # before the first series or comment
_MAX_BINARY_LINES = 64
_PASS_BYTES = 16 * 1024  # of one call that does not let other threads run
_FIND_BYTES = 16 * _PASS_BYTES  # likewise, of a search for one text
_MAX_NAME_BYTES = 4096  # of a metric's name; a page may be one line of megabytes
_END = b"# EOF"  # of an OpenMetrics page: with a line feed, or without
_NAME = re.compile(rb"[a-zA-Z_:][\w:]*+(?=[{ \t])")
_LABEL_BLOCK = re.compile(rb'[ \t]*\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\}')
_BLANKS = b" ", b"\t"
_INDENT = re.compile(rb"\n[ \t]+")
_OPENING = re.compile(rb"[ \t]*\{[ \t]*")
_LABEL = re.compile(
    rb'[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*(?:,[ \t]*|\Z)'
)
_ESCAPE = re.compile(r'\\([\\n"])')
_LABEL_BYTES = 120  # of a label's name, and its place among the others
_MAX_QUOTED_BYTES = 120  # of a line in an error message

ValuesAt = tuple[list[float], int]
"""Some values, and the place of one among them."""


class Lines:
    """The lines of a page.

    Attributes:
        page: Ends with a line feed, and has no byte that no line of text has. No line begins with a
            blank. It is the one that was given, where nothing of it had to go: of a long one there
            is no copy.
        is_cut: Its end is missing.
        unreadable: Why the first line that could not be read was not; "" if all were.
        rows: By where the line of a series begins: the values that it was read into, and its place
            among them; None where a line says more, or another thing.
        at: Where that of the last series that `series` yielded begins.
        rest: Called again and again; rests where others wait for this thread.
    """

    __slots__ = ("at", "is_cut", "num_unreadable", "page", "rest", "rows", "unreadable")

    def __init__(
        self, page: bytes, *, keeps_rows: bool = True, rest: Callable[[], None] = no_rest
    ) -> None:
        self.rest = rest
        self.rows: dict[int, ValuesAt | None] | None = {} if keeps_rows else None
        self.at = 0
        self.unreadable, self.num_unreadable, self.is_cut = "", 0, False
        if page and not page.endswith(b"\n"):
            end = page.rfind(b"\n") + 1
            self.is_cut = page[end:][: 2 * len(_END)].strip() != _END  # where it is optional
            page = page[:end]
        if b"\0" in page:
            page = _without_binary(page)
            self.note("a line of binary data")
        if self.is_cut:
            self.note("the metrics page is incomplete: no line feed at its end")
        _require_text_format(page, is_damaged=bool(self.unreadable))
        self.page = _without_indents(page, rest)

    def note(self, why: str) -> None:
        """Note that a line cannot be read."""
        self.unreadable, self.num_unreadable = self.unreadable or why, self.num_unreadable + 1

    def keep_row(self, at: int, row: ValuesAt | None) -> None:
        """Note what the line of a series was read into, if anybody is to know."""
        if self.rows is not None:
            self.rows[at] = row

    def series(self, family: str) -> Iterator[tuple[bytes, float]]:
        """Yield label block and value of each series of a family.

        Ends with the first group of lines; to search the rest costs 9 us. "All lines for a given
        metric must be provided as one single group" (Prometheus, "Exposition formats"). One line
        between them may be damaged.
        """
        page, name = self.page, b"\n" + family.encode()
        # The line feed before a line; the first line has none.
        at = -1 if page.startswith(name[1:]) else self._find(name, 0)
        while at is not None:
            rest = at + len(name)
            end = page.find(b"\n", rest)
            if page[rest] in b"{ \t":  # else a longer name that begins with this one
                self.at = at + 1
                self.keep_row(self.at, None)
                try:
                    if end - rest > MAX_LINE_BYTES:
                        raise ExpositionError(f"a series of {family}: over {MAX_LINE_BYTES} bytes")
                    yield split_line(page[rest:end])
                except ExpositionError as error:
                    self.note(str(error))
                at = end
                self.rest()
                if not page.startswith(name, at):
                    at = page.find(b"\n", at + 1)
                    if at < 0 or not page.startswith(name, at):
                        return
            else:
                at = self._find(name, end)

    def _find(self, name: bytes, at: int) -> int | None:
        while True:
            found = self.page.find(name, at, at + _FIND_BYTES + len(name))
            self.rest()
            at += _FIND_BYTES
            if found >= 0:
                return found
            if at >= len(self.page):
                return None

    def labels(self, block: bytes) -> Mapping[str, str] | None:
        """Return the labels of a series; None where they cannot be read."""
        try:
            return read_labels(block)
        except ExpositionError as error:
            self.note(str(error))
            return None


def _without_binary(page: bytes) -> bytes:
    """Return a page without the lines that have a byte that no line of text has."""
    lines, begin = list[bytes](), 0
    for _ in range(_MAX_BINARY_LINES):
        at = page.find(b"\0", begin)
        if at < 0:
            return b"".join([*lines, page[begin:]])
        lines.append(page[begin : page.rfind(b"\n", begin, at) + 1 or begin])
        begin = page.find(b"\n", at) + 1 or len(page)
    raise ExpositionError(f"not a metrics page: {_MAX_BINARY_LINES} lines of binary data")


def _without_indents(page: bytes, rest: Callable[[], None]) -> bytes:
    """Return a page of which no line begins with a blank."""
    if b"\n " not in page and b"\n\t" not in page and page[:1] not in _BLANKS:
        return page
    # Not copied to be joined, as parts of it would be.
    kept, begin = BytesIO(), len(page) - len(page.lstrip(b" \t"))
    while begin < len(page):
        end = page.find(b"\n", begin + _PASS_BYTES)
        end = len(page) if end < 0 else end
        kept.write(_INDENT.sub(b"\n", page[begin:end]))
        rest()
        begin = end
    return kept.getvalue()


def _require_text_format(page: bytes, *, is_damaged: bool) -> None:
    """Raise unless the page was empty, or begins as the text format does, or has a series."""
    begin, first = 0, b""
    for _ in range(_MAX_LEADING_LINES):
        end = page.find(b"\n", begin)
        if end < 0:
            break
        line = page[begin : min(end, begin + MAX_LINE_BYTES)].lstrip()
        first = first or line
        if first.startswith(b"#") or _is_series(line):
            return
        begin = end + 1
    if first or is_damaged:
        raise ExpositionError(f"not a metrics page: it begins with {_quote(first)}")


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


def parse_labels(block: bytes) -> Mapping[str, str]:
    """Parse labels from their opening brace on, without the closing one.

    Raises:
        ExpositionError: They cannot be read.
    """
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


def _size_bytes(labels: Mapping[str, str]) -> int:
    return 4 * sum(map(len, labels.values())) + _LABEL_BYTES * len(labels)


read_labels = Remembered(parse_labels, MAX_REMEMBERED_BYTES, _size_bytes)
"""Returns the labels of a block; see `parse_labels`."""
