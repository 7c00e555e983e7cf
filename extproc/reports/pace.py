"""How often pods are asked for their load reports, and for their models.

1. A pod is asked every `interval_s`. While its reports say what the router expects (`expected`), it
   is asked less often: from one question to the next, the time grows by `GROWTH`, up to `MAX_S`.
2. A new pod, a report that says anything else, a failure, or what the router knows since brings
   `interval_s` back, and it is kept until there was nothing of that for `CALM_AFTER_S`.
3. The cost of all questions is measured. Where it would be more than `budget` of a core, all pods
   wait longer, by the same factor, and are asked less often for their models too.
4. While the event loop is late, and the questions are no small part of its work, requests come
   first: all pods are asked less often, if the budget does not do that already. That alone makes no
   report older than `AGE_SHARE` of the time after which it expires. A report that is old as nobody
   has asked for another expires later by so much (`Pool.record_report`).
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import Final

CALM_AFTER_S: Final = 1.0
"""Twenty reports at the usual interval: surprises that follow each other leave shorter gaps."""
GROWTH: Final = 1.6
"""From the usual 50 ms to the bound in ten questions, six seconds."""
SPREAD: Final = 0.2
"""Part of a time that is left to chance: pods whose times grow alike would all be asked at once."""
MAX_S: Final = 2.0
"""Between two questions to a pod of which nothing else is said. Where nobody tells of a request's
end, it is a report that corrects the counts, and that is to be within two seconds."""
RECHECK_S: Final = 0.25
MAX_RECHECK_S: Final = 5.0
"""Between two checks whether a pod that waits is to be asked, which costs a fiftieth of a page;
at most where all wait longer. What is urgent is told (`Pool.tell_due`, a closed connection)."""
LISTED_S: Final = 1.0
"""Between two lists of models, at most, for a pod's reports to be further apart than these: so an
answer is due from each pod as often, and a pod that hangs is noticed as soon."""
AGE_SHARE: Final = 0.5
"""Of a report's expiry: one question may go unanswered for as long again."""
LATE_S: Final = 0.01
"""Delay of the event loop from which it is late: every request waits for as long in addition. No
pass of ours over pods or adapters takes more than half of that."""
LATE_SHARE: Final = 0.25
"""Part of the CPU time of this thread from which questions make the loop late. Where requests or
other processes do, fewer questions would only make all that is known old: in front of llm-d's
simulator, beside pods and clients that took all cores, reports were up to 4 s old, and the 99th
percentile of first tokens 4.5 s instead of 0.6."""
LATE_GROWTH: Final = 1.25
LATE_DECAY: Final = 0.9
"""With each look at the delay, ten a second. Two looks in time undo a late one, so the interval
grows where more than a third are late, and is the usual one a few seconds after that ended."""
PAGE_S: Final = 250e-6
LIST_S: Final = 250e-6
"""CPU time of a report and of a list of models, before any was read."""
BESIDE: Final = 1.2
"""CPU time of a question beside that of reading and recording its answer, over that of reading and
recording a page: measured, 145 us of a page and 114 of a list of 64 adapters, over 110."""
COST_SHARE: Final = 1 / 64
MAX_COST_RISE: Final = 4.0
"""Of the latest answer in the mean of what one costs; of its cost over the mean, what is beyond
counts as that: the first time that something runs takes long."""


class ScrapePace:
    """The intervals of all pods.

    Args:
        interval_s: The configured one.
        expiry_s: Age from which a report is not trusted.
        budget: CPU seconds a second that all questions may take.
        models_interval_s: From one question to a pod for its models to the next, as configured.

    Attributes:
        stretch: By what factor all pods wait longer, so that the budget is enough; 1 if it is.
    """

    def __init__(
        self,
        interval_s: float,
        expiry_s: float,
        *,
        budget: float = inf,
        models_interval_s: float = LISTED_S,
    ) -> None:
        self._now_s = self._least_s = interval_s  # as the event loop's delay has it; configured
        self._expiry_s, self._budget = expiry_s, budget
        self._models_interval_s = models_interval_s
        self._num_pods = 0
        self._wanted_per_s = 0.0  # reports, without the budget
        # Mean costs of reading and recording.
        self._page_s = PAGE_S / (1 + BESIDE)
        self._list_s = LIST_S - BESIDE * self._page_s
        self.stretch = 1.0
        self._wanted = 0.0  # CPU seconds a second of all questions, without the budget

    @property
    def interval_s(self) -> float:
        """Time from one question to a pod that has surprised to the next, now."""
        return max(self._now_s, self._least_s * self.stretch)

    @property
    def models_interval_s(self) -> float:
        """Time from one question to a pod for its models to the next, now."""
        return self._models_interval_s * self.stretch

    @property
    def max_s(self) -> float:
        """The longest time from one question to a pod to the next, without the budget."""
        is_listed = self._models_interval_s <= LISTED_S
        most_s = MAX_S if is_listed else min(MAX_S, self._expiry_s * AGE_SHARE)
        return max(self._now_s, most_s)

    def configure(self, expiry_s: float, budget: float = inf) -> None:
        """Apply another expiry and another budget."""
        self._expiry_s, self._budget = expiry_s, budget
        self._now_s = self._bounded(self._now_s)
        self._weigh()

    def delayed(self, delay_s: float, cpu_share: float) -> None:
        """Record by how much the event loop was late, and of a core what this thread took
        meanwhile, about ten times a second."""
        asked = min(self._wanted, self._budget)
        is_late = delay_s > LATE_S and asked >= LATE_SHARE * cpu_share
        change = LATE_GROWTH if is_late else LATE_DECAY
        self._now_s = self._bounded(self._now_s * change, late_s=delay_s)

    def read_page(self, cpu_s: float) -> None:
        """Record the CPU time that it took to read and record a report."""
        self._page_s = _mean(self._page_s, cpu_s)
        self._weigh()

    def read_list(self, cpu_s: float) -> None:
        """Record the CPU time that it took to read and record a list of models."""
        self._list_s = _mean(self._list_s, cpu_s)
        self._weigh()

    def _bounded(self, interval_s: float, *, late_s: float = 0.0) -> float:
        """Return `interval_s`, or less, so that a report is young enough when the next one comes,
        `late_s` after the question. Of `late_s`, half of the bound at most counts: beyond that,
        more questions bring no report sooner. The result is never less than configured.
        """
        most_s = self._expiry_s * AGE_SHARE
        return max(self._least_s, min(interval_s, most_s - min(late_s, most_s / 2)))

    def _plan(self, calm_s: float, num: int = 1) -> None:
        """Count so many pods more that are asked after `calm_s`, 0 for the interval."""
        self._num_pods += num
        self._wanted_per_s += num / (calm_s or self._least_s)
        if not self._num_pods:
            self._wanted_per_s = 0.0  # without what rounding has left
        self._weigh()

    def _weigh(self) -> None:
        lists_per_s = self._num_pods / self._models_interval_s
        beside_s = BESIDE * self._page_s
        for_pages = self._wanted_per_s * (self._page_s + beside_s)
        self._wanted = for_pages + lists_per_s * (self._list_s + beside_s)
        self.stretch = self._wanted / self._budget if self._wanted > self._budget else 1.0


def _mean(mean_s: float, cost_s: float) -> float:
    return mean_s + COST_SHARE * (min(cost_s, MAX_COST_RISE * mean_s) - mean_s)


class Rest:
    """The time from one question to one pod to the next.

    Attributes:
        calm_s: The time, as long as all is as expected, without the budget; 0 for the interval.
        asked_at_s: When the pod was asked last.
    """

    __slots__ = (
        *("_is_hurried", "_pace", "_rng", "_said_s", "_surprised_at_s", "_waited_s"),
        *("asked_at_s", "calm_s"),
    )

    def __init__(self, pace: ScrapePace, rng: Random) -> None:
        self._pace, self._rng = pace, rng
        self.calm_s = 0.0
        self.asked_at_s = self._surprised_at_s = -inf
        self._waited_s = 0.0  # from one question to the next
        self._said_s = inf  # the longest time to the next, when the last report came
        self._is_hurried = False  # since it was asked
        pace._plan(0.0)

    def close(self) -> None:
        """End it: the pod has left."""
        self._pace._plan(self.calm_s, -1)

    def asked(self, now: float) -> None:
        """Record that the pod is asked."""
        if self.asked_at_s > -inf:
            self._waited_s = now - self.asked_at_s
        else:
            self._surprised_at_s = now  # a new pod is one
        if self._is_hurried and self.calm_s:
            self._set(min(self.calm_s, max(self._pace._now_s, self._waited_s)))
        self.asked_at_s, self._is_hurried = now, False

    @property
    def longest_s(self) -> float:
        """The longest time after a report that comes now, if it is as expected.

        Beyond the budget too it grows by `GROWTH`. The time that a pod has waited counts in full:
        of many that are asked for the first time at once, each has soon been calm for long.
        """
        pace = self._pace
        most_s = max(self.calm_s, pace.interval_s, self._waited_s) * GROWTH
        return min(max(pace._now_s, self._grown_s() * pace.stretch), most_s)

    def reported(self, now: float, *, is_expected: bool) -> None:
        """Record the report that the pod was asked for, and whether it was as expected."""
        self._said_s = self.longest_s
        if not is_expected:
            self.surprised(now)
        elif now - self._surprised_at_s >= CALM_AFTER_S:
            self._set(self._grown_s() * self._rng.uniform(1 - SPREAD, 1))

    def wait_s(self, now: float, *, is_expected: bool) -> float | None:
        """Return after which time to look again whether the pod is to be asked; None for now.

        Args:
            is_expected: The facts known now are still those expected at the last report.
        """
        if self.calm_s and not is_expected:
            self.surprised(now)
        if not self.calm_s or self._is_hurried:
            return None
        pace = self._pace
        most_s = max(self.calm_s * pace.stretch, pace._now_s)
        left_s = self.asked_at_s + min(most_s, self._said_s) - now
        recheck_s = min(RECHECK_S * pace.stretch, MAX_RECHECK_S)
        return None if left_s < pace._now_s / 2 else min(left_s, recheck_s)

    def hurry(self) -> bool:
        """Record that the next report is due; return whether it would have been waited for."""
        self._is_hurried = self.calm_s > 0
        return self._is_hurried

    def surprised(self, now: float) -> None:
        """Record that the pod has failed, or that anything else was not expected."""
        self._surprised_at_s = now
        self._set(0.0)

    def _grown_s(self) -> float:
        waited_s = max(self.calm_s, self._pace._least_s, self._waited_s)
        return min(waited_s * GROWTH, self._pace.max_s)

    def _set(self, calm_s: float) -> None:
        if calm_s != self.calm_s:
            self._pace._plan(calm_s)
            self._pace._plan(self.calm_s, -1)
            self.calm_s = calm_s
