"""The size of the pods' CPU caches, learned from what requests find there.

vLLM does not report `max_cpu_loras`, but the first request for an idle adapter shows where the
adapter was. A copy from the CPU cache takes 6 to 9 ms with an 8B model, reading it from disk 70 to
140 ms (sources in `lab.engine.profiles`). Both caches evict in a known order (`residency`), so
first tokens are fast at every place of that order below the size, and slow from there on. A fast
one proves that the adapter was there; a slow one may have other reasons.

Rules:
1. Only some requests show the state of the cache: the first request for an adapter that is idle on
   an endpoint with a free slot. Its response is streamed, and its body is so short that its prompt
   takes next to no time. The prefix cache shortens longer ones, and forgets in nearly the same
   order.
2. Only a clear step counts: fast up to one place, and next to never fast from the next one on. The
   slow ones must be slower by more than a copy from the CPU cache.
3. A few odd observations do not contradict the configuration. Only if the configuration does not
   explain the observations, the size that explains them best is taken.
4. All endpoints of a group are taken to be alike, as the pods of one Deployment are.
5. An engine that states the contents of its cache is full when it evicts.

Beyond this: an adapter of more than about a gigabyte is copied so slowly that the slots themselves
may be taken for the whole cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, log
from operator import itemgetter

from msgspec import Struct

MAX_BODY_BYTES = 1024
"""Of requests that count: about 200 tokens, which take an engine one or two steps at most."""
MIN_STREAM_S = 0.005
"""From the first byte of a response's body to its last. One that came at once was not streamed, and
its first byte says when it was complete."""
MAX_OBSERVATIONS = 1024
"""The latest that count, so that pods restarted with another size are understood in time."""
OBSERVATIONS_PER_LOOK = 64
"""Observations from one look to the next, or a quarter of all that count if those are more: a look
takes up to a millisecond."""

_FAST_S = (1.7, 1.1, 0.75, 0.5, 0.33, 0.22, 0.15, 0.1, 0.07, 0.045, 0.03)
"""Limits below which a first token may count as fast. The highest that shows a step is used: where
a copy to the GPU is visible as well, reading from disk is the higher step."""
_NUM_BESIDE = 16
"""Observations next to a step, on either side, that must show it."""
_MIN_GAIN = 20.0
"""Log-likelihood that a step must add to no step at all."""
_MIN_FAST_RATIO = 0.25
"""Of first tokens below a step; fewer mean that the pods are too busy to tell."""
_MAX_ODD_RATIO = 0.05
"""Of fast first tokens above a step. There are some: places are off by one or two now and then."""
_MIN_STEP_S, _MIN_STEP_RATIO = 0.07, 2.0
"""How much slower than the typical fast first token nearly all above a step are."""
_TOLERANCE = 10.0
"""Log-likelihood that a size may lack and still explain the observations: about three fast first
tokens too high up, or six slow ones too far down."""


class Size(Struct, frozen=True):
    """The sizes that explain what was observed, `low` to `high` adapters; `likely` does best."""

    low: int
    high: float
    likely: int

    def nearest(self, presumed: int) -> int:
        """Return `presumed` if it explains what was observed, else the likely one."""
        return presumed if self.low <= presumed <= self.high else self.likely


class CacheSize:
    """Learns the size of the CPU caches."""

    def __init__(self) -> None:
        self._observed: deque[tuple[int, float]] = deque(maxlen=MAX_OBSERVATIONS)
        self._num_unseen = 0
        self._seen: Size | None = None
        self._stated: Size | None = None

    def record_first_token(self, place: int, ttft_s: float) -> bool:
        """Record what one request found; constant time, but for a look now and then.

        Args:
            place: How many adapters the endpoint had used since it used this one.
            ttft_s: Seconds from the dispatch to the first byte of the response's body.

        Returns:
            Whether something else has been learned.
        """
        self._observed.append((place, ttft_s))
        self._num_unseen += 1
        if self._num_unseen < max(OBSERVATIONS_PER_LOOK, len(self._observed) // 4):
            return False
        self._num_unseen = 0
        before, self._seen = self._seen, find_size(self._observed) or self._seen
        return self._seen != before

    def record_statement(self, before: frozenset[str], after: frozenset[str]) -> None:
        """Record what one endpoint's cache held and holds, both as it states."""
        num, size = len(after), self._stated or Size(0, inf, 0)
        if before - after and num >= len(before):
            self._stated = Size(num, num, num)
        else:
            most = max(num, size.low)
            self._stated = Size(most, max(num, size.high), most)

    def learned(self, presumed: int) -> int | None:
        """Return the size by first tokens: `presumed` if that explains them.

        None if nothing has been learned.
        """
        return None if self._seen is None else self._seen.nearest(presumed)

    def stated(self, presumed: int) -> int | None:
        """Return the same by statements. One endpoint's decide, so it is for people only."""
        return None if self._stated is None else self._stated.nearest(presumed)


def find_size(observed: Iterable[tuple[int, float]]) -> Size | None:
    """Return the sizes that explain (place, seconds to the first token); None without a clear step.

    Takes about a millisecond.
    """
    ordered = sorted(observed, key=itemgetter(0))
    places = [place for place, _ in ordered]
    seconds = [ttft_s for _, ttft_s in ordered]
    in_order = sorted(seconds)
    num_slow = {limit_s: len(seconds) - bisect_left(in_order, limit_s) for limit_s in _FAST_S}
    limits = [each for each, num in num_slow.items() if _NUM_BESIDE <= num < len(seconds)]
    if not limits:
        return None
    borders = [n for n in range(1, len(places)) if places[n] != places[n - 1]]
    inner = [n for n in borders if _NUM_BESIDE <= n <= len(places) - _NUM_BESIDE]
    for limit_s in limits if inner else ():
        is_fast = [ttft_s < limit_s for ttft_s in seconds]
        num_fast = [0, *accumulate(is_fast)]
        border = _widest(num_fast, inner)
        if _is_step(num_fast, border) and _is_high(seconds, border, limit_s):
            found = _explaining(is_fast, num_fast, border, borders)
            low, likely = (places[n - 1] + 1 for n in (found[0], border))
            return Size(low, places[found[-1]], likely)
    return None


def _widest(num_fast: Sequence[int], borders: Iterable[int]) -> int:
    """Return the border that has the most of the fast ones below it, and of the slow ones above."""
    total, size = num_fast[-1], len(num_fast) - 1
    return max(borders, key=lambda n: num_fast[n] * size - n * total)


def _gain(num_fast: Sequence[int], border: int) -> float:
    """Return the log-likelihood of a step at `border`, less that of none."""
    total, below, size = num_fast[-1], num_fast[border], len(num_fast) - 1
    above = total - below
    parts = _log_likelihood(below, border) + _log_likelihood(above, size - border)
    return parts - _log_likelihood(total, size)


def _log_likelihood(num: int, size: int) -> float:
    """Return that of `num` among `size`, at their own ratio."""
    if num in (0, size):
        return 0.0
    return num * log(num / size) + (size - num) * log(1 - num / size)


def _is_step(num_fast: Sequence[int], border: int) -> bool:
    """Return whether the step at `border` is clear: in all, and next to it."""
    total, size = num_fast[-1], len(num_fast) - 1
    ratio = num_fast[border] / border
    beside = num_fast[border] - num_fast[border - _NUM_BESIDE]
    odd = num_fast[border + _NUM_BESIDE] - num_fast[border]
    return (
        _gain(num_fast, border) >= _MIN_GAIN
        and ratio >= _MIN_FAST_RATIO
        and total - num_fast[border] <= _MAX_ODD_RATIO * (size - border)
        and beside >= ratio * _NUM_BESIDE / 2
        and odd <= 1
    )


def _is_high(seconds: Sequence[float], border: int, limit_s: float) -> bool:
    """Return whether those above the step at `border` are much slower than the fast ones below."""
    fast = sorted(ttft_s for ttft_s in seconds[:border] if ttft_s < limit_s)
    slow = sorted(seconds[border:])
    typical_s, least_s = fast[len(fast) // 2], slow[len(slow) // 10]
    return least_s >= max(typical_s + _MIN_STEP_S, typical_s * _MIN_STEP_RATIO)


def _explaining(
    is_fast: Sequence[bool], num_fast: Sequence[int], border: int, borders: Sequence[int]
) -> list[int]:
    """Return the borders, in order, that explain the observations nearly as well as `border`."""
    below = min(num_fast[border] / border, 1 - _MAX_ODD_RATIO)
    fast, slow = log(below / _MAX_ODD_RATIO), log((1 - below) / (1 - _MAX_ODD_RATIO))
    gains = [0.0, *accumulate(fast if each else slow for each in is_fast)]
    return [n for n in borders if gains[n] >= gains[border] - _TOLERANCE]
