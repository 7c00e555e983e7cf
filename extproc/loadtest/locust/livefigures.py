"""A running test in numbers that are cheap to keep and to ask for: what the page shows.

Time is divided into bins; when there are too many, two become one. Times to the first token and
delays are kept as counts in logarithmic classes. Asking costs the same after an hour as after a
minute, because the process that is asked may be the one that sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from math import ceil, exp, log
from typing import Any

from extproc.workload.exchange import RequestRecord
from extproc.workload.judge import Slo

MAX_BINS = 120
_CLASS = log(1.05)
"""Logarithm of a class's width: 5 %."""
_LEAST_S = 1e-4


class Histogram:
    """Counts of seconds in classes that are 5 % wide; below 0.1 ms all are one."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[max(0, ceil(log(max(seconds, _LEAST_S) / _LEAST_S) / _CLASS))] += 1

    def merge(self, other: Histogram) -> None:
        """Count what another counted."""
        self._counts.update(other._counts)

    def percentiles(self, parts: Iterable[float], *, num_more: int = 0) -> list[float | None]:
        """Upper ends of the classes where these parts of all values are reached, in ms.

        Args:
            parts: In [0, 1].
            num_more: So many values are to come that are larger than those that are there; a part
                that only they can reach is None.
        """
        total = self._counts.total() + num_more
        return [self._percentile(part, total) for part in parts]

    def _percentile(self, part: float, total: int) -> float | None:
        passed = 0
        for number in sorted(self._counts):
            passed += self._counts[number]
            if passed >= part * total:
                return round(_LEAST_S * exp(number * _CLASS) * 1000, 2)
        return None


@dataclass(slots=True)
class _Bin:
    """Requests by when they were sent, but for `num_ended` and `num_tokens`: by their end."""

    num_sent: int = 0
    num_over: int = 0
    num_told: int = 0
    """Those that have a first token, or are over without."""
    num_met: int = 0
    num_errors: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    delay: Histogram = field(default_factory=Histogram)

    def merge(self, other: _Bin) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Histogram):
                mine.merge(theirs)
            else:
                setattr(self, each.name, mine + theirs)


class LiveFigures:
    """Takes records, and tells the page what they amount to.

    Args:
        slo: What a request must meet.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._bins: list[_Bin] = []
        self._whole = _Bin()
        self._bin_s = 1.0
        self._errors: Counter[str] = Counter()
        self._served: Counter[tuple[str, str]] = Counter()

    def begin(self, at_s: float) -> None:
        """Count a request that is sent."""
        self._bin(at_s).num_sent += 1
        self._whole.num_sent += 1

    def take_first(self, sent_s: float, first_s: float) -> None:
        """Count a first token."""
        for sent in (self._bin(sent_s), self._whole):
            sent.num_told += 1
            sent.ttft.add(first_s - sent_s)

    def take(self, record: RequestRecord) -> None:
        """Count one request that is over."""
        is_met = self._slo.is_met(record)
        for sent in (self._bin(record.sent_s), self._whole):
            sent.num_over += 1
            sent.num_met += is_met
            sent.num_errors += bool(record.error)
            sent.delay.add(record.delay_s)
            sent.num_told += record.ttft_s is None
        for ended in (self._bin(record.ended_s), self._whole):
            ended.num_ended += not record.error
            ended.num_tokens += record.num_tokens
        if record.error:
            self._errors[record.error] += 1
        if record.served_by:
            self._served[record.adapter or "(base model)", record.served_by] += 1

    def describe(self) -> dict[str, Any]:
        """Everything, as plain values; times in ms, rates per second."""
        return {
            "bin_s": self._bin_s,
            "slo_ttft_ms": self._slo.ttft_s * 1000,
            "slo_tpot_ms": self._slo.tpot_s * 1000,
            "whole": self._describe_bin(self._whole, num_waiting=0),
            "bins": [
                self._describe_bin(b, num_waiting=b.num_sent - b.num_told) for b in self._bins
            ],
            "errors": dict(self._errors.most_common()),
            "served": [[*key, num] for key, num in self._served.items()],
        }

    def _bin(self, at_s: float) -> _Bin:
        number = max(0, int(at_s / self._bin_s))
        while number >= MAX_BINS:
            self._halve()
            number = int(at_s / self._bin_s)
        while len(self._bins) <= number:
            self._bins.append(_Bin())
        return self._bins[number]

    def _halve(self) -> None:
        self._bin_s *= 2
        for kept, gone in zip(self._bins[::2], self._bins[1::2], strict=False):
            kept.merge(gone)
        self._bins = self._bins[::2]

    def _describe_bin(self, one: _Bin, *, num_waiting: int) -> dict[str, Any]:
        """Those that are waiting yet will have waited longer than those that are not."""
        return {
            "sent": one.num_sent,
            "over": one.num_over,
            "told": one.num_told,
            "met": one.num_met,
            "errors": one.num_errors,
            "ended": one.num_ended,
            "tokens": one.num_tokens,
            "ttft": one.ttft.percentiles((0.5, 0.9, 0.99), num_more=num_waiting),
            "delay": one.delay.percentiles((0.5, 0.99)),
        }
