"""Outlier detection: endpoints that fail requests which other endpoints serve get none for a while.

An endpoint that fails at once has nothing pending, so every policy that looks for the emptiest
sends it more. Terms and defaults follow Envoy's outlier detection where pods allow it
(envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): `consecutive_5xx` 5,
`base_ejection_time` 30 s, `max_ejection_time` 300 s. Other defaults suit a pool of few slow pods:
half of the pool may be ejected, not a tenth. And Envoy blames the host for each 5xx.

Rules:
1. A failure (`evidence.FAILURES`) may be due to its request. So it counts where other endpoints had
   requests of the same model and path, and once for each source (`evidence.likeness`) until another
   endpoint has served that. Failures with many models count together as well (`comparison`). A cut
   connection or a timeout (`BROKEN`) is rarely due to a request: it is taken to be rare elsewhere
   until other endpoints have failed a tenth like that. That nobody listens (`UNREACHABLE`) never
   is: it counts always.
2. An endpoint is ejected when it fails `consecutive_failures` times in a row, or in a share of at
   least `min_requests` requests. Its failure rate must be `min_excess_ratio` above that of the
   other endpoints with like requests at the same time, of which some must have ended. The chance of
   that with a rate like theirs must be below `MAX_CHANCE`.
3. When other endpoints fail like requests after that, so that it no longer stands out, it is back
   at once.
4. An unreachable endpoint is ejected at once, but briefly: it may have been killed a moment ago.
   The next of our own calls that succeeds ends that ejection.
5. An ejection lasts `base_ejection_s` times the number of ejections so far, at most
   `max_ejection_s`. Each `base_ejection_s` of health takes one off that number.
6. Then it is on trial: at most `NUM_TRIALS` requests at a time, and as many must be served before
   it counts as healthy. A failure that other endpoints would hardly have ejects it again.
7. At most `max_ejected_ratio` of the endpoints are ejected, on trial or suspect.
8. Requests that were sent before an ejection, or during it because no other endpoint could take
   them, no longer count.
9. A 404 for a model counts as a failure if the endpoint still lists the model when it is asked
   next. Otherwise it does not count: the endpoint gets no such requests anyway.
10. An endpoint that has failed `NUM_SUSPECT` times in a row, whatever the requests, is suspect
   while others hardly fail. It gets single requests, each after twice as long a pause as the one
   before, so that others show what they do with the rest. A request that it serves ends that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable
from enum import StrEnum
from math import inf
from typing import NamedTuple

from msgspec import Struct

from extproc.fleet.comparison import HOLLOW_BYTES, SHORT_BYTES, Comparison
from extproc.fleet.evidence import FAILURES, Evidence
from extproc.fleet.failurerows import Own, Row
from extproc.fleet.tallies import Like

UNREACHABLE_S = 5.0
"""Ejection of an endpoint that could not be reached; scrapes usually show more long before."""
NUM_TRIALS = 3
"""Requests at a time, and served ones needed, before an endpoint counts as healthy again."""
NUM_SUSPECT = 3
"""Failures in a row from which an endpoint is suspect."""
SUSPECT_S, MAX_SUSPECT_S = 0.5, 30.0
"""The first pause of a suspect, and the longest."""
_BREAKS = (Evidence.BROKEN, Evidence.UNREACHABLE)
_SERVED = Evidence.SERVED  # to look up a member takes 0.1 us
MAX_DOUBTS = 64
"""404s of an endpoint that wait for its next list of models; without one the oldest count for
nothing."""
MAX_CHANGES = 100
"""Ejections and readmissions kept for `take_changes`."""
MAX_CHANCE = 1e-6
"""With a higher one, an endpoint may fail more than other endpoints by coincidence."""
MAX_CHANCE_AMID = 1e-9
"""The same while others fail often, too: then it is asked again with each failure."""
MAX_TRIAL_CHANCE = 0.05
"""The same on trial: it is known to have failed."""
EXONERATING_CHANCE = 1e-4
"""From this one on, the failures that ejected an endpoint were no more than those of other
endpoints.
"""


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


class _Doubt(NamedTuple):
    """A 404 for a model, to be judged by whether the endpoint goes on listing that."""

    model: str
    like: Like
    ended_s: float
    trial: int
    sent_at_s: float
    outlived_s: float


class _Health:
    """The record of one endpoint. Ejected or on trial while `cause` is set."""

    __slots__ = (
        *("asked_s", "broke_s", "cause", "count", "doubts", "num_judged", "num_passed"),
        *("num_row", "num_trials", "own", "serial", "since_s", "suspect_s", "until_s", "why"),
    )

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.since_s = self.until_s = -inf  # healthy since, or ejected since and until
        self.serial = 0  # number of the ejection: a trial belongs to one
        self.count = 0  # ejections, less those worn off by health
        self.num_trials = self.num_passed = 0
        self.num_judged = 0  # requests since it was ejected
        self.asked_s = -inf  # when the newest of our own calls that it answered was sent
        self.broke_s = -inf  # when the last request ended that was cut
        self.num_row = 0  # failures since it last served anything, all of them
        self.suspect_s = -inf  # until then it gets nothing, as it is suspect
        self.doubts = deque[_Doubt]()
        self.own = Own()
        self.why: Row | None = None  # the row of failures that ejected it

    def passes_trial(self) -> bool:
        """Count a served trial; return whether that was the last one needed."""
        self.num_passed += 1
        return self.num_passed >= NUM_TRIALS

    def readmit(self, now: float) -> None:
        if self.cause is not Cause.UNREACHABLE:
            self.trust()
        self.cause, self.since_s, self.until_s = None, now, -inf

    def trust(self) -> None:
        """Take it for no suspect."""
        self.num_row, self.suspect_s, self.own.row = 0, -inf, Row()

    def suspect(self, now: float) -> None:
        """Take it for a suspect, that gets a request after the next pause."""
        pause_s = SUSPECT_S * 2.0 ** min(self.num_row - NUM_SUSPECT, 10)
        self.suspect_s = now + min(pause_s, MAX_SUSPECT_S)

    def eject(self, cause: Cause, now: float, for_s: float) -> None:
        is_compared = cause in (Cause.CONSECUTIVE_FAILURES, Cause.FAILURE_RATE)
        self.why = self.own.row if is_compared else None
        if cause is not Cause.UNREACHABLE:
            self.num_judged = 0
        self.cause, self.since_s, self.until_s = cause, now, now + for_s
        self.serial += 1
        self.num_trials = self.num_passed = 0
        if cause is not Cause.UNREACHABLE:
            self.trust()

    def is_out(self, now: float) -> bool:
        """Return whether it gets nothing now: ejected, or with as many trials as it may have."""
        return self.cause is not None and (now <= self.until_s or self.num_trials >= NUM_TRIALS)


class Outliers:
    """Judges endpoints by how requests to them end.

    Attributes:
        num_ejections: Ejections since the start, by cause.
    """

    def __init__(self, settings: OutlierSettings | None = None) -> None:
        self._settings = settings or OutlierSettings()
        self._health: dict[str, _Health] = {}
        self._comparison = Comparison()
        self.num_ejections = dict.fromkeys(Cause, 0)
        self._changes: deque[Ejection | Readmission] = deque(maxlen=MAX_CHANGES)

    def take_changes(self) -> list[Ejection | Readmission]:
        """Return what has changed since the last call, at most the last `MAX_CHANGES`."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def configure(self, settings: OutlierSettings) -> None:
        """Apply new thresholds. Ejections that they leave no room for end."""
        self._settings = settings
        self._make_room()

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Judge exactly these endpoints; one that returns starts with a clean record."""
        before = self._health
        self._health = {each: before.get(each) or _Health() for each in addresses}
        for address, health in before.items():
            if address not in self._health:
                self._comparison.forget(health.own)
        self._make_room()

    # --- events -----------------------------------------------------------------------------

    def begin(self, address: str, *, now: float) -> int:
        """Record that a request is sent there. Return the `trial` to pass to `end`."""
        health = self._health[address]
        if health.cause is None:
            if health.num_row >= NUM_SUSPECT and health.suspect_s > -inf:
                health.suspect(now)
            return 0
        if health.is_out(now):
            return 0
        health.num_trials += 1
        return health.serial

    def end(
        self,
        address: str,
        verdict: Evidence,
        like: Like,
        *,
        now: float,
        ended_s: float | None = None,
        trial: int = 0,
        num_bytes: int = SHORT_BYTES,
        sent_at_s: float = inf,
        outlived_s: float = -inf,
    ) -> None:
        """Record the end of a request there; an endpoint that has left is not judged.

        It ended at `ended_s` (None for `now`), which was reported at `now`. Ejections begin at
        `now`, so that clocks that disagree do not shorten them. `trial` is the result of `begin`,
        `num_bytes` the length of what it has served. It was sent at `sent_at_s`; `outlived_s` is
        when the newest one was sent that is in flight there and was sent before.
        """
        health = self._health.get(address)
        if health is None:
            return
        ended_s = now if ended_s is None else ended_s
        if verdict in _BREAKS and self._comparison.is_rare_elsewhere(health.own):
            health.broke_s = max(health.broke_s, ended_s)
        if not self._settings.enabled:
            return
        is_trial = health.cause is not None and trial == health.serial
        health.num_trials -= is_trial
        if not (is_trial or health.cause in (None, Cause.UNREACHABLE)):
            return
        self._comparison.turn(health.own, now)
        if verdict is _SERVED:
            self._comparison.served(health.own, address, like, num_bytes, sent_at_s)
            health.num_judged += 1
            if health.num_row and self._ends_row(health, like, num_bytes, sent_at_s):
                health.trust()
            if is_trial and health.passes_trial():
                self._readmit(address, health, now)
        elif verdict in FAILURES:
            health.own.row.sent(sent_at_s, outlived_s)
            health.num_row += 1
            if self._counts(address, health, verdict, like, sent_at_s):
                is_gone = verdict is Evidence.UNREACHABLE and health.asked_s <= ended_s
                self._failed(address, health, now, is_trial=is_trial, is_gone=is_gone)
            self._suspect(health, now)

    def is_hollow(self, address: str, kind: Hashable, num_bytes: int) -> bool:
        """Return whether an answer of status 200 is so short, beside those that other endpoints
        gave to requests of its kind, that it may be an error alone."""
        health = self._health.get(address)
        if health is None or num_bytes >= HOLLOW_BYTES:
            return False
        return self._comparison.is_hollow(health.own, kind, num_bytes)

    def doubt(
        self,
        address: str,
        model: str,
        like: Like,
        *,
        ended_s: float,
        trial: int,
        sent_at_s: float = inf,
        outlived_s: float = -inf,
    ) -> None:
        """Record a 404 of its own to a request for a model; `record_models` tells what it shows."""
        health = self._health.get(address)
        if health is None:
            return
        health.doubts.append(_Doubt(model, like, ended_s, trial, sent_at_s, outlived_s))
        if len(health.doubts) > MAX_DOUBTS:
            self._settle(address, health, Evidence.NONE, ended_s)

    def record_models(
        self, address: str, models: Container[str], *, asked_at_s: float, now: float
    ) -> None:
        """Judge the 404s for models by the endpoint's later list: it has failed models that it
        still lists, and has lost the rest.
        """
        health = self._health[address]
        while health.doubts and health.doubts[0].ended_s < asked_at_s:
            is_listed = health.doubts[0].model in models
            self._settle(address, health, Evidence.FAILED if is_listed else Evidence.NONE, now)

    def _settle(self, address: str, health: _Health, verdict: Evidence, now: float) -> None:
        doubt = health.doubts.popleft()
        self.end(
            address,
            verdict,
            doubt.like,
            now=now,
            ended_s=doubt.ended_s,
            trial=doubt.trial,
            sent_at_s=doubt.sent_at_s,
            outlived_s=doubt.outlived_s,
        )

    def record_answer(self, address: str, *, asked_at_s: float) -> None:
        """Record that the endpoint answered a call of our own, begun at `asked_at_s`."""
        health = self._health[address]
        health.asked_s = max(health.asked_s, asked_at_s)
        if health.cause is Cause.UNREACHABLE and asked_at_s > health.since_s:
            self._readmit(address, health, asked_at_s)

    def has_answered(self, address: str, *, since_s: float) -> bool:
        """Return whether an endpoint has answered a call of our own, begun since then."""
        health = self._health.get(address)
        return health is not None and health.asked_s > since_s

    def record_restart(self, address: str, *, now: float) -> None:
        """Record that a new process has started there: end the ejection, begin the trial."""
        health = self._health[address]
        health.until_s = min(health.until_s, now)

    # --- state ------------------------------------------------------------------------------

    def standing(self, address: str, *, now: float) -> tuple[bool, bool, bool, float]:
        """Return how an endpoint stands.

        The first part: whether it should get no requests now that other endpoints can take. The
        second: whether a request there was broken off, and no call of ours was answered since. The
        third: whether it is suspect, and gets none before the next pause is over. The fourth: the
        end of its last ejection, or of the pause; minus infinity without one.
        """
        health = self._health[address]
        is_suspect, until_s = now <= health.suspect_s, health.until_s
        ends_s = health.suspect_s if is_suspect else until_s
        return health.is_out(now), health.broke_s > health.asked_s, is_suspect, ends_s

    # --- inside -----------------------------------------------------------------------------

    def _ends_row(self, health: _Health, like: Like, num_bytes: int, sent_at_s: float) -> bool:
        """Return whether what an endpoint has served shows that it has ceased to fail."""
        if num_bytes < HOLLOW_BYTES and not self._comparison.knows_lengths(health.own, like.kind):
            return False  # it may be an error
        return not health.own.row.survives(sent_at_s)

    def _counts(
        self, address: str, health: _Health, verdict: Evidence, like: Like, sent_at_s: float
    ) -> bool:
        """Record a failure for comparison; return whether it counts."""
        if verdict is Evidence.UNREACHABLE:
            self._comparison.broke(health.own)
            return True
        is_rare = verdict is Evidence.BROKEN
        return self._comparison.failed(health.own, address, like, sent_at_s, is_rare=is_rare)

    def _failed(
        self, address: str, health: _Health, now: float, *, is_trial: bool, is_gone: bool
    ) -> None:
        """Judge an endpoint by a failure that counts."""
        health.num_judged += 1
        cause = self._cause(address, health, is_trial=is_trial)
        if cause is None and is_gone and health.cause is None:
            cause = Cause.UNREACHABLE
        if cause is not None:
            self._eject(address, health, cause, now)
        self._exonerate(address, now)

    def _suspect(self, health: _Health, now: float) -> None:
        """Take an endpoint for a suspect if it has failed often in a row, and others hardly do."""
        if health.cause is not None or health.num_row < NUM_SUSPECT:
            return
        has_place = health.suspect_s >= now or self._num_out(now) < self._limit()
        if has_place and self._comparison.is_rare_elsewhere(health.own):
            health.suspect(now)

    def _cause(self, address: str, health: _Health, *, is_trial: bool) -> Cause | None:
        settings, own, comparison = self._settings, health.own, self._comparison
        if not (is_trial or self._are_others_steady(health)):
            return None
        max_chance = MAX_CHANCE if comparison.is_rare_elsewhere(own) else MAX_CHANCE_AMID
        num, chance, excess = comparison.judge(own, own.row, address)
        if excess >= settings.min_excess_ratio:
            if is_trial and chance <= MAX_TRIAL_CHANCE:
                return Cause.FAILED_TRIAL
            if num >= settings.consecutive_failures and chance <= max_chance:
                return Cause.CONSECUTIVE_FAILURES
        is_far = comparison.recent.excess(address) >= settings.min_excess_ratio
        if health.num_judged >= settings.min_requests and is_far:
            for rates in comparison.judge_rates(own):
                is_far = rates.excess_ratio() >= settings.min_excess_ratio
                if is_far and rates.num >= settings.min_requests and rates.chance() <= max_chance:
                    return Cause.FAILURE_RATE
        return None

    def _are_others_steady(self, health: _Health) -> bool:
        """Return whether at least half of the other endpoints do not fail in a row, too: those that
        do get few requests, so that little shows it.
        """
        others = [each for each in self._health.values() if each is not health and not each.cause]
        num_failing = sum(each.num_row >= NUM_SUSPECT for each in others)
        return 2 * num_failing <= len(others)

    def _exonerate(self, failed: str, now: float) -> None:
        """End ejections for failures that another endpoint turns out to share."""
        for address, health in self._health.items():
            if health.cause is None or health.why is None or address == failed:
                continue
            self._comparison.turn(health.own, now)
            if self._comparison.is_shared(health.own, health.why, EXONERATING_CHANCE):
                health.count = max(0, health.count - 1)
                self._readmit(address, health, now)

    def _eject(self, address: str, health: _Health, cause: Cause, now: float) -> None:
        num_ejected = sum(each.cause is not None for each in self._health.values())
        if health.cause is None and num_ejected >= self._limit():
            return
        is_brief = cause is Cause.UNREACHABLE
        for_s = UNREACHABLE_S if is_brief else self._next_ejection_s(health, now)
        health.eject(cause, now, for_s)
        self.num_ejections[cause] += 1
        self._changes.append(Ejection(address, cause, for_s))

    def _readmit(self, address: str, health: _Health, now: float) -> None:
        health.readmit(now)
        self._changes.append(Readmission(address))

    def _next_ejection_s(self, health: _Health, now: float) -> float:
        base_s = self._settings.base_ejection_s
        if health.cause is None and health.count:
            health.count = max(0, health.count - int((now - health.since_s) // base_s))
        health.count += 1
        return min(base_s * health.count, self._settings.max_ejection_s)

    def _num_out(self, now: float) -> int:
        """Return how many are ejected, on trial or suspect."""
        states = self._health.values()
        return sum(each.cause is not None or now <= each.suspect_s for each in states)

    def _limit(self) -> int:
        """Return how many may be ejected, on trial or suspect."""
        ratio = self._settings.max_ejected_ratio if self._settings.enabled else 0.0
        return int(ratio * len(self._health))

    def _make_room(self) -> None:
        """End the ejections beyond the limit, those first that would end first."""
        ejected = [item for item in self._health.items() if item[1].cause is not None]
        ejected.sort(key=lambda item: item[1].until_s)
        for address, health in ejected[: max(0, len(ejected) - self._limit())]:
            health.readmit(health.since_s)
            self._changes.append(Readmission(address, is_recovered=False))
