"""One endpoint's load reports, how far they are believed, and for how long."""

from __future__ import annotations

from collections import deque
from math import inf

from msgspec.structs import replace

from extproc.learned.decoding import Decoding
from extproc.learned.expected import Expected
from extproc.pods.foreign import ReportTrust
from extproc.pods.podrow import PodRow
from extproc.pods.serverflags import PoolSettings
from extproc.types import LoadReport

RESTART_TOLERANCE_S = 1.0
"""Start times of one process are equal up to float printing; a restart takes longer than this."""
MAX_PAGES = 64
"""Reports of 3 s at the fastest pace."""


class PodReports:
    """The reports of one endpoint.

    Attributes:
        report: The last one.
        reported_at_s: When it was taken.
        trust: In them.
        expected: The contents that the next ones should have.
        decoding: The time per token that they show.
        pages: When reports of late showed fewer requests than ours, and how many.
    """

    def __init__(self, row: PodRow) -> None:
        self._row = row
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self._rest_s = 0.0  # the longest time from the last one until the next is asked for
        self.trust, self.expected, self.decoding = ReportTrust(), Expected(), Decoding()
        self.pages: deque[tuple[float, int]] = deque(maxlen=MAX_PAGES)

    def reported(self, report: LoadReport, *, rest_s: float, now: float) -> None:
        """Replace the last report."""
        self.report, self.reported_at_s, self._rest_s = report, now, rest_s

    def correct(self, kv_usage_ratio: float, num_waiting: int) -> None:
        """Replace some of the last report's content by what is newer."""
        if self.report is not None:
            self.report = replace(
                self.report, kv_usage_ratio=kv_usage_ratio, num_waiting=num_waiting
            )
            self._row.renew()

    def missed(self) -> None:
        """Record that a call of ours has failed: the last report is as old as it is."""
        if self._rest_s:
            self._rest_s = 0.0
            self._row.renew()

    def expires_s(self, settings: PoolSettings) -> float:
        """Return until when the last one is trusted: longer if none is asked for meanwhile."""
        at_s = self.reported_at_s
        return -inf if at_s is None else at_s + self._rest_s + settings.report_expiry_s

    def says_start(self, now: float, settings: PoolSettings) -> bool:
        """Return whether they show a restart: they come, and say when the process started."""
        has_start = self.report is not None and self.report.process_start_wall_s is not None
        return has_start and now <= self.expires_s(settings)

    def is_restart(self, report: LoadReport) -> bool:
        """Return whether the process restarted between the last report and this one."""
        before = None if self.report is None else self.report.process_start_wall_s
        after = report.process_start_wall_s
        if before is None or after is None:
            return False
        return abs(after - before) > RESTART_TOLERANCE_S
