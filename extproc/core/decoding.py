"""What a token costs each running request of an endpoint, learned from its load reports.

Between two reports, the engine's counter says how many tokens it generated, and its gauge how many
requests shared them: requests x seconds / tokens is the time of one token of one request, prompts
that were computed in between included. It grows with the batch, so it is kept as a line over the
running requests.

Rules:
1. An engine counts whole steps, and a scrape falls somewhere into one: intervals are put together
   until they are `WINDOW_S` long. Only those count at both ends of which something ran, as nobody
   knows when an engine that was idle began.
2. The level (seconds at a number of requests) is a mean that forgets: a window `NUM_WINDOWS` ago
   counts a third of the last. Time without work teaches nothing, and makes nothing forgotten. An
   engine that stalls, for a load or a prompt, counts once, and not much more than before.
3. The slope counts only while the number of requests has varied enough to see it beyond the noise.
   The last one that was sure is kept: it is the hardware's, and an endpoint that is held at one
   number of requests would forget why.
4. A counter that falls is a process that restarted; a gap without reports says nothing of what ran.
5. All that run get their tokens in the same steps. So how many one of them has got between two
   times of the last minutes is known too, without knowing the request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from math import exp, inf, sqrt

from extproc.core.costs import Decode
from extproc.core.types import LoadReport

WINDOW_S = 1.0
NUM_WINDOWS = 30
MAX_INTERVAL_S = 5.0
"""Between two reports; a longer time is a gap."""
NUM_PROGRESS = 128
"""Windows whose tokens are remembered: the longest response whose tokens can be told."""
MIN_TOKEN_S, MAX_TOKEN_S = 1e-5, 10.0
"""A time per token beyond these bounds cannot be true, and is left out."""
MAX_RISE = 4.0
"""Of a window's time per token over the mean; what is beyond counts as that."""
MIN_WINDOWS = 8
"""Windows before there is a slope."""
MIN_SPREAD_RATIO = 0.1
"""Standard deviation of the running requests over their mean, below which there is no slope."""
MIN_SURENESS = 2.0
"""A slope over its standard error, below which it is not sure."""
_KEPT = exp(-1 / NUM_WINDOWS)


class Decoding:
    """One endpoint's decode speed.

    Attributes:
        learned: Result; None before the first window.
    """

    __slots__ = (
        *("_at_s", "_busy_s", "_covariance", "_last", "_num_windows", "_progress", "_request_s"),
        *("_running", "_slope", "_token_s", "_tokens", "_variance", "_variance_s", "learned"),
    )

    def __init__(self) -> None:
        self.learned: Decode | None = None
        self._last: LoadReport | None = None
        self._at_s = 0.0  # of the last report
        self._progress: deque[tuple[float, float]] = deque(maxlen=NUM_PROGRESS)
        self._slope: float | None = None
        self._busy_s = self._request_s = 0.0  # of the window, as are the tokens
        self._tokens = 0
        self._num_windows = 0.0
        self._running = self._token_s = 0.0  # means
        self._variance = self._covariance = self._variance_s = 0.0

    def record(self, report: LoadReport, *, taken_at_s: float) -> None:
        """Record a report of the same endpoint, later than the last one."""
        before, seconds = self._last, taken_at_s - self._at_s
        self._last, self._at_s = report, taken_at_s
        if before is None or before.generated_tokens is None or report.generated_tokens is None:
            return
        num_tokens = report.generated_tokens - before.generated_tokens
        if num_tokens < 0 or not 0 < seconds <= MAX_INTERVAL_S:
            self._begin_window()
            self._progress.clear()
            return
        is_busy = before.num_running > 0 and report.num_running > 0
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
        since, until = self._tokens_at(since_s), self._tokens_at(until_s)
        return None if since is None or until is None else until - since

    def _tokens_at(self, at_s: float) -> float | None:
        progress = self._progress
        if not progress or not progress[0][0] <= at_s <= progress[-1][0] + WINDOW_S:
            return None
        index = bisect_right(progress, (at_s, inf))
        begin_s, begin = progress[index - 1]
        if index == len(progress):
            return begin
        end_s, end = progress[index]
        return begin + (end - begin) * (at_s - begin_s) / (end_s - begin_s)

    def _add_progress(self, num_tokens: float, is_busy: bool) -> None:
        """Add the tokens of each request since the last report: to the last window, or a new one.

        Tokens are taken to come evenly within a window, so time without work is one of its own.
        """
        progress, tokens = self._progress, num_tokens
        if progress:
            tokens += progress[-1][1]
        if len(progress) > 1:
            begin_s, begin = progress[-2]
            if self._at_s - begin_s < WINDOW_S if is_busy else tokens == begin:
                progress.pop()
        progress.append((self._at_s, tokens))

    def _begin_window(self) -> None:
        self._busy_s, self._request_s, self._tokens = 0.0, 0.0, 0

    def _end_window(self) -> None:
        running, token_s = self._request_s / self._busy_s, self._request_s / self._tokens
        if MIN_TOKEN_S <= token_s <= MAX_TOKEN_S:
            most_s = MAX_RISE * self._token_s if self._num_windows else MAX_TOKEN_S
            self._learn(running, min(token_s, most_s))
        self._begin_window()

    def _learn(self, running: float, token_s: float) -> None:
        """Add a window to the means and their variances, which forget at the same pace."""
        self._num_windows = self._num_windows * _KEPT + 1
        share = 1 / self._num_windows
        beyond, beyond_s = running - self._running, token_s - self._token_s
        self._running += share * beyond
        self._token_s += share * beyond_s
        kept = 1 - share
        self._variance = kept * (self._variance + share * beyond * beyond)
        self._covariance = kept * (self._covariance + share * beyond * beyond_s)
        self._variance_s = kept * (self._variance_s + share * beyond_s * beyond_s)
        self._slope = self._sure_slope() or self._slope
        # A step takes time however few run: a line through the origin is the steepest there is.
        steepest = self._token_s / self._running
        slope = None if self._slope is None else min(self._slope, steepest)
        self.learned = Decode(self._running, self._token_s, slope)

    def _sure_slope(self) -> float | None:
        """Return the slope of the windows that are remembered; None if that is not sure."""
        if sqrt(self._variance) < MIN_SPREAD_RATIO * self._running:
            return None
        slope = self._covariance / self._variance
        rest = max(0.0, self._variance_s - slope * self._covariance)
        error = sqrt(rest / (self._variance * self._num_windows))
        is_sure = self._num_windows >= MIN_WINDOWS and slope > MIN_SURENESS * error
        return slope if is_sure else None
