"""A load test inside locust: one user class over our workloads.

Locust has the users, the processes, the table, charts and reports. It has no open loop: a process's
first user takes the process's whole share and sends each request when it is
due. In a closed loop each user takes one request after the other.

All processes begin at one moment of the wall clock, set by the one that makes the plan. It reaches
the workers in the options that locust sends them with its start message.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gevent
import msgspec
from locust import User, task
from locust.env import Environment
from locust.event import Events
from locust.exception import StopUser
from locust.runners import (
    STATE_MISSING,
    STATE_RUNNING,
    STATE_SPAWNING,
    MasterRunner,
    Runner,
    WorkerRunner,
)

from extproc.lab.loadtest.locust.firsttokens import chart
from extproc.lab.loadtest.locust.loadplan import (
    WATCH_S,
    LocustPlan,
    PlanShare,
    add_options,
    make_plan,
)
from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S
from extproc.lab.trials.suites import PlanError
from extproc.lab.workload.exchange import RequestRecord, save_records

LEAD_S = 0.3
"""From the plan to the begin: time for the sender to start."""
WORKER_LEAD_S = 1.0
"""The same with workers, without the time for making the workload and for spawning users."""
EXIT_LAGGED = 3
_WHOLE, _MET, _TTFT, _GAP, _DELAY = "POST", "served well", "TTFT", "inter-token", "schedule delay"
"""Rows of the table; locust lacks all but the first."""

_log = logging.getLogger(__name__)


class FailedRequest(Exception):
    """A failed request; the text is the kind of error."""

    def __repr__(self) -> str:
        return str(self)


class WorkloadUser(User):
    """A client. In an open loop, a process's first one stands for all of them."""

    abstract = True
    load_test: ClassVar[LoadTest]

    def wait_time(self) -> float:
        """Return the time to think before the next request of a closed loop, in seconds."""
        return self.load_test.think_s()

    @task
    def send(self) -> None:
        """Send what is this user's."""
        self.load_test.send()


class LoadTest:
    """The listeners of locust's events, for one locustfile.

    Args:
        events: Locust's.
        clock: Monotonic seconds.
        wall_clock: Seconds of the epoch.
    """

    def __init__(
        self, events: Events, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._environment: Environment
        self._plan: LocustPlan | None = None
        self._num_requests = 0
        self._share: PlanShare | None = None
        self._begun_s = 0.0
        self._done: set[str] = set()
        self._records: list[RequestRecord] = []
        events.init_command_line_parser.add_listener(add_options)
        events.init.add_listener(self._on_init)
        events.test_start.add_listener(self._on_test_start)
        events.spawning_complete.add_listener(self._on_spawning_complete)
        events.test_stop.add_listener(self._on_test_stop)
        events.report_to_master.add_listener(self._on_report_to_master)
        events.worker_report.add_listener(self._on_worker_report)

    # --- what users do ------------------------------------------------------------------------

    def think_s(self) -> float:
        """See `WorkloadUser.wait_time`."""
        return self._share.think_s() if self._share else 0.0

    def send(self) -> None:
        """Send the next request, or all in an open loop.

        Raises:
            StopUser: None is left.
        """
        if self._share is not None and self._share.left:
            self._share.send(partial(self._log, self._share.plan))
        if self._share is None or not self._share.left:
            raise StopUser

    def _log(self, plan: LocustPlan, record: RequestRecord) -> None:
        """Log a request that ended: as a whole, its delay, its first token and each gap after it.

        The whole goes through locust's `request` event, so that its plugins see it. The parts are
        in the table alone: they are not requests, and the row `Aggregated` must not count them.
        """
        entries: Mapping[tuple[str, str], Any] = self._environment.stats.entries
        path = plan.form.path
        self._environment.events.request.fire(
            request_type=_WHOLE,
            name=path,
            response_time=(record.ended_s - record.sent_s) * 1000,
            response_length=record.num_tokens,
            exception=FailedRequest(record.error) if record.error else None,
            context={},
        )
        times_s = [(_DELAY, record.delay_s), *((_GAP, gap_s) for gap_s in record.gaps_s)]
        if record.ttft_s is not None:
            times_s.append((_TTFT, record.ttft_s))
            if plan.slo.is_met(record):
                times_s.append((_MET, record.ttft_s))
        for row, seconds in times_s:
            entries[path, row].log(seconds * 1000, 0)
        if self._options.records or self._options.ttft_chart:
            self._records.append(record)

    # --- locust's events ----------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        assert self._environment.runner is not None
        return self._environment.runner

    @property
    def _options(self) -> Any:
        return self._environment.parsed_options

    def _on_init(self, environment: Environment, **_: Any) -> None:
        self._environment = environment
        options = self._options
        options.num_users = options.num_users or options.expect_workers
        options.spawn_rate = options.spawn_rate or options.expect_workers
        # Runs before locust's own listener, which tells the master that this worker is gone:
        # listeners are called in the opposite order.
        environment.events.quitting.add_listener(self._on_quitting)
        # Python raises KeyboardInterrupt wherever it is, also where exceptions are ignored.
        interrupt = gevent.get_hub().handle_system_error
        gevent.signal_handler(signal.SIGINT, interrupt, KeyboardInterrupt, KeyboardInterrupt())

    def _on_test_start(self, **_: Any) -> None:
        runner, options = self._runner, self._options
        self._records.clear()
        self._done.clear()
        plan: LocustPlan | None = None
        try:
            if not isinstance(runner, WorkerRunner):
                self._environment.process_exit_code = None
                options.extproc_plan = None
                self._plan = self._planned(runner)
                options.extproc_plan = msgspec.to_builtins(self._plan)
            plan = msgspec.convert(options.extproc_plan, type=LocustPlan | None)
            if plan and _id(runner) in plan.workers:  # else it joined after the work was divided
                begun_s = self._clock() + plan.starts_at_s - self._wall_clock()
                self._share = PlanShare(plan, plan.workers.index(_id(runner)), self._clock, begun_s)
        except Exception as error:  # locust would only log it; without a share users end at once
            if not isinstance(error, PlanError):
                _log.exception("the test cannot begin")
            text = str(error) or type(error).__name__
            _log.error("%s", text)
            runner.log_exception(_id(runner), text, "")
        self._begun_s = plan.starts_at_s if plan else 0.0

    def _on_spawning_complete(self, **_: Any) -> None:
        if not isinstance(self._runner, WorkerRunner):
            gevent.spawn(self._end_when_over)

    def _end_when_over(self) -> None:
        """End locust, or with the web UI the test only, when all processes are done or lost."""
        runner = self._runner
        while runner.state == STATE_RUNNING and not self._is_over():
            gevent.sleep(WATCH_S)
        if lagged := self._lag_words():  # now, as locust writes its report before it ends
            runner.log_exception(_id(runner), lagged, lagged)
        is_lost = isinstance(runner, MasterRunner) and not runner.worker_count
        if self._options.headless and (is_lost or runner.state == STATE_RUNNING):
            runner.quit()
        elif runner.state == STATE_RUNNING:
            runner.stop()

    def _is_over(self) -> bool:
        runner = self._runner
        if self._plan is None or not isinstance(runner, MasterRunner):
            return self._is_done
        # Its count of users may be of before they were spawned: workers say that they are done.
        alive = {client.id for client in runner.clients.all if client.state != STATE_MISSING}
        return not (alive & set(self._plan.workers)) - self._done

    @property
    def _is_done(self) -> bool:
        """Whether this process has sent its share, if it has one, and everything has ended."""
        return not self._runner.user_count and not (self._share and self._share.left)

    def _on_test_stop(self, **_: Any) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.close()
        if not self._options.headless:
            self._conclude()

    def _on_quitting(self, **_: Any) -> None:
        runner = self._runner
        if isinstance(runner, WorkerRunner):  # what was cut is reported, too
            runner.stop()
            data: dict[str, Any] = {}
            self._environment.events.report_to_master.fire(client_id=runner.client_id, data=data)
            runner.send_message("stats", data)
        elif runner.state in (STATE_RUNNING, STATE_SPAWNING):
            runner.quit()
        self._conclude()

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        done_s = self._begun_s if self._is_done else 0.0
        data["extproc"] = msgspec.msgpack.encode((done_s, self._records))
        self._records.clear()

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        done_s, records = msgspec.msgpack.decode(
            data["extproc"], type=tuple[float, list[RequestRecord]]
        )
        self._records += records
        if self._plan is not None and done_s == self._plan.starts_at_s:
            self._done.add(client_id)

    # --- begin and end of a test --------------------------------------------------------------

    def _planned(self, runner: Runner) -> LocustPlan:
        begun_s, workers = self._clock(), _senders(runner)
        plan = make_plan(self._options, self._environment.host or "", workers=workers)
        if runner.target_user_count < len(workers):
            raise PlanError(
                f"{runner.target_user_count} users cannot send from {len(workers)} workers: "
                f"-u {len(workers)} or more"
            )
        workload = plan.make_workload()
        self._num_requests = len(workload.arrivals)
        if not self._num_requests:
            raise PlanError(f"workload {plan.workload} has no requests")
        lead_s = LEAD_S
        if isinstance(runner, MasterRunner):
            lead_s = WORKER_LEAD_S + 2 * (self._clock() - begun_s)
            lead_s += (len(workers) - 1) / runner.spawn_rate
        is_open = plan.mode == "open"
        _log.info(
            "%s: %d requests for %d adapters%s, %s loop, to %s%s",
            workload.name,
            self._num_requests,
            sum(name is not None for name in workload.shares),
            f" at {workload.rate_rps:.3g}/s" if is_open else "",
            plan.mode,
            plan.url,
            plan.form.path,
        )
        return msgspec.structs.replace(plan, starts_at_s=self._wall_clock() + lead_s)

    def _lag_words(self, plan: LocustPlan | None = None) -> str:
        """Return how late a plan's requests were sent, by default this one's; "" if in time."""
        if (plan := plan or self._plan) is None:
            return ""
        late_ms = self._environment.stats.get(plan.form.path, _DELAY).median_response_time
        is_late = late_ms > 1e3 * MAX_MEDIAN_DELAY_S
        said = f"THE GENERATOR LAGGED: its median request was sent {late_ms:.0f} ms late"
        return f"{said}; do not trust these figures" if is_late else ""

    def _conclude(self) -> None:
        """Say what was served well and whether that can be trusted; set the exit code."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        env = self._environment
        path = plan.form.path
        num, num_met = (env.stats.get(path, row).num_requests for row in (_WHOLE, _MET))
        _log.info(
            "served well: %d of %d requests, %.1f %%", num_met, num, 100 * num_met / (num or 1)
        )
        if num < self._num_requests:
            env.process_exit_code = 1
            _log.error(
                "%d of %d requests were never sent, or lost with their worker",
                self._num_requests - num,
                self._num_requests,
            )
        if lagged := self._lag_words(plan):
            _log.error("%s", lagged)
            if self._options.headless:  # its report is written: it fails no test by itself
                self._runner.exceptions.pop(hash(lagged), None)
            if self._options.fail_on_lag:
                env.process_exit_code = EXIT_LAGGED
        try:
            self._write()
        except OSError as error:
            _log.error("cannot write a file: %s", error)
            env.process_exit_code = 1

    def _write(self) -> None:
        """Write the files that the options name."""
        records, drawn = self._options.records, self._options.ttft_chart
        if records:
            save_records(sorted(self._records, key=lambda each: each.index), Path(records))
        if drawn:
            Path(drawn).write_text(chart(self._records), encoding="utf-8")


def _id(runner: Runner) -> str:
    return str(getattr(runner, "client_id", ""))


def _senders(runner: Runner) -> list[str]:
    """Return the ids of the processes that share the work, in the order of their numbers."""
    if not isinstance(runner, MasterRunner):
        return [_id(runner)]
    clients = runner.clients
    ready = [client.id for client in (*clients.ready, *clients.running, *clients.spawning)]
    return sorted(ready, key=runner.get_worker_index)
