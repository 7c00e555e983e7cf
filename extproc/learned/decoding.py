"""The time per token of each running request of an endpoint, learned from its load reports.

Between two reports, the engine's counter says how many tokens it generated, and its gauge how many
requests shared them. So requests x seconds / tokens is the time of one token of one request. It
includes prompts that were computed in between, and grows with the batch. The level of about the
last second counts: in the laboratory a fit over half a minute came too late for a batch that grows.

Rules:
1. An engine counts whole steps, and a scrape falls somewhere into one: intervals are put together
   until they are `WINDOW_S` long. Only those count at both ends of which something ran, as nobody
   knows when an engine that was idle began. Of longer ones, those count during which a request of
   routers ran through, as others may have left the engine idle between them.
2. The level (seconds at a number of requests) is a mean that forgets: a window `NUM_WINDOWS` ago
   counts a third of the last. Time without work teaches nothing, and makes nothing forgotten. A
   stall of the engine, for a load or a prompt, counts as two windows at most: those in which it
   begins and ends. Each counts as no more than `MAX_RISE` times the mean.
3. A counter that falls is a process that restarted; a gap without reports says nothing of what ran.
4. All that run get their tokens in the same steps. So how many one of them has got between two
   times of the last minutes is known too, without knowing the request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from math import exp, inf

from extproc.costs import Decode
from extproc.types import LoadReport

WINDOW_S = 0.3
NUM_WINDOWS = 4
"""In the laboratory a fit over half a minute came too late for a batch that grows. The mean of the
windows' ratios is somewhat higher than what requests see, as prompts come in bursts; with a ratio
of sums, which is not, half as much is served well at three times a capacity."""
MAX_INTERVAL_S = 5.0
"""Between two reports; a longer time is a gap."""
PROGRESS_S, NUM_PROGRESS = 1.0, 128
"""Spans whose tokens are remembered, and how many: tokens are known of responses up to that
length.
"""
AHEAD_S = 2.5
"""After the last report, in which tokens come as fast as before: the next one is due by then."""
MAX_ALONE = 1.5
"""Running requests, on average, of a window that shows what a token takes alone."""
MIN_TOKEN_S, MAX_TOKEN_S = 1e-5, 10.0
"""A time per token beyond these bounds cannot be true, and is left out."""
MAX_RISE = 4.0
"""Of a window's time per token over the mean; what is beyond counts as that."""
_KEPT = exp(-1 / NUM_WINDOWS)


class Decoding:
    """One endpoint's decode speed.

    Attributes:
        decode: Its speed; None before the first window.
        unseen_s: Time since the last window in which requests ran and could not be counted.
    """

    def __init__(self) -> None:
        self.decode: Decode | None = None
        self.unseen_s = 0.0
        self._last: LoadReport | None = None
        self._alone_s = inf
        self._at_s = 0.0  # of the last report
        self._progress: deque[tuple[float, float]] = deque(maxlen=NUM_PROGRESS)
        self._busy_s = self._request_s = 0.0  # of the window, as are the tokens
        self._tokens = 0
        self._num_windows = 0.0  # that are not forgotten

    def reported(self, report: LoadReport, *, has_run_through: bool = True, now: float) -> None:
        """Record a report of the same endpoint, later than the last one.

        Args:
            has_run_through: A request has run ever since that one.
        """
        before, seconds = self._last, now - self._at_s
        self._last, self._at_s = report, now
        if before is None or before.generated_tokens is None or report.generated_tokens is None:
            return
        num_tokens = report.generated_tokens - before.generated_tokens
        if num_tokens < 0 or not 0 < seconds <= MAX_INTERVAL_S:
            self._begin_window()
            self._progress.clear()
            return
        is_busy = before.num_running > 0 and report.num_running > 0
        if is_busy and seconds > WINDOW_S and not has_run_through:
            self._begin_window()
            self.unseen_s += seconds
            is_busy = False
        running = (before.num_running + report.num_running) / (2 if is_busy else 1)
        self._add_progress(num_tokens / running if running else 0.0, is_busy)
        if is_busy:
            self._busy_s += seconds
            self._request_s += seconds * running
            self._tokens += num_tokens
            if self._busy_s >= WINDOW_S and self._tokens:
                self._end_window()

    def tokens_between(self, since_s: float, until_s: float) -> float | None:
        """Return how many tokens a request that ran all this time has got; None where unknown."""
        since = self._tokens_at(since_s)
        until = None if since is None else self._tokens_at(until_s)
        return None if since is None or until is None else until - since

    def _tokens_at(self, at_s: float) -> float | None:
        progress = self._progress
        if not progress or not progress[0][0] <= at_s <= progress[-1][0] + AHEAD_S:
            return None
        index = bisect_right(progress, (at_s, inf))
        begin_s, begin = progress[index - 1]
        if index == len(progress):
            return begin if self.decode is None else begin + (at_s - begin_s) / self.decode.token_s
        end_s, end = progress[index]
        return begin + (end - begin) * (at_s - begin_s) / (end_s - begin_s)

    def _add_progress(self, num_tokens: float, is_busy: bool) -> None:
        """Add the tokens of each request since the last report: to the last span, or a new one.

        Tokens are taken to come evenly within a span, so time without work is one of its own.
        """
        progress, tokens = self._progress, num_tokens
        if progress:
            tokens += progress[-1][1]
        if len(progress) > 1:
            begin_s, begin = progress[-2]
            if self._at_s - begin_s < PROGRESS_S if is_busy else tokens == begin:
                progress.pop()
        progress.append((self._at_s, tokens))

    def _begin_window(self) -> None:
        self._busy_s, self._request_s, self._tokens = 0.0, 0.0, 0

    def _end_window(self) -> None:
        running, token_s = self._request_s / self._busy_s, self._request_s / self._tokens
        if MIN_TOKEN_S <= token_s <= MAX_TOKEN_S:
            self._learn(running, token_s)
            self.unseen_s = 0.0
        self._begin_window()

    def _learn(self, running: float, token_s: float) -> None:
        mean = self.decode or Decode(running, token_s)
        if running <= MAX_ALONE:
            self._alone_s = min(self._alone_s, token_s)
        self._num_windows = self._num_windows * _KEPT + 1
        share = 1 / self._num_windows
        beyond_s = min(token_s, MAX_RISE * mean.token_s) - mean.token_s
        self.decode = Decode(
            mean.num_running + share * (running - mean.num_running),
            mean.token_s + share * beyond_s,
            0.0 if self._alone_s == inf else self._alone_s,
        )
