"""Ejections of endpoints: for how long, how many at once, and how an endpoint comes back.

The module `outliers` says which endpoints are ejected.

Rules:
1. An ejection lasts `base_ejection_s` times the number of ejections so far, at most
   `max_ejection_s`. Each `base_ejection_s` of health takes one off that number.
2. That of an unreachable endpoint is brief: it may have been killed a moment ago. The next of our
   own calls that succeeds ends it.
3. Then an endpoint is on trial: at most `NUM_TRIALS` requests at a time, and as many must be served
   before it counts as healthy.
4. At most `max_ejected_ratio` of the endpoints are ejected, on trial or suspect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from math import inf

from msgspec import Struct

UNREACHABLE_S = 5.0
"""Ejection of an endpoint that could not be reached; scrapes usually show more long before."""
NUM_TRIALS = 3
"""Requests at a time, and served ones needed, before an endpoint counts as healthy again."""
MAX_CHANGES = 100
"""Ejections and readmissions kept until they are taken."""


class Cause(StrEnum):
    """Why an endpoint was ejected: a metric label."""

    UNREACHABLE = "unreachable"
    CONSECUTIVE_FAILURES = "consecutive_failures"
    FAILURE_RATE = "failure_rate"
    FAILED_TRIAL = "failed_trial"


class OutlierSettings(Struct, frozen=True):
    """Thresholds of outlier detection."""

    enabled: bool = True  # False: no ejections
    consecutive_failures: int = 5
    min_requests: int = 20  # fewer within `WINDOW_S` give no failure rate
    min_excess_ratio: float = 0.3  # of a failure rate (0 to 1) above that of others
    base_ejection_s: float = 30.0  # length of the first ejection
    max_ejection_s: float = 300.0
    max_ejected_ratio: float = 0.5  # of the endpoints, 0 to 1


class Ejection(Struct, frozen=True):
    """The ejection of an endpoint for `for_s` seconds."""

    address: str
    cause: Cause
    for_s: float


class Readmission(Struct, frozen=True):
    """The end of an ejection."""

    address: str
    is_recovered: bool = True  # passed its trial or answers us; False: over the limit of ejections


class Standing:
    """How one endpoint stands. Ejected or on trial while `cause` is set."""

    __slots__ = (
        *("cause", "count", "num_passed", "num_trials", "serial", "since_s", "suspect_s"),
        "until_s",
    )

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.since_s = self.until_s = -inf  # healthy since, or ejected since and until
        self.serial = 0  # number of the ejection: a trial belongs to one
        self.count = 0  # ejections, less those worn off by health
        self.num_trials = self.num_passed = 0
        self.suspect_s = -inf  # until then it gets nothing, as it is suspect

    def trust(self) -> None:
        """Take it for no suspect."""
        self.suspect_s = -inf

    def restart(self, now: float) -> None:
        """Begin its trial, if it is ejected: a new process has started there."""
        self.until_s = min(self.until_s, now)

    def begin_trial(self) -> int:
        """Count a request on trial; return its ejection's number."""
        self.num_trials += 1
        return self.serial

    def end_trial(self) -> None:
        """Count its end, whatever it was."""
        self.num_trials -= 1

    def passes_trial(self) -> bool:
        """Count a served trial; return whether that was the last one needed."""
        self.num_passed += 1
        return self.num_passed >= NUM_TRIALS

    def readmit(self, now: float, *, is_wrong: bool = False) -> None:
        """End its ejection; one that was wrong does not count."""
        self.count = max(0, self.count - is_wrong)
        if self.cause is not Cause.UNREACHABLE:
            self.trust()
        self.cause, self.since_s, self.until_s = None, now, -inf

    def eject(self, cause: Cause, now: float, for_s: float) -> None:
        """Begin an ejection."""
        self.cause, self.since_s, self.until_s = cause, now, now + for_s
        self.serial += 1
        self.num_trials = self.num_passed = 0
        if cause is not Cause.UNREACHABLE:
            self.trust()

    def count_next(self, now: float, base_s: float) -> int:
        """Count an ejection that begins now; return how many count. Health takes one off each
        `base_s`.
        """
        if self.cause is None and self.count:
            self.count = max(0, self.count - int((now - self.since_s) // base_s))
        self.count += 1
        return self.count

    def is_out(self, now: float) -> bool:
        """Return whether it gets nothing now: ejected, or with as many trials as it may have."""
        return self.cause is not None and (now <= self.until_s or self.num_trials >= NUM_TRIALS)


class Ejections:
    """The ejections of a pool.

    Args:
        on_change: Called with the address of each endpoint that is ejected, or is no longer.

    Attributes:
        changes: Ejections and returns that nobody has taken yet, the last `MAX_CHANGES`.
        num: Since the start, by cause.
    """

    def __init__(self, settings: OutlierSettings, on_change: Callable[[str], None]) -> None:
        self._settings, self._on_change = settings, on_change
        self._standings: Mapping[str, Standing] = {}
        self.num = dict.fromkeys(Cause, 0)
        self.changes: deque[Ejection | Readmission] = deque(maxlen=MAX_CHANGES)

    def apply(self, settings: OutlierSettings, standings: Mapping[str, Standing]) -> None:
        """Go by these thresholds and endpoints. Ejections beyond the limit end, those first that
        would end first.
        """
        self._settings, self._standings = settings, standings
        ejected = [item for item in standings.items() if item[1].cause is not None]
        ejected.sort(key=lambda item: item[1].until_s)
        for address, standing in ejected[: max(0, len(ejected) - self._limit())]:
            standing.readmit(standing.since_s)
            self._changed(Readmission(address, is_recovered=False))

    def eject(self, address: str, cause: Cause, now: float) -> None:
        """Eject an endpoint, if the limit leaves room for it."""
        standing = self._standings[address]
        num_ejected = sum(each.cause is not None for each in self._standings.values())
        if standing.cause is None and num_ejected >= self._limit():
            return
        is_brief = cause is Cause.UNREACHABLE
        for_s = UNREACHABLE_S if is_brief else self._next_s(standing, now)
        standing.eject(cause, now, for_s)
        self.num[cause] += 1
        self._changed(Ejection(address, cause, for_s))

    def readmit(self, address: str, now: float, *, is_wrong: bool = False) -> None:
        """End an ejection; one that was wrong does not count."""
        self._standings[address].readmit(now, is_wrong=is_wrong)
        self._changed(Readmission(address))

    def has_room(self, now: float) -> bool:
        """Return whether one more may be suspect."""
        standings = self._standings.values()
        num_out = sum(each.cause is not None or now <= each.suspect_s for each in standings)
        return num_out < self._limit()

    def _changed(self, change: Ejection | Readmission) -> None:
        self.changes.append(change)
        self._on_change(change.address)

    def _next_s(self, standing: Standing, now: float) -> float:
        base_s = self._settings.base_ejection_s
        return min(base_s * standing.count_next(now, base_s), self._settings.max_ejection_s)

    def _limit(self) -> int:
        """Return how many may be ejected, on trial or suspect."""
        ratio = self._settings.max_ejected_ratio if self._settings.enabled else 0.0
        return int(ratio * len(self._standings))
