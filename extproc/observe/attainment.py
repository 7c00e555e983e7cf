"""Attainment: which requests got a response in time, per path and over a sliding window.

A request attains the objective if its response was complete, with a status other than 429 and 5xx,
and its first byte came within `ttft_s`. A request that the client cancelled is judged by the
response so far; if there was none and `ttft_s` had not passed, it is not counted. A client error
(4xx but 429) counts as a response if an endpoint sent it; if the router sent it, it is not counted,
as it shows nothing about the service.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from extproc.bounds import plain
from extproc.pods.completion import Completion
from extproc.types import Outcome, Rejection

WINDOW_S = 60.0
OTHER = "other"
"""The label of all values beyond the most that have their own."""
MAX_LABEL_CHARS = 256
"""Longest label value chosen by a client: a model's name (`openai.MAX_MODEL_BYTES`)."""
_BUCKET_S = 1.0
_TOO_MANY_REQUESTS = 429
_CANCELLED, _COMPLETED = Outcome.CANCELLED, Outcome.COMPLETED  # to look up a member takes 0.1 us


class CappedLabel:
    """The first `max_values` values of a label; all further ones become OTHER."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: set[str] = set()

    def cap(self, value: str) -> str:
        """Return the value, or OTHER; a new one is recorded while there is room."""
        if value in self._values:
            return value
        value = plain(value, MAX_LABEL_CHARS)
        if value not in self._values:
            if len(self._values) >= self._max_values:
                return OTHER
            self._values.add(value)
        return value


class Attainment:
    """Counts requests, and those whose first byte came within `ttft_s` of their arrival.

    `recent` covers `window_s`; paths beyond `max_paths` share `OTHER`.

    Attributes:
        counts: Since the start, by path and by whether they attained it: `true` or `false`.
    """

    def __init__(self, ttft_s: float, *, window_s: float = WINDOW_S, max_paths: int = 50) -> None:
        self.ttft_s = ttft_s
        self.window_s = window_s
        self.counts: Counter[tuple[str, str]] = Counter()
        self._paths = CappedLabel(max_paths)
        # Each behind its beginning.
        self._buckets: deque[tuple[float, Counter[tuple[str, bool]]]] = deque()

    def configure(self, ttft_s: float) -> None:
        """Judge by another time from now on."""
        self.ttft_s = ttft_s

    def completed(self, path: str, completion: Completion, now: float) -> tuple[str, bool] | None:
        """Count a request that was routed.

        Returns:
            The label that it counts under and whether it attained; None if it is not counted.
        """
        is_attained = is_in_time(self.ttft_s, completion)
        return None if is_attained is None else self._count(path, is_attained, now)

    def rejected(self, path: str, rejection: Rejection, *, now: float) -> tuple[str, bool] | None:
        """Count a request that was rejected; return as `completed` does."""
        is_missed = rejection.status == _TOO_MANY_REQUESTS or rejection.status >= 500
        return self._count(path, False, now) if is_missed else None

    def recent(self, *, now: float) -> Mapping[str, tuple[int, int]]:
        """Return how many requests of the last `window_s` attained it, and of how many, by path."""
        self._forget(now)
        total = Counter[tuple[str, bool]]()
        for _, counts in self._buckets:
            total.update(counts)
        paths = sorted({path for path, _ in total})
        return {path: (total[path, True], total[path, True] + total[path, False]) for path in paths}

    def _count(self, path: str, is_attained: bool, now: float) -> tuple[str, bool]:
        path = self._paths.cap(path)
        if not self._buckets or now >= self._buckets[-1][0] + _BUCKET_S:
            self._forget(now)
            self._buckets.append((now, Counter()))
        self._buckets[-1][1][path, is_attained] += 1
        self.counts[path, "true" if is_attained else "false"] += 1
        return path, is_attained

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - self.window_s:
            self._buckets.popleft()


def is_in_time(ttft_s: float, completion: Completion) -> bool | None:
    """Return whether a request that was routed attained an objective; None if it does not count."""
    outcome, status, first_byte_s = (
        completion.outcome,
        completion.status,
        completion.first_body_byte_s,
    )
    if outcome is _CANCELLED:
        waited_s = completion.duration_s if first_byte_s is None else first_byte_s
        if waited_s is not None and waited_s > ttft_s:
            return False
        return None if first_byte_s is None else True
    is_answered = outcome is _COMPLETED and status != _TOO_MANY_REQUESTS and status < 500
    return is_answered and first_byte_s is not None and first_byte_s <= ttft_s
