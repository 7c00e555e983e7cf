"""One of locust's processes in a test: it sends its share and keeps the records."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, TypeVar

import gevent

from extproc.loadtest.locust.closedloop import ClosedLoop
from extproc.loadtest.locust.collecting import News
from extproc.loadtest.locust.plan import Plan
from extproc.loadtest.locust.stats import Rows
from extproc.loadtest.locust.threads import InThread
from extproc.loadtest.replay import open_sender, send_when_due
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Arrival

if TYPE_CHECKING:
    from locust.env import Environment

_SWITCH_S = 0.0005
"""So long the thread that sends waits for the one that fills locust's table; Python's own 5 ms
would be most of a first token's time."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Sending:
    """Sends one share of a test, from now on, in a thread of its own.

    Args:
        plan: The test.
        place: The share's number.
        environment: Locust's.
        hand_over: Called regularly for `take_news`, and a last time when `is_final`.
        started_s: The clock's time at which the workload begins.
        clock: Monotonic seconds.
        report_s: Seconds between two calls of `hand_over`.

    Attributes:
        plan: The test.
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
        self._problem = ""
        self._place = place
        self._environment = environment
        self._hand_over = hand_over
        self._started_s = started_s
        self._clock = clock
        self._report_s = report_s
        self._workload = plan.make_workload()
        self._rows = Rows(environment, plan.form.path)
        # Filled by the thread, emptied by greenlets: each operation of a deque is atomic.
        self._ended: deque[RequestRecord] = deque()
        self._sent_s: deque[float] = deque()
        self._firsts_s: deque[float] = deque()
        self._records: list[RequestRecord] = []
        self._cancel: Callable[[], object] = lambda: None
        sys.setswitchinterval(_SWITCH_S)
        # What is there now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        self._thread = InThread(self._send_all)
        gevent.spawn(self._report)

    def stop(self) -> None:
        """Send nothing more, cut requests in flight, and hand over the last records."""
        if self._is_stopping:
            return
        self._is_stopping = True
        with suppress(RuntimeError):  # the thread's loop has ended by itself
            self._cancel()
        try:
            self._thread.wait()
        except Exception as error:  # whatever it is: the records so far count
            _log.exception("sending failed")
            self._problem = f"{type(error).__name__}: {error}"
        self._log_records()
        self.is_final = True
        self._hand_over()

    def take_news(self) -> News:
        """Return what has happened since the last call."""
        records, self._records = self._records, []
        times_s = _emptied(self._sent_s), _emptied(self._firsts_s)
        return News(records, *times_s, self.is_final, self._problem)

    def _report(self) -> None:
        while not self._is_stopping:
            if self._thread.has_ended:
                self.stop()
                return
            self._log_records()
            self._hand_over()
            gevent.sleep(self._report_s)

    def _log_records(self) -> None:
        """Add requests that ended to locust's table: only greenlets may call locust."""
        for record in _emptied(self._ended):
            self._rows.log(record)
            self._records.append(record)

    # --- in the thread ------------------------------------------------------------------------

    async def _send_all(self) -> None:
        loop, work = asyncio.get_running_loop(), asyncio.ensure_future(self._send_share())
        self._cancel = lambda: loop.call_soon_threadsafe(work.cancel)
        if self._is_stopping:
            work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _send_share(self) -> None:
        plan, share = self.plan, self.plan.share(self._workload, self._place)
        async with open_sender(plan.settings, self._clock, self._started_s) as sender:
            sender.on_sent = self._sent_s.append
            sender.on_first_token = self._firsts_s.append
            if plan.mode == "closed":
                rng = Random(f"think/{plan.seed}/{self._place}")
                await ClosedLoop(
                    sender,
                    share,
                    self._ended.append,
                    num_users=self._num_users,
                    think_s=plan.think_s,
                    rng=rng,
                ).run()
                return

            async def send(index: int, arrival: Arrival) -> None:
                self._ended.append(await sender.send(arrival, index, at_s=arrival.at_s))

            await send_when_due(share, send, sender.now)

    def _num_users(self) -> int:
        runner = self._environment.runner
        return runner.user_count if runner else 0


def _emptied(queue: deque[_T]) -> list[_T]:
    """The contents of a queue to which a thread may be adding."""
    return [queue.popleft() for _ in range(len(queue))]
