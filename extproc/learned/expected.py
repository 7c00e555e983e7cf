"""Whether one pod's load reports say what the router expects there.

It expects the requests of routers, its own and those that others have told of, and that the engine
works on them. Of a request's end it may hear late: as many requests fewer are no surprise as begin
and end within that time (`HEARD_S`). One more is, even if it has just ended: it counts until the
next report.

These are surprises:

1. Requests or adapters that no router has told of, or fewer requests than are known. So are more
   first tokens since the last report than requests that are known of since: others have come and
   gone meanwhile.
2. Requests that wait in the engine, or did within `WAITED_S`, or that it refuses; more requests
   than it is known to run at a time. That is the configured or learned limit, or else the most
   that its reports have shown to run while none waited. So is a nearly full KV cache
   (`FULL_RATIO`), or more requests than would fill it so far if they took as much as those there.
3. Requests that run while no counter moves, get their tokens much later than before, or have not
   shown for some time (`UNSEEN_S`) when they do.
4. A report that cannot be read, or shows a process that has started anew; a list of models that is
   new or not believed; any trouble.
5. Requests are held in the router's queue: what a policy has them wait for may be a report.
"""

from __future__ import annotations

from collections.abc import Container
from math import ceil, exp, inf
from typing import Final

from extproc.types import LoadReport

HEARD_S: Final = 1.5
"""From the end of a request to its entry of the access log, at most: Envoy keeps one for a second
by default, and another router passes it on."""
FULL_RATIO: Final = 0.8
"""Of the KV cache: from here on, requests may soon wait for blocks."""
WAITED_S: Final = 30.0
"""Since requests waited in the engine: for as long, what it can run is taken to change."""
STILL_S: Final = 1.0
"""Without a step, where requests run: an engine computes 8,192 tokens of prompts in less."""
UNSEEN_S: Final = 10.0
"""A pod that has become slow, or fast again, is to be known as such for its next requests."""
MAX_RISE: Final = 1.2
"""Of the mean time per output token, at one report: it counts the latest with a quarter."""
_RATE_S: Final = 1.0
_FEW: Final = 0.1
"""Requests that are none: of a rate that has nearly faded away."""


class Expected:
    """Expectations of one pod's reports.

    Attributes:
        is_met: Its last report said so.
        most: Requests known to be there that are no surprise until the next one.
    """

    def __init__(self) -> None:
        self.is_met = self._is_awaited = False  # the next one was said to be due
        self.most: float = 0
        self._at_s: float | None = None  # of the last report
        self._most = 0  # requests that have run while none waited
        self._num_picks = self._num_known = 0  # then: all that were ever counted, and in flight
        self._num_first_tokens: int | None = None  # then
        self._waited_at_s = -inf  # when a report showed that requests waited
        self._per_s = 0.0  # beginnings and ends
        self._token_s = 0.0

    def surprise(self) -> None:
        """Record that something else has happened there."""
        self.is_met = False

    def reported(
        self,
        report: LoadReport,
        *,
        is_new: bool,
        num_known: int,
        num_picks: int,
        adapters: Container[str],
        token_s: float,
        is_doubtful: bool,
        stood_s: float,
        unseen_s: float,
        limit: int | None,
        now: float,
    ) -> None:
        """Judge a report that has been recorded.

        Args:
            is_new: Its process or adapters are.
            num_known: Requests there, of this router and as told by others.
            num_picks: That were ever counted there.
            adapters: Of the requests.
            token_s: Mean time per output token; 0 for not known.
            is_doubtful: By its reports, it has requests of nobody known for some time, or the
                reports are old.
            stood_s: Time for which nothing has moved that moves with work.
            unseen_s: Time in which requests ran and did not show what a token takes, as reports
                were further apart than requests are long.
            limit: Requests that it runs at a time, configured or learned; None for neither.
        """
        has_strangers = self._count(num_known, num_picks, report.num_first_tokens, now)
        self._is_awaited = False
        if is_new:
            self._most = 0
        token_before_s, self._token_s = self._token_s, token_s
        if is_new or not report.has_counts or report.is_asleep:
            self.is_met = False
            return
        num_running, num_waiting = report.num_running, report.num_waiting
        if num_waiting:
            self._most, self._waited_at_s = min(self._most, num_running), now
        else:
            self._most = max(self._most, num_running)
        num_there = num_running + num_waiting
        self.most = self._most if limit is None else limit
        if report.kv_usage_ratio:
            self.most = min(self.most, num_there * FULL_RATIO / report.kv_usage_ratio)
        self.most += max(0, num_known - num_there)  # ended, or about to begin
        self.is_met = (
            # As many may have ended without our knowledge.
            num_known - ceil(self._per_s * HEARD_S - _FEW) <= num_there <= num_known
            and not (has_strangers or is_doubtful)
            and now - self._waited_at_s >= WAITED_S
            and not (num_there and any(a not in adapters for a in report.active_adapters))
            and (report.kv_usage_ratio or 0.0) < FULL_RATIO
            and not (num_there and stood_s > STILL_S)
            and unseen_s <= UNSEEN_S
            and not (token_before_s and token_s > MAX_RISE * token_before_s)
        )

    def becomes_due(self) -> bool:
        """Say that the next report is due; return whether nobody has since the last."""
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def _count(
        self, num_known: int, num_picks: int, num_first_tokens: int | None, now: float
    ) -> bool:
        """Count what began and ended since the last report; return whether more had a first token
        than could have."""
        begun = num_picks - self._num_picks
        ended = self._num_known + begun - num_known
        if self._at_s is not None and now > self._at_s:
            seconds = now - self._at_s
            kept = exp(-seconds / _RATE_S)
            self._per_s = kept * self._per_s + (1 - kept) * (begun + abs(ended)) / seconds
        most, before = self._num_known + begun, self._num_first_tokens
        self._at_s, self._num_picks, self._num_known = now, num_picks, num_known
        self._num_first_tokens = num_first_tokens
        if before is None or num_first_tokens is None:
            return False
        return num_first_tokens - before > most
