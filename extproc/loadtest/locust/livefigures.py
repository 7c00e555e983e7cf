"""The figures of a running test for the page.

Time is divided into bins; when there are too many, two become one. So a description costs the
same after an hour as after a minute: the process may be the one that sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from extproc.workload.exchange import RequestRecord
from extproc.workload.judge import Slo

MAX_BINS = 120
_COUNTS = ("sent", "told", "over", "met", "errors")
"""Requests by the time of sending. `told`: with a first token, or ended without one."""


class LiveFigures:
    """Counts requests by the time of sending; `slo` is their objective."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._bins: list[Counter[str]] = []
        self._whole: Counter[str] = Counter()
        self._bin_s = 1.0
        self._errors: Counter[str] = Counter()
        self._served: Counter[tuple[str, str]] = Counter()

    def begin(self, sent_s: float) -> None:
        """Record that a request was sent."""
        self._count(sent_s, {"sent": 1})

    def take_first(self, sent_s: float) -> None:
        """Record a request's first token, by the time of its sending."""
        self._count(sent_s, {"told": 1})

    def take(self, record: RequestRecord) -> None:
        """Record a request that ended."""
        counts = {
            "told": int(record.ttft_s is None),
            "over": 1,
            "met": int(self._slo.is_met(record)),
            "errors": int(bool(record.error)),
        }
        self._count(record.sent_s, counts)
        if record.error:
            self._errors[record.error] += 1
        if record.served_by:
            self._served[record.adapter or "(base model)", record.served_by] += 1

    def describe(self) -> dict[str, Any]:
        """Return all figures as plain values; times in ms."""
        return {
            "bin_s": self._bin_s,
            "slo_ttft_ms": self._slo.ttft_s * 1000,
            "slo_tpot_ms": self._slo.tpot_s * 1000,
            "whole": {name: self._whole[name] for name in _COUNTS},
            "bins": [{name: each[name] for name in _COUNTS} for each in self._bins],
            "errors": dict(self._errors.most_common()),
            "served": [[*key, num] for key, num in self._served.items()],
        }

    def _count(self, sent_s: float, counts: Mapping[str, int]) -> None:
        self._whole.update(counts)
        while sent_s / self._bin_s >= MAX_BINS:
            self._halve()
        number = max(0, int(sent_s / self._bin_s))
        self._bins += [Counter() for _ in range(number + 1 - len(self._bins))]
        self._bins[number].update(counts)

    def _halve(self) -> None:
        self._bin_s *= 2
        for kept, gone in zip(self._bins[::2], self._bins[1::2], strict=False):
            kept.update(gone)
        self._bins = self._bins[::2]
