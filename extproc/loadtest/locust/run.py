"""A load test inside locust: its begin and end, and the exchange between its processes.

One process collects: locust's only one, or its master. It makes the plan when a test starts,
sends it to the workers with locust's own start message, and ends the test when all requests are
accounted for. One or more processes send: the only one, or the workers. Workers' records go to the
master in locust's own reports, which are sent every second and once when nothing is left, so that
the master has everything, locust's table included, before it ends the test.

All processes begin at one moment of the wall clock, set by the master. The requests of workers
on several machines are as far out of step as the machines' clocks; a worker that gets the plan too
late shows this in its schedule delay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import gevent
import msgspec
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.event import Events
from locust.runners import (
    STATE_MISSING,
    STATE_RUNNING,
    STATE_SPAWNING,
    MasterRunner,
    Runner,
    WorkerRunner,
)
from rich.console import Console

from extproc.loadtest.blocks import PlanError
from extproc.loadtest.locust.collecting import Collecting, News
from extproc.loadtest.locust.ends import conclude, show
from extproc.loadtest.locust.plan import Plan, add_options, make_plan, options_of
from extproc.loadtest.locust.webpage import add_page
from extproc.loadtest.locust.worker import Sending
from extproc.loadtest.measures import LoadSummary
from extproc.workload.requests import Workload

LEAD_S = 0.3
"""From the plan to the begin: time for the senders to start."""
WORKER_LEAD_S = 1.0
"""The same with workers, without the time for making the workload."""
REPORT_S = 1.0
WATCH_S = 0.1
FINAL_WAIT_S = 10.0
"""Longest wait for the workers' last records."""
_REPORT, _STOP = "extproc", "extproc_stop"

_log = logging.getLogger(__name__)


class LoadTest:
    """The listeners of locust's events, for one locustfile.

    Args:
        events: Locust's.
        clock: Monotonic seconds.
        wall_clock: Seconds of the epoch.
    """

    def __init__(
        self,
        events: Events,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._environment: Environment
        self._collecting: Collecting | None = None
        self._sending: Sending | None = None
        self._num_runs = 0
        self._is_concluded = True
        self._problem = ""
        self._summary: LoadSummary | None = None
        events.init_command_line_parser.add_listener(_add_options)
        events.init.add_listener(self._on_init)
        events.test_start.add_listener(self._on_test_start)
        events.test_stop.add_listener(self._on_test_stop)
        events.quit.add_listener(self._on_quit)

    # --- locust's events ------------------------------------------------------------------

    def _on_init(self, environment: Environment, runner: Runner, web_ui: Any, **_: Any) -> None:
        self._environment = environment
        # Runs before locust's own listener, which reports to the master that this worker is gone:
        # listeners are called in the opposite order.
        environment.events.quitting.add_listener(self._on_test_stop)
        if isinstance(runner, MasterRunner):
            environment.events.worker_report.add_listener(self._on_worker_report)
        if isinstance(runner, WorkerRunner):
            environment.events.report_to_master.add_listener(self._on_report_to_master)
            runner.register_message(_STOP, self._on_stop, concurrent=True)
        if web_ui is not None:
            add_page(web_ui, environment, self.describe, self._clock)

    def _on_test_start(self, environment: Environment, **_: Any) -> None:
        runner = _runner(environment)
        options = options_of(environment)
        try:
            if not isinstance(runner, WorkerRunner):
                options.extproc_plan = None
                self._begin_collecting(runner)
            plan = options.extproc_plan and msgspec.convert(options.extproc_plan, type=Plan)
            if plan and not isinstance(runner, MasterRunner):
                self._begin_sending(runner, plan)
        except Exception as error:  # locust would only log it, and run on
            if not isinstance(error, PlanError):
                _log.exception("the test cannot begin")
            self._problem = str(error) or type(error).__name__
            _log.error("%s", self._problem)
            environment.process_exit_code = 1
            gevent.spawn(self._end)

    def _on_test_stop(self, **_: Any) -> None:
        """The test ends, for whatever reason; may be called more than once."""
        runner = _runner(self._environment)
        self._stop_sending()
        if self._collecting is not None and not self._is_concluded:
            self._await_last(runner, self._collecting)
            self._conclude(self._collecting)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.stop()

    def _on_stop(self, **_: Any) -> None:
        self._stop_sending()

    def _conclude(self, collecting: Collecting) -> None:
        if self._is_concluded:
            return
        self._is_concluded = True
        self._summary = conclude(collecting, self._environment, self._wall_clock)
        if not options_of(self._environment).headless:
            show(collecting, self._summary, Console())

    def _on_quit(self, **_: Any) -> None:
        # After locust's own tables.
        if self._collecting is not None and options_of(self._environment).headless:
            show(self._collecting, self._summary, Console())

    # --- collecting --------------------------------------------------------------

    def _begin_collecting(self, runner: Runner) -> None:
        begun_s = self._clock()
        self._problem, self._collecting = "", None
        options = options_of(self._environment)
        workers = _senders(runner)
        self._num_runs += 1
        run = f"{self._num_runs}/{self._wall_clock():.6f}"
        host = self._environment.host or ""
        plan = make_plan(options, host, workers=workers, run=run)
        num_users = options.num_users or runner.target_user_count
        if plan.mode == "closed" and num_users < len(workers):
            raise PlanError(
                f"a closed loop needs a user per worker at least: {num_users} for {len(workers)}"
            )
        workload = plan.make_workload()
        if not workload.arrivals:
            raise PlanError(f"workload {plan.workload} has no requests")
        lead_s = LEAD_S
        if isinstance(runner, MasterRunner):
            lead_s = WORKER_LEAD_S + 2 * (self._clock() - begun_s)
        plan = msgspec.structs.replace(plan, starts_at_s=self._wall_clock() + lead_s)
        options.extproc_plan = msgspec.to_builtins(plan)
        self._collecting = Collecting(plan, plan.share_sizes(workload))
        self._is_concluded = False
        _log.info("%s", _described(plan, workload))
        gevent.spawn(self._watch, runner, self._collecting)

    def _watch(self, runner: Runner, collecting: Collecting) -> None:
        reported: set[str] = set()
        while not self._is_concluded and self._collecting is collecting:
            alive = _alive(runner)
            for worker in set(collecting.missing(alive)) - reported:
                reported.add(worker)
                _log.error("worker %s is gone; the others go on", worker)
            if not collecting.unfinished(alive):
                self._end()
                return
            gevent.sleep(WATCH_S)

    def _await_last(self, runner: Runner, collecting: Collecting) -> None:
        ends_s = self._clock() + FINAL_WAIT_S
        for worker in collecting.unfinished(_alive(runner)):
            if isinstance(runner, MasterRunner):
                runner.send_message(_STOP, client_id=worker)
        while collecting.unfinished(_alive(runner)) and self._clock() < ends_s:
            gevent.sleep(WATCH_S)

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        collecting, report = self._collecting, data.get(_REPORT)
        if collecting is None or report is None or report["run"] != collecting.plan.run:
            return
        collecting.take(client_id, msgspec.msgpack.decode(report["news"], type=News))

    # --- sending --------------------------------------------------------------------

    def _begin_sending(self, runner: Runner, plan: Plan) -> None:
        self._stop_sending()
        self._sending = None
        if _id(runner) in plan.workers:  # else it joined after the work was divided
            begun_s = self._clock() + plan.starts_at_s - self._wall_clock()
            self._sending = Sending(
                plan,
                plan.workers.index(_id(runner)),
                self._environment,
                self._hand_over,
                started_s=begun_s,
                clock=self._clock,
                report_s=REPORT_S if isinstance(runner, WorkerRunner) else WATCH_S,
            )

    def _hand_over(self) -> None:
        """Send news to the process that collects."""
        runner = _runner(self._environment)
        if isinstance(runner, WorkerRunner):
            data: dict[str, Any] = {}
            self._environment.events.report_to_master.fire(client_id=runner.client_id, data=data)
            runner.send_message("stats", data)
        elif self._collecting is not None and self._sending is not None:
            self._collecting.take(_id(runner), self._sending.take_news())

    def _on_report_to_master(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        if self._sending is not None:
            data[_REPORT] = {
                "run": self._sending.plan.run,
                "news": msgspec.msgpack.encode(self._sending.take_news()),
            }

    def _end(self) -> None:
        """End locust, or with the web UI the test only: the UI can start another."""
        runner = _runner(self._environment)
        ends_s = self._clock() + FINAL_WAIT_S
        while runner.state not in (STATE_SPAWNING, STATE_RUNNING) and self._clock() < ends_s:
            gevent.sleep(WATCH_S)
        if options_of(self._environment).headless:
            runner.quit()
        else:
            runner.stop()

    def describe(self) -> dict[str, Any]:
        """The test as it is now, for the page."""
        runner, collecting = self._environment.runner, self._collecting
        found: dict[str, Any] = {
            "state": runner.state if runner else "",
            "problem": self._problem,
            "figures": None,
        }
        if collecting is None:
            return found
        plan = collecting.plan
        return {
            **found,
            "workload": plan.workload,
            "url": plan.url,
            "mode": plan.mode,
            "num_requests": collecting.num_requests,
            "elapsed_s": self._wall_clock() - plan.starts_at_s,
            "is_over": self._is_concluded,
            "words": collecting.words() if self._is_concluded else [],
            "figures": collecting.figures.describe(),
        }


def _add_options(parser: LocustArgumentParser) -> None:
    add_options(parser)


def _runner(environment: Environment) -> Runner:
    assert environment.runner is not None
    return environment.runner


def _id(runner: Runner) -> str:
    return str(getattr(runner, "client_id", ""))


def _senders(runner: Runner) -> list[str]:
    """Return the ids of the processes that share the work, in the order of their numbers."""
    if not isinstance(runner, MasterRunner):
        return [_id(runner)]
    clients = runner.clients
    ready = [client.id for client in (*clients.ready, *clients.running, *clients.spawning)]
    return sorted(ready, key=runner.get_worker_index)


def _alive(runner: Runner) -> Collection[str]:
    if not isinstance(runner, MasterRunner):
        return [_id(runner)]
    return [client.id for client in runner.clients.all if client.state != STATE_MISSING]


def _described(plan: Plan, workload: Workload) -> str:
    asked = sum(name is not None for name in workload.shares)
    loop = "open loop" if plan.mode == "open" else "closed loop"
    rate = f" at {workload.rate_rps:.3g}/s" if plan.mode == "open" else ""
    return (
        f"{workload.name}: {len(workload.arrivals)} requests for {asked} adapters{rate}, {loop}, "
        f"to {plan.url}{plan.form.path}"
    )
