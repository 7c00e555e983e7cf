"""The pages of one server, one after the other: what has not changed is not read again.

Of hundreds of lines a few have another value than on the last page, and a server adds series of
adapters to those that it has. A page of one pod with another figure takes 56 thousand instructions
so, and 611 read as a whole; with 64 adapters 125 and 2,402.
"""

from __future__ import annotations

import re
from itertools import accumulate, compress, count
from math import inf
from operator import ne

from extproc.bounds import MAX_WALL_S
from extproc.errors import ExpositionError
from extproc.reports.engines import EngineMetrics
from extproc.reports.exposition import (
    MAX_LORA_SERIES,
    Figures,
    LoraLog,
    make_report,
    read_figures,
    read_log,
    read_state,
)
from extproc.reports.textformat import Lines, ValuesAt, split_line
from extproc.types import LoadReport

# The part before the last blank of a line with a value and no timestamp or exemplar.
_SERIES = re.compile(rb"[\w:]+(?:\{[^#]*\})?")
_NUMBER = re.compile(rb"[0-9.e+-]+")
_MAX_KEPT_NAMES = 2048  # of the LoRA series of a page, 100 bytes each
_OTHER: ValuesAt = [0.0], 0  # of a line that nobody reads


class PageReader:
    """Reads the pages of one server. Reports are those of `parse_report`.

    It keeps the last page and its parts, about three times as much as the page has.
    """

    def __init__(self, profile: EngineMetrics) -> None:
        self._profile = profile
        self._series = b"" if profile.lora_info is None else profile.lora_info.family.encode()
        self._report = LoadReport()
        self._page: bytes | None = None
        self._lines: list[bytes] = []
        self._rows: dict[int, ValuesAt | None] = {}  # by the number of the line
        self._end = 0  # the line after the last series of adapters
        self._log: LoraLog = frozenset(), (), 0
        self._figures: Figures | None = None  # None where the next page must be read as a whole

    def read(self, page: bytes) -> LoadReport:
        """Return the report of a page.

        Raises:
            ExpositionError: As `parse_report`.
        """
        if page != self._page:
            lines = page.split(b"\n")
            if not self._reread(lines):
                self._read(page, lines)
            self._page, self._lines = page, lines
        return self._report

    def _read(self, page: bytes, texts: list[bytes]) -> None:
        self._figures = None
        lines = Lines(page)
        figures = read_figures(lines, self._profile)
        self._log = read_log(figures)
        self._report = make_report(figures, self._log, self._profile)
        num_names = sum(len(adapters) for _, adapters in figures.states)
        # Else what begins where is not known, or it would be much to keep.
        if lines.page != page or num_names > _MAX_KEPT_NAMES or lines.rows is None:
            return
        self._figures, self._rows, self._end = figures, {}, 0
        for number, at in enumerate(accumulate((len(text) + 1 for text in texts), initial=0)):
            if at in lines.rows:
                row = lines.rows[at]
                self._rows[number] = row if _is_plain(texts[number]) else None
                if row is not None and row[0] is figures.times_s:
                    self._end = number + 1

    def _reread(self, lines: list[bytes]) -> bool:
        """Make the report of a page by what it has else than the last one. Return False if it has
        to be read as a whole."""
        figures, before = self._figures, self._lines
        if figures is None:
            return False
        is_active = len(lines) != len(before)
        if is_active:
            if not self._add_series(figures, lines):
                return False
            before = self._lines
        for number in compress(count(), map(ne, lines, before)):
            value = _changed_value(before[number], lines[number])
            row = self._rows.get(number, _OTHER)
            if value is None or row is None:
                return False
            values, place = row
            values[place] = value
            if values is figures.times_s:
                is_active = True
                if not 0 < value < MAX_WALL_S:
                    return False
        if is_active:
            self._log = read_log(figures)
        self._report = make_report(figures, self._log, self._profile)
        return True

    def _add_series(self, figures: Figures, lines: list[bytes]) -> bool:
        """Read the series of adapters that have come behind the last ones."""
        num, at, info = len(lines) - len(self._lines), self._end, self._profile.lora_info
        new = lines[at : at + max(0, num)]
        if not at or info is None or len(new) != num:
            return False
        self._rows = {n if n < at else n + num: row for n, row in self._rows.items()}
        self._lines = [*self._lines[:at], *new, *self._lines[at:]]
        for number, line in enumerate(new, start=at):
            name, rest = line[: len(self._series)], line[len(self._series) :]
            if name != self._series or not rest.startswith(b"{") or not _is_plain(line):
                return False
            try:
                block, at_s = split_line(rest)
                figures.states.append(read_state(block, info))
            except ExpositionError:
                return False
            self._rows[number] = figures.times_s, len(figures.times_s)
            figures.times_s.append(at_s)
            if not 0 < at_s < MAX_WALL_S:
                return False
        self._end = at + num
        return len(figures.times_s) <= MAX_LORA_SERIES


def _is_plain(line: bytes) -> bool:
    """Return whether a line is a series and its value, and nothing else."""
    series, _, value = line.rpartition(b" ")
    is_plain = _SERIES.fullmatch(series) is not None and b"\0" not in line
    return is_plain and _NUMBER.fullmatch(value) is not None


def _changed_value(before: bytes, line: bytes) -> float | None:
    """Return the last word of a line; None if that is no number, or not the only
    change."""
    series, _, value = line.rpartition(b" ")
    if series != before.rpartition(b" ")[0] or _NUMBER.fullmatch(value) is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number < inf else None
