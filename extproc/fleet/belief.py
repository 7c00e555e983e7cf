"""How much of a load report is believed.

An engine says what runs and waits in each of its steps. When all of its requests are aborted at
once there is no further step, so its page shows them until the next request
(vllm-project/vllm#29928). But an engine with running requests makes steps, and those move its
counters.

Rules:
1. A report is old, whenever it was taken, if it shows more requests than routers know to be there,
   and nothing in it that changes with work has changed for `STILL_S`.
2. Of an old report, and of one whose numbers cannot be read, only as many requests count as routers
   know to be there, and only adapters that they have requests for.
3. Engines that do not count step by step (`LoadReport.work_tokens`) are believed.
"""

from __future__ import annotations

from collections.abc import Container

from msgspec.structs import replace

from extproc.types import LoadReport

STILL_S = 10.0
"""Longer than a step: the longest has a whole chunk of a prompt, 8,192 tokens, which a slow server
computes at 1,000 a second. Shorter than it takes until others' requests count for a choice
(`foreign.STEADY_S`), so that those of an old report never do."""


class Belief:
    """What is believed of one endpoint's reports.

    Attributes:
        is_old: The last one is old.
    """

    __slots__ = ("_moved_s", "_shown", "is_old")

    def __init__(self) -> None:
        self.is_old = False
        self._shown: tuple[object, ...] = ()
        self._moved_s = 0.0

    def of(
        self, report: LoadReport, num_known: int, adapters: Container[str], *, now: float
    ) -> LoadReport:
        """Return what is believed of a report of `now`, where `num_known` requests are known to be
        there, for these adapters among others."""
        num_running, num_waiting = report.num_running, report.num_waiting
        counted = report.num_deferred, report.work_tokens
        shown = (num_running, num_waiting, report.kv_usage_ratio, *counted)
        if shown != self._shown:
            self._shown, self._moved_s = shown, now
        is_still = report.work_tokens is not None and now - self._moved_s >= STILL_S
        self.is_old = is_still and num_running + num_waiting > num_known
        if report.has_counts and not self.is_old:
            return report
        num_running = min(num_running, num_known) if report.has_counts else num_known
        return replace(
            report,
            num_running=num_running,
            num_waiting=num_known - num_running,
            num_deferred=None,
            kv_usage_ratio=None if self.is_old else report.kv_usage_ratio,
            active_adapters=frozenset(each for each in report.active_adapters if each in adapters),
        )
