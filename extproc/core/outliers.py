"""Which endpoints fail where others do not, and get no requests for a while: outlier detection.

An endpoint that fails at once has nothing pending, so every rule that looks for the emptiest sends
it more. Terms and defaults follow Envoy's outlier detection where pods allow it
(envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): `consecutive_5xx` 5,
`base_ejection_time` 30 s, `max_ejection_time` 300 s. Others are suited to few pods, each slow:
Envoy asks for five hosts and the deviation from their mean, which among three hosts cannot be large
enough; here the median of the others is what an endpoint is compared with, and half of the pool may
be ejected, not a tenth.

Rules:
1. An endpoint is ejected when it fails `consecutive_failures` times in a row, or in a share of at
   least `min_requests` requests that exceeds the others' by `min_excess_ratio`. Where the others
   fail alike, it is the requests, and nobody is ejected.
2. One that cannot be reached is ejected at once, shortly: it may have been killed a moment ago. A
   call of our own that it answers after that ends it.
3. An ejection lasts `base_ejection_s` times how often it happened, at most `max_ejection_s`. Each
   `base_ejection_s` of health takes one off the count.
4. Then it is on trial: at most `NUM_TRIALS` requests at a time, and as many must be served before
   it counts as healthy. One that fails ejects it again.
5. Ejected or on trial is never more than `max_ejected_ratio` of the endpoints.
6. What becomes of requests that were sent before an ejection, or during it because nobody else
   could take them, changes nothing any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from extproc.core.types import Pick

UNREACHABLE_S = 5.0
"""Ejection of an endpoint that could not be reached; scrapes usually tell more long before."""
WINDOW_S = 30.0
"""Failure rates are those of half to the whole of as long; as long as the base ejection."""
NUM_TRIALS = 3
"""Requests at a time, and served ones needed, before an endpoint counts as healthy again."""
MAX_NEWS = 100
"""Ejections kept until somebody asks for them."""


class Verdict(StrEnum):
    """What the end of a request says of the endpoint that it was sent to."""

    SERVED = "served"
    FAILED = "failed"  # a 5xx of its own, an answer broken off, a timeout
    UNREACHABLE = "unreachable"  # no connection, or reset before any byte of an answer
    NONE = "none"  # nothing: the client left, or was told that its request is wrong


class Cause(StrEnum):
    """Why an endpoint was ejected: a metric label."""

    UNREACHABLE = "unreachable"
    CONSECUTIVE_FAILURES = "consecutive_failures"
    FAILURE_RATE = "failure_rate"
    FAILED_TRIAL = "failed_trial"


@dataclass(frozen=True, slots=True)
class OutlierSettings:
    """What the detection is configured with.

    Attributes:
        enabled: False ejects nobody.
        consecutive_failures: So many in a row eject.
        min_requests: Fewer within `WINDOW_S` say nothing about a failure rate.
        min_excess_ratio: A failure rate (0 to 1) this far above the others' median ejects.
        base_ejection_s: The first ejection's length.
        max_ejection_s: The longest.
        max_ejected_ratio: At most this part of the endpoints, 0 to 1.
    """

    enabled: bool = True
    consecutive_failures: int = 5
    min_requests: int = 20
    min_excess_ratio: float = 0.3
    base_ejection_s: float = 30.0
    max_ejection_s: float = 300.0
    max_ejected_ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class Ejection:
    """An endpoint was ejected: for how many seconds, and why."""

    address: str
    cause: Cause
    for_s: float


class _Health:
    """What one endpoint has done. Ejected or on trial as long as `cause` is set."""

    __slots__ = (
        *("cause", "count", "heard_s", "num_failures", "num_in_row", "num_passed", "num_requests"),
        *("num_trials", "older", "serial", "since_s", "until_s", "window"),
    )

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.since_s = self.until_s = -inf  # healthy since, or ejected since and until
        self.serial = 0  # of ejections: a trial belongs to one
        self.count = 0  # of ejections, less the health since
        self.num_trials = self.num_passed = 0
        self.heard_s = -inf  # the newest call of our own that it answered was sent then
        self.forget()

    def forget(self) -> None:
        """A clean slate."""
        self.num_in_row = self.window = self.num_requests = self.num_failures = 0
        self.older = 0, 0

    def readmit(self, now: float) -> None:
        self.cause, self.since_s, self.until_s = None, now, -inf

    def eject(self, cause: Cause, now: float, for_s: float) -> None:
        if cause is not Cause.UNREACHABLE:
            self.forget()
        self.cause, self.since_s, self.until_s = cause, now, now + for_s
        self.serial += 1
        self.num_trials = self.num_passed = 0

    def is_out(self, now: float) -> bool:
        """Gets nothing now: ejected, or as many on trial as may be."""
        return self.cause is not None and (now <= self.until_s or self.num_trials >= NUM_TRIALS)

    def add(self, is_failure: bool, now: float) -> None:
        self.turn(now)
        self.num_requests += 1
        self.num_failures += is_failure
        self.num_in_row = self.num_in_row + 1 if is_failure else 0

    def rate(self, now: float, least: int) -> float | None:
        """Failures over requests of late; None where there are fewer than `least`."""
        self.turn(now)
        num_requests = self.num_requests + self.older[0]
        if num_requests < least:
            return None
        return (self.num_failures + self.older[1]) / num_requests

    def turn(self, now: float) -> None:
        """Begin another half of the window when it is time."""
        window = int(now // (WINDOW_S / 2))
        if window > self.window:
            is_next = window == self.window + 1
            self.older = (self.num_requests, self.num_failures) if is_next else (0, 0)
            self.window, self.num_requests, self.num_failures = window, 0, 0


class Outliers:
    """Judges endpoints by how requests to them end. Times are monotonic seconds."""

    def __init__(self, settings: OutlierSettings | None = None) -> None:
        self._settings = settings or OutlierSettings()
        self._health: dict[str, _Health] = {}
        self._num_ejections = dict.fromkeys(Cause, 0)
        self._news: deque[Ejection] = deque(maxlen=MAX_NEWS)

    @property
    def num_ejections(self) -> Mapping[Cause, int]:
        """Ejections since the start by cause."""
        return self._num_ejections

    def take_news(self) -> list[Ejection]:
        """The ejections since the last call, the last `MAX_NEWS` of them."""
        news = list(self._news)
        self._news.clear()
        return news

    def configure(self, settings: OutlierSettings) -> None:
        """Take new thresholds. Ejections that they leave no room for end."""
        self._settings = settings
        self._make_room()

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Judge exactly these; one that comes back starts from nothing."""
        self._health = {each: self._health.get(each) or _Health() for each in addresses}
        self._make_room()

    # --- what happens -----------------------------------------------------------------------

    def begin(self, address: str, *, now: float) -> int:
        """A request is sent there. Answer what `end` has to be told of it."""
        health = self._health[address]
        if health.cause is None or health.is_out(now):
            return 0
        health.num_trials += 1
        return health.serial

    def end(
        self,
        address: str,
        verdict: Verdict,
        *,
        now: float,
        ended_s: float | None = None,
        trial: int = 0,
    ) -> None:
        """A request there has ended.

        Args:
            address: The endpoint; one that has left is not judged.
            verdict: What the end says of it.
            now: When we heard of it. Ejections begin here, so that clocks that disagree do not
                shorten them.
            ended_s: When it ended; None for now.
            trial: What `begin` answered.
        """
        health = self._health.get(address)
        if health is None or not self._settings.enabled:
            return
        is_failure = verdict in (Verdict.FAILED, Verdict.UNREACHABLE)
        if health.cause is not None and trial == health.serial:
            health.num_trials -= 1
            if is_failure:
                self._fail_trial(address, health, now)
            elif verdict is Verdict.SERVED:
                self._pass_trial(health, now)
        elif verdict is not Verdict.NONE and health.cause in (None, Cause.UNREACHABLE):
            health.add(is_failure, now)
            is_news = health.heard_s <= (now if ended_s is None else ended_s)
            is_gone = verdict is Verdict.UNREACHABLE and is_news
            cause = self._cause(health, now, is_gone=is_gone) if is_failure else None
            if cause is not None and cause is not health.cause:
                self._eject(address, health, cause, now)

    def heard(self, address: str, *, asked_at_s: float) -> None:
        """A call of our own that began at `asked_at_s` was answered."""
        health = self._health[address]
        health.heard_s = max(health.heard_s, asked_at_s)
        if health.cause is Cause.UNREACHABLE and asked_at_s > health.since_s:
            health.readmit(asked_at_s)

    def came_back(self, address: str, *, now: float) -> None:
        """A process has started there anew: what the last one did is over, try it."""
        health = self._health[address]
        health.until_s = min(health.until_s, now)

    # --- what may be read -------------------------------------------------------------------

    def is_ejected(self, address: str, *, now: float) -> bool:
        """Whether it shall get nothing now where others can take it."""
        return self._health[address].is_out(now)

    def until_s(self, address: str) -> float:
        """When its ejection ends or has ended; minus infinity without one."""
        return self._health[address].until_s

    # --- inside -----------------------------------------------------------------------------

    def _cause(self, health: _Health, now: float, *, is_gone: bool) -> Cause | None:
        settings = self._settings
        if health.num_in_row >= settings.consecutive_failures:
            others = self._rate_of_others(health, settings.consecutive_failures, now)
            if 1.0 - (others or 0.0) >= settings.min_excess_ratio:
                return Cause.CONSECUTIVE_FAILURES
        rate = health.rate(now, settings.min_requests)
        others = None if rate is None else self._rate_of_others(health, settings.min_requests, now)
        if rate is not None and others is not None and rate - others >= settings.min_excess_ratio:
            return Cause.FAILURE_RATE
        return Cause.UNREACHABLE if is_gone else None

    def _rate_of_others(self, health: _Health, least: int, now: float) -> float | None:
        """The median of the healthy others' failure rates; None where they had too few requests."""
        rates = sorted(
            rate
            for each in self._health.values()
            if each is not health and each.cause is None
            for rate in (each.rate(now, least),)
            if rate is not None
        )
        if not rates:
            return None
        return (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2

    def _pass_trial(self, health: _Health, now: float) -> None:
        health.num_passed += 1
        if health.num_passed >= NUM_TRIALS:
            health.num_in_row = 0
            health.readmit(now)

    def _fail_trial(self, address: str, health: _Health, now: float) -> None:
        settings = self._settings
        others = self._rate_of_others(health, settings.consecutive_failures, now)
        if 1.0 - (others or 0.0) >= settings.min_excess_ratio:
            self._eject(address, health, Cause.FAILED_TRIAL, now)

    def _eject(self, address: str, health: _Health, cause: Cause, now: float) -> None:
        if health.cause is None and len(self._ejected()) >= self._max_ejected():
            return
        for_s = UNREACHABLE_S
        if cause is not Cause.UNREACHABLE:
            for_s = self._next_ejection_s(health, now)
        health.eject(cause, now, for_s)
        self._num_ejections[cause] += 1
        self._news.append(Ejection(address, cause, for_s))

    def _next_ejection_s(self, health: _Health, now: float) -> float:
        base_s = self._settings.base_ejection_s
        if health.cause is None and health.count:
            health.count = max(0, health.count - int((now - health.since_s) // base_s))
        health.count += 1
        return min(base_s * health.count, self._settings.max_ejection_s)

    def _max_ejected(self) -> int:
        return int(self._settings.max_ejected_ratio * len(self._health))

    def _ejected(self) -> list[_Health]:
        return [each for each in self._health.values() if each.cause is not None]

    def _make_room(self) -> None:
        """End the ejections that are too many, those first that would end first."""
        room = self._max_ejected() if self._settings.enabled else 0
        ejected = sorted(self._ejected(), key=lambda each: each.until_s)
        for health in ejected[: max(0, len(ejected) - room)]:
            health.readmit(health.since_s)


def verdicts(
    pick: Pick, verdict: Verdict, *, address: str = "", num_attempts: int = 1
) -> dict[str, Verdict]:
    """What the attempts that a pick took say of their endpoints, by address.

    The data plane names the last address alone. It takes a pick's endpoints and alternates in
    order, and what it tries again has not reached the endpoint (our Envoy configurations retry
    nothing else); where it dials an address twice, only the last attempt counts.

    Args:
        pick: The pick.
        verdict: What the last attempt says.
        address: Where that went; "" for the pick's own.
        num_attempts: How many there were.
    """
    tried = (*pick.endpoints, *pick.alternates)[: max(1, num_attempts)]
    said = dict.fromkeys(tried[: max(0, num_attempts - 1)], Verdict.UNREACHABLE)
    return {**said, address or tried[-1]: verdict}
