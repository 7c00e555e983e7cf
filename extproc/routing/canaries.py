"""Canaries: targets of a rule that are compared with another one, and taken back if they do worse.

1. The standard is the target with the largest share, the first of several. Each other target is a
   canary. So what is taken back has never more than half of the requests, and the standard gets
   them.
2. Targets are drawn. So as long as a canary is as good as the standard, it has its share of all
   that goes wrong. A canary that has so much more of it that this is hardly chance is taken back.
3. A request goes wrong if it is refused or fails, whoever's fault that is, or is late. So does one
   whose answer has next to nothing in it: less than half of what 19 of 20 of the standard's have.
4. A canary that is taken back gets nothing until its rule is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from extproc.learned.comparison import HOLLOW_BYTES, MAX_SHORT_RATIO, MIN_ANSWERS
from extproc.learned.sequential import Judge
from extproc.phrases import FOR_ADAPTER
from extproc.pods.completion import Ended
from extproc.types import Outcome

ERROR_RATE = 0.05
"""Chance that any canary of a rule is ever taken back that is as good as the standard."""
_MIN_ERROR = 400
NUM_ANSWERS = 200
"""Of the standard, whose lengths are kept."""


_WORSE = {"failures": "fails, or answers with next to nothing,", "lateness": "is late"}


class Canaries:
    """The canaries of one rule.

    Args:
        shares: Of the rule's targets, at least two.
        numbers: By which the targets' ends are recorded.

    Attributes:
        taken_back: Why, by target.
    """

    def __init__(
        self, shares: Mapping[str, float], numbers: Mapping[str, int], error_rate: float
    ) -> None:
        self.numbers = numbers
        self.taken_back: dict[str, str] = {}
        self._standard = max(shares, key=shares.__getitem__)
        most, num = shares[self._standard], len(shares) - 1
        self._judges = {
            target: Judge(share / (share + most), error_rate / num)
            for target, share in shares.items()
            if target != self._standard
        }
        self._lengths = deque[int](maxlen=NUM_ANSWERS)

    def ended(self, target: str, ended: Ended, is_attained: bool | None) -> bool:
        """Record how a request for a target ended that got a pod; return whether that takes a
        canary back.

        A request that waited for its adapter is not late by that: a canary is asked for less often,
        and so loaded less often.

        Args:
            target: As it was drawn.
            is_attained: Whether its objective was met; None for no such.
        """
        completion, outcome, num_bytes = ended.completion, ended.outcome, None
        failed = outcome is Outcome.FAILED
        if completion is not None and outcome is Outcome.COMPLETED:
            failed, num_bytes = completion.status >= _MIN_ERROR, completion.body_bytes
        is_late = is_attained is False and not failed and ended.pick.held_for != FOR_ADAPTER
        if num_bytes is not None and not failed:
            failed = self._is_hollow(num_bytes)
            if target == self._standard:
                self._lengths.append(num_bytes)
        return self.judge(target, failed=failed, late=is_late)

    def judge(self, target: str, *, failed: bool, late: bool = False) -> bool:
        """Record the same of a request that failed, got no pod, missed its objective or did not."""
        is_standard, num_before = target == self._standard, len(self.taken_back)
        for name in self._judges if is_standard else (target,):
            judge = self._judges[name]
            judge.ended(is_arm=not is_standard, failed=failed, late=late)
            if judge.verdict is not None and name not in self.taken_back:
                measure, chance = judge.verdict
                self.taken_back[name] = (
                    f"it {_WORSE[measure]} more often than {self._standard}, "
                    f"by chance at most once in {1 / chance:.0f} times"
                )
        return len(self.taken_back) > num_before

    def _is_hollow(self, num_bytes: int) -> bool:
        """Return whether an answer is less than half as long as nearly all of the standard's."""
        if num_bytes >= HOLLOW_BYTES or len(self._lengths) < MIN_ANSWERS:
            return False
        num_short = sum(each <= 2 * num_bytes for each in self._lengths)
        return num_short <= MAX_SHORT_RATIO * len(self._lengths)
