"""Rows of locust's own table, from records.

Whole requests go through locust's `request` event, so that its plugins see them. The other rows are
logged in the table alone: they are not requests, and the row `Aggregated` must not count them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from extproc.loadtest.locust.plan import By
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Workload

if TYPE_CHECKING:
    from locust.env import Environment

MAX_GROUPS = 20
"""Rows of adapters or tenants, those with the most requests."""
_OTHERS = "the others"


class RequestError(Exception):
    """A failed request; the text is the kind of error."""

    def __repr__(self) -> str:
        return str(self)


class Rows:
    """Logs records to the table.

    Args:
        environment: Locust's.
        path: Name of the rows for all requests.
        by: The grouping of further rows.
        workload: Determines the largest groups.
    """

    def __init__(self, environment: Environment, path: str, by: By, workload: Workload) -> None:
        self._entries: Mapping[tuple[str, str], Any] = environment.stats.entries
        self._fire: Callable[..., None] = environment.events.request.fire
        self._path = path
        self._by = by
        self._names = _group_names(workload, by)

    def log(self, record: RequestRecord) -> None:
        """Log one request: as a whole, its first token, each gap after it, its delay."""
        whole_ms = (record.ended_s - record.sent_s) * 1000
        self._fire(
            request_type="POST",
            name=self._path,
            response_time=whole_ms,
            response_length=record.num_tokens,
            exception=RequestError(record.error) if record.error else None,
            context={},
        )
        self._log("schedule delay", self._path, record.delay_s)
        self._log_times(self._path, record)
        if self._by != "none":
            group = record.adapter if self._by == "adapter" else record.tenant
            name = self._names.get(group or "", _OTHERS)
            self._log("POST", name, whole_ms / 1000, record.num_tokens)
            self._log_times(name, record)

    def _log_times(self, name: str, record: RequestRecord) -> None:
        if record.ttft_s is not None:
            self._log("TTFT", name, record.ttft_s)
        # 1.2 us each; reading the piece took ten.
        for gap_s in record.gaps_s:
            self._log("inter-token", name, gap_s)

    def _log(self, kind: str, name: str, seconds: float, length: int = 0) -> None:
        self._entries[name, kind].log(seconds * 1000, length)


def _group_names(workload: Workload, by: By) -> Mapping[str, str]:
    """Return the row names of the largest groups; "" is the group of requests without one."""
    counts: dict[str, int] = {}
    for arrival in workload.arrivals:
        group = (arrival.adapter if by == "adapter" else arrival.tenant) or ""
        counts[group] = counts.get(group, 0) + 1
    largest = sorted(counts, key=lambda group: (-counts[group], group))[:MAX_GROUPS]
    nothing = "(base model)" if by == "adapter" else "(no tenant)"
    return {group: f"{by} {group}" if group else nothing for group in largest}
