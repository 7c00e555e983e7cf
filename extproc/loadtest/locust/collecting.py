"""The records of a whole test, collected from its processes, and those that are missing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from extproc.loadtest.locust.livefigures import LiveFigures
from extproc.loadtest.locust.plan import Plan
from extproc.loadtest.replay import STOPPED
from extproc.workload.exchange import RequestRecord


class News(msgspec.Struct, array_like=True):
    """One process's news since its last ones; times as in records.

    Attributes:
        records: Of requests that ended.
        begun_s: Times of requests that were sent.
        firsts_s: Times of sending of requests that got their first token.
        is_final: These are the process's last news.
        problem: The error that ended its sending, or "".
    """

    records: list[RequestRecord]
    begun_s: list[float]
    firsts_s: list[float]
    is_final: bool
    problem: str = ""


@dataclass(slots=True)
class _Share:
    worker: str
    num_requests: int
    num_records: int = 0
    is_final: bool = False
    problem: str = ""


class Collecting:
    """A test's records so far.

    Args:
        plan: The test.
        sizes: The number of requests of each of its processes.

    Attributes:
        records: In the order of their arrival.
        figures: The same records, for the page.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int]) -> None:
        self.plan = plan
        self.records: list[RequestRecord] = []
        self.figures = LiveFigures(plan.slo)
        self._shares = [_Share(*pair) for pair in zip(plan.workers, sizes, strict=True)]

    def take(self, worker: str, news: News) -> None:
        """Add one process's news."""
        share = next((each for each in self._shares if each.worker == worker), None)
        if share is None or share.is_final:
            return
        for at_s in news.begun_s:
            self.figures.begin(at_s)
        for sent_s in news.firsts_s:
            self.figures.take_first(sent_s)
        for record in news.records:
            share.num_records += 1
            self.records.append(record)
            self.figures.take(record)
        share.is_final = news.is_final
        share.problem = news.problem

    @property
    def num_requests(self) -> int:
        """The number of requests of the whole workload."""
        return sum(share.num_requests for share in self._shares)

    def missing(self, alive: Collection[str]) -> list[str]:
        """Return the processes that are gone without having accounted for all their requests."""
        return [s.worker for s in self._shares if not s.is_final and s.worker not in alive]

    def unfinished(self, alive: Collection[str]) -> list[str]:
        """Return the processes of which more news are expected."""
        return [s.worker for s in self._shares if not s.is_final and s.worker in alive]

    def words(self) -> list[str]:
        """Return why the test is not whole, a line for each reason."""
        lines = []
        num_cut = sum(record.error == STOPPED for record in self.records)
        num_unsent = sum(s.num_requests - s.num_records for s in self._shares if s.is_final)
        if num_cut or num_unsent:
            lines.append(
                f"stopped in the middle: {num_cut} requests in flight were cut, "
                f"{num_unsent} were never sent"
            )
        for share in self._shares:
            if share.problem:
                lines.append(f"worker {share.worker} stopped sending: {share.problem}")
            num_lost = share.num_requests - share.num_records
            if not share.is_final:
                lines.append(
                    f"worker {share.worker} was lost: {num_lost} of its {share.num_requests} "
                    "requests were never accounted for"
                )
        return lines

    @property
    def has_failed(self) -> bool:
        """Whether an error ended the sending of a process."""
        return any(share.problem for share in self._shares)

    @property
    def is_whole(self) -> bool:
        """Whether every process accounted for its requests."""
        return all(share.is_final for share in self._shares)
