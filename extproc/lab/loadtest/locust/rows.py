"""The rows of locust's table that it lacks: times of tokens, delays, and what was served well."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from locust.env import Environment

from extproc.lab.loadtest.locust.plan import Plan
from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S
from extproc.lab.workload.exchange import RequestRecord

EXIT_LAGGED = 3
_WHOLE, _MET, _TTFT, _GAP, _DELAY = "POST", "served well", "TTFT", "inter-token", "schedule delay"

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """A failed request; the text is the kind of error."""

    def __repr__(self) -> str:
        return str(self)


def log_record(environment: Environment, plan: Plan, record: RequestRecord) -> None:
    """Log a request that ended: as a whole, its delay, its first token and each gap after it.

    The whole goes through locust's `request` event, so that its plugins see it. The others are in
    the table alone: they are not requests, and the row `Aggregated` must not count them.
    """
    entries: Mapping[tuple[str, str], Any] = environment.stats.entries
    path = plan.form.path

    def log(row: str, seconds: float) -> None:
        entries[path, row].log(seconds * 1000, 0)

    environment.events.request.fire(
        request_type=_WHOLE,
        name=path,
        response_time=(record.ended_s - record.sent_s) * 1000,
        response_length=record.num_tokens,
        exception=RequestError(record.error) if record.error else None,
        context={},
    )
    log(_DELAY, record.delay_s)
    if record.ttft_s is not None:
        log(_TTFT, record.ttft_s)
        if plan.slo.is_met(record):
            log(_MET, record.ttft_s)
    # 1.2 us each; reading the piece took ten.
    for gap_s in record.gaps_s:
        log(_GAP, gap_s)


def conclude(environment: Environment, plan: Plan, num_planned: int) -> None:
    """Say what was served well and whether that can be trusted; set the exit code."""
    path = plan.form.path
    num, num_met = (environment.stats.get(path, row).num_requests for row in (_WHOLE, _MET))
    late_ms = environment.stats.get(path, _DELAY).median_response_time
    _log.info("served well: %d of %d requests, %.1f %%", num_met, num, 100 * num_met / (num or 1))
    if num < num_planned:
        environment.process_exit_code = 1
        _log.error(
            "%d of %d requests were never sent, or lost with their worker",
            num_planned - num,
            num_planned,
        )
    if late_ms > 1e3 * MAX_MEDIAN_DELAY_S:
        _log.error("THE GENERATOR LAGGED: its median request was sent %d ms late", late_ms)
        options: Any = environment.parsed_options
        if options.fail_on_lag:
            environment.process_exit_code = EXIT_LAGGED
