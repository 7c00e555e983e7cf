"""The output and the files at the end of a test with locust."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from extproc.loadtest.locust.collecting import Collecting
from extproc.loadtest.locust.plan import options_of
from extproc.loadtest.measures import LoadSummary, summarize_records
from extproc.loadtest.report.words import print_summary
from extproc.loadtest.results import save, single_run
from extproc.workload.exchange import save_records

if TYPE_CHECKING:
    from argparse import Namespace

    from locust.env import Environment

EXIT_LAGGED = 3
EXIT_LOST = 4

_log = logging.getLogger(__name__)


def conclude(
    collecting: Collecting, environment: Environment, wall_clock: Callable[[], float]
) -> LoadSummary | None:
    """Write the files, set the process's exit code, and return the summary.

    None if nothing was sent.
    """
    options = options_of(environment)
    if not collecting.is_whole:
        environment.process_exit_code = EXIT_LOST
    elif collecting.has_failed:
        environment.process_exit_code = 1
    if not collecting.records:
        return None
    summary = summarize_records(collecting.records, slo=collecting.plan.slo)
    if summary.has_lagged and options.fail_on_lag:
        environment.process_exit_code = EXIT_LAGGED
    try:
        _write(collecting, options, wall_clock)
    except OSError as error:
        _log.error("cannot write the results: %s", error)
        environment.process_exit_code = 1
    return summary


def show(collecting: Collecting, summary: LoadSummary | None, console: Console) -> None:
    """Print the summary, whether the generator kept up, and what is missing."""
    if summary is None:
        console.print("no request was sent")
    else:
        print_summary(summary, console)
    for line in collecting.words():
        console.print(line, style="red", highlight=False)


def _write(collecting: Collecting, options: Namespace, wall_clock: Callable[[], float]) -> None:
    ordered = sorted(collecting.records, key=lambda record: record.index)
    if options.records:
        save_records(ordered, Path(options.records))
    if not options.result:
        return
    plan = collecting.plan
    result = single_run(
        ordered,
        name=plan.workload,
        target=f"url:{plan.url}",
        slo=plan.slo,
        date=datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="seconds"),
        rate_rps=plan.rate_rps,
        seed=plan.seed,
        about=f"Sent by locust in {plan.mode} loop, by {_processes(len(plan.workers))}.",
    )
    save(result, Path(options.result))


def _processes(num: int) -> str:
    return "one process" if num == 1 else f"{num} processes"
