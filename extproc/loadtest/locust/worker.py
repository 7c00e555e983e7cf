"""What one of locust's processes does for a test: it sends its share and keeps the records."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import gevent

from extproc.loadtest.locust.closedloop import ClosedLoop
from extproc.loadtest.locust.collecting import News
from extproc.loadtest.locust.openloop import OpenLoop
from extproc.loadtest.locust.plan import Plan
from extproc.loadtest.locust.sending import Sender
from extproc.loadtest.locust.stats import Rows
from extproc.workload.exchange import RequestRecord

if TYPE_CHECKING:
    from locust.env import Environment


class Sending:
    """Sends one share of a test, from now on.

    Args:
        plan: The test.
        place: Which of its shares.
        environment: Locust's.
        hand_over: Called when there are records to take, and a last time when `is_final`.
        started_s: The clock's time at which the workload begins.
        clock: Monotonic seconds.
        report_s: How often records are handed over.

    Attributes:
        plan: The same.
        is_final: Nothing more is sent, and everything that was sent has its record.
    """

    def __init__(
        self,
        plan: Plan,
        place: int,
        environment: Environment,
        hand_over: Callable[[], None],
        *,
        started_s: float,
        clock: Callable[[], float],
        report_s: float,
    ) -> None:
        self.plan = plan
        self.is_final = False
        self._is_stopping = False
        self._hand_over = hand_over
        self._report_s = report_s
        self._records: list[RequestRecord] = []
        workload = plan.make_workload()
        self._rows = Rows(environment, plan.form.path, plan.by, workload)
        self._sender = Sender(
            plan.server,
            plan.form,
            timeout_s=plan.timeout_s,
            patience_s=plan.patience_s or None,
            started_s=started_s,
            clock=clock,
        )
        share = plan.share(workload, place)
        self._loop: OpenLoop | ClosedLoop
        if plan.mode == "open":
            self._loop = OpenLoop(self._sender, share, self._sink)
        else:
            rng = Random(f"think/{plan.seed}/{place}")
            self._loop = ClosedLoop(self._sender, share, self._sink, think_s=plan.think_s, rng=rng)
        # What is there now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        if isinstance(self._loop, OpenLoop):
            self._loop.start()
        gevent.spawn(self._report)

    def ask(self) -> bool:
        """Be a user of a closed loop for one question; False if the loop is open."""
        if isinstance(self._loop, ClosedLoop):
            self._loop.ask()
            return True
        return False

    def stop(self) -> None:
        """Send nothing more, cut what is under way, and hand over the last records."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._loop.stop()
        self._sender.close()
        self.is_final = True
        self._hand_over()

    def take_news(self) -> News:
        """What nobody has taken yet."""
        records, self._records = self._records, []
        begun_s, firsts_s = self._sender.take_begun(), self._sender.take_firsts()
        return News(records, begun_s, firsts_s, self.is_final)

    def _sink(self, record: RequestRecord) -> None:
        self._rows.log(record)
        self._records.append(record)

    def _report(self) -> None:
        while not self._is_stopping:
            if self._loop.is_over:
                self.stop()
                return
            self._hand_over()
            gevent.sleep(self._report_s)
