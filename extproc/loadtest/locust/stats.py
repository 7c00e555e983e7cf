"""Rows of locust's own table, from records.

Whole requests go through locust's `request` event, so that its plugins see them. The other rows are
logged in the table alone: they are not requests, and the row `Aggregated` must not count them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from extproc.workload.exchange import RequestRecord

if TYPE_CHECKING:
    from locust.env import Environment


class RequestError(Exception):
    """A failed request; the text is the kind of error."""

    def __repr__(self) -> str:
        return str(self)


class Rows:
    """Logs records to the table of `environment`, in rows named `path`."""

    def __init__(self, environment: Environment, path: str) -> None:
        self._entries: Mapping[tuple[str, str], Any] = environment.stats.entries
        self._fire: Callable[..., None] = environment.events.request.fire
        self._path = path

    def log(self, record: RequestRecord) -> None:
        """Log one request: as a whole, its delay, its first token and each gap after it."""
        self._fire(
            request_type="POST",
            name=self._path,
            response_time=(record.ended_s - record.sent_s) * 1000,
            response_length=record.num_tokens,
            exception=RequestError(record.error) if record.error else None,
            context={},
        )
        self._log("schedule delay", record.delay_s)
        if record.ttft_s is not None:
            self._log("TTFT", record.ttft_s)
        # 1.2 us each; reading the piece took ten.
        for gap_s in record.gaps_s:
            self._log("inter-token", gap_s)

    def _log(self, kind: str, seconds: float) -> None:
        self._entries[self._path, kind].log(seconds * 1000, 0)
