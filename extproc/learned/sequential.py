"""Whether one of two arms is worse than the other, said as soon as it is sure.

Requests get their arm at random. So where the arms are alike, a request's arm does not depend on
how the request fared, nor on anything before it. This holds however load drifts and failures
cluster. Each bettor bets on the first arm, and more the worse the request fared, at odds that are
fair where the arms are alike. Their wealth together is then a martingale that begins at 1. By
Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha. So one may look
after each request, and for ever. Three measures are judged, each with a third of alpha
(Bonferroni).

Sources: Shafer, Testing by betting (2021); Waudby-Smith and Ramdas, Estimating means of bounded
random variables by betting (2023); Ramdas and others, Game-theoretic statistics and safe anytime-
valid inference (2023). Here the bets are likelihood ratios of the arm: of failures that are more
frequent by a factor, and of first tokens whose normal scores are shifted (van der Waerden).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from math import exp
from statistics import NormalDist
from typing import NamedTuple

FAILURES, LATENESS, FIRST_TOKENS = MEASURES = "failures", "lateness", "first_tokens"
ALPHA = 0.05
"""Probability that arms that are alike are ever told apart."""
FACTORS = 1.5, 3.0, 10.0, 50.0
"""How much more frequent failures of the arm are, as the bettors have it. An arm that fails less
than 1.2 times as often as the other makes all of them lose."""
SHIFTS = 0.125, 0.25, 0.5, 1.0
"""How much slower its first tokens are, in standard deviations of their logarithm. One that is
slower by less than 0.06 of them makes all bettors lose."""
NUM_COMPARED, MIN_COMPARED = 200, 20
"""First tokens of the other arm that one is compared with: at most, and at least."""
NUM_FIRST = 1000
"""Half of all wealth is bet at first; so many bets later half of the rest has been, and so on: what
becomes worse late is found late, but is found."""

_NORMAL = NormalDist()


class Verdict(NamedTuple):
    """How an arm is worse than the other.

    Attributes:
        measure: One of `MEASURES`.
        chance: At most so probable is it that arms that are alike would ever look like this.
    """

    measure: str
    chance: float


class Judge:
    """Judges the first of two arms by how requests of both have ended.

    Args:
        share: Probability that a request is of the arm, between 0 and 1. Another one needs another
            judge.
        alpha: Probability that arms that are alike are ever told apart.

    Attributes:
        verdict: None until the arm is worse; then it stays as it is.
    """

    def __init__(self, share: float, alpha: float = ALPHA) -> None:
        self._share, self._alpha = share, alpha
        self._failures, self._lateness = _Bets(len(FACTORS)), _Bets(len(FACTORS))
        self._first_tokens, self._control = _Bets(len(SHIFTS)), _Latest()
        self.verdict: Verdict | None = None

    def ended(
        self, *, is_arm: bool, failed: bool = False, late: bool = False, ttft_s: float | None = None
    ) -> None:
        """Count a request that has ended.

        Args:
            is_arm: Of the arm that is judged; not of the other.
            failed: It got no answer, or not the whole of one.
            late: It missed its objective.
            ttft_s: Time to its first token; None if it has none, or an unknown one.
        """
        if failed:
            self._bet(FAILURES, self._failures, is_arm, FACTORS)
        if late:
            self._bet(LATENESS, self._lateness, is_arm, FACTORS)
        if ttft_s is not None:
            score = self._control.score(ttft_s)
            if score is not None:
                odds = [exp(each * score - each * each / 2) for each in SHIFTS]
                self._bet(FIRST_TOKENS, self._first_tokens, is_arm, odds)
            if not is_arm:
                self._control.add(ttft_s)

    def _bet(self, measure: str, bets: _Bets, is_arm: bool, odds: Iterable[float]) -> None:
        if self.verdict is not None:
            return
        rest = 1 - self._share
        wealth = bets.bet([(o if is_arm else 1) / (self._share * o + rest) for o in odds])
        if wealth * self._alpha >= len(MEASURES):
            self.verdict = Verdict(measure, len(MEASURES) / wealth)


class _Bets:
    """The wealth of some bettors, and what is kept for bets that begin later.

    So they are a mixture of bettors who begin at any time, which is one bettor.
    """

    def __init__(self, num: int) -> None:
        self._wealths = [0.5 / num] * num
        self._kept, self._num = 0.5, NUM_FIRST

    def bet(self, factors: Iterable[float]) -> float:
        """Multiply what each bettor has, whose mean is 1 where the arms are alike; return all."""
        self._num += 1
        given = self._kept / self._num
        self._kept -= given
        more = given / len(self._wealths)
        self._wealths = [(w + more) * f for w, f in zip(self._wealths, factors, strict=True)]
        return self._kept + sum(self._wealths)


class _Latest:
    """The other arm's latest first tokens."""

    def __init__(self) -> None:
        self._latest, self._sorted = deque[float](), list[float]()

    def score(self, ttft_s: float) -> float | None:
        """Return the normal score of one among them, ties being half above; None for too few."""
        num = len(self._sorted)
        if num < MIN_COMPARED:
            return None
        rank = (bisect_left(self._sorted, ttft_s) + bisect_right(self._sorted, ttft_s)) / 2
        return _NORMAL.inv_cdf((rank + 0.5) / (num + 1))

    def add(self, ttft_s: float) -> None:
        self._latest.append(ttft_s)
        insort(self._sorted, ttft_s)
        if len(self._latest) > NUM_COMPARED:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
