"""The chance that an endpoint fails as it does, if it is like the others."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log


@dataclass(slots=True)
class Count:
    """Requests that ended, and those of them that failed.

    Written often: CPython takes ten times as long to set a field of a Struct.
    """

    num: int = 0
    num_failed: int = 0


def less(count: Count, other: Count) -> Count:
    """Return the difference; a count that has begun anew since is what it is."""
    if count.num < other.num:
        return Count(count.num, count.num_failed)
    return Count(count.num - other.num, max(0, count.num_failed - other.num_failed))


def row_log_chance(num: int, num_elsewhere: float, num_failed: float) -> float:
    """Return the logarithm of the chance that `num` requests in a row fail.

    The probability of each is estimated from the ends of requests to other endpoints alone
    (Laplace's rule of succession).
    """
    failed, total = num_failed + 1, num_elsewhere + 2
    return lgamma(failed + num) - lgamma(failed) - lgamma(total + num) + lgamma(total)


class Strata:
    """Sums over the kinds that both one endpoint and other endpoints had, for its failure rate."""

    __slots__ = ("_num_all_failed", "_num_expected", "_num_share", "num", "num_failed")

    def __init__(self) -> None:
        self.num = self.num_failed = self._num_all_failed = 0
        self._num_expected = self._num_share = 0.0

    def add(self, own: Count, elsewhere: Count) -> None:
        """Add one kind; where other endpoints had none, no failure of its own can be compared."""
        self.num += own.num
        if not elsewhere.num:
            return
        failed = own.num_failed + elsewhere.num_failed
        self.num_failed += own.num_failed
        self._num_all_failed += failed
        self._num_expected += own.num * elsewhere.num_failed / elsewhere.num
        self._num_share += failed * own.num / (own.num + elsewhere.num)

    def excess_ratio(self) -> float:
        """Return how far its failure rate is above that of other endpoints with the same kinds."""
        return (self.num_failed - self._num_expected) / self.num if self.num else 0.0

    def chance(self) -> float:
        """Return a bound on the chance that so many of all failures are its own (Chernoff's bound).
        There are some failures; each is its own with the probability of its share of the requests.
        """
        ratio, share = (
            self.num_failed / self._num_all_failed,
            self._num_share / self._num_all_failed,
        )
        if ratio <= share:
            return 1.0
        rest = (1 - ratio) * log((1 - ratio) / (1 - share)) if ratio < 1 else 0.0
        return exp(-self._num_all_failed * (ratio * log(ratio / share) + rest))
