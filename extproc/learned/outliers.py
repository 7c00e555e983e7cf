"""Outlier detection: endpoints that fail requests which other endpoints serve get none for a while.

An endpoint that fails at once has nothing pending, so every policy that looks for the emptiest
sends it more. Terms and defaults follow Envoy's outlier detection where pods allow it
(envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): `consecutive_5xx` 5,
`base_ejection_time` 30 s, `max_ejection_time` 300 s. Other defaults suit a pool of few slow pods:
half of the pool may be ejected, not a tenth. And Envoy blames the host for each 5xx. The module
`ejections` says how long an ejection lasts.

Rules:
1. A failure (`evidence.FAILURES`) may be due to its request. So it counts where other endpoints had
   requests of the same model and path, and once for each source (`evidence.likeness`) until another
   endpoint has served that. Failures with many models count together as well (`comparison`). A cut
   connection or a timeout (`BROKEN`) is rarely due to a request: it is taken to be rare elsewhere
   until other endpoints have failed a tenth like that. That nobody listens (`UNREACHABLE`) never
   is: it counts always, and ejects at once.
2. An endpoint is ejected when it fails `consecutive_failures` times in a row, or in a share of at
   least `min_requests` requests. Its failure rate must be `min_excess_ratio` above that of the
   other endpoints with like requests at the same time, of which some must have ended. The chance of
   that with a rate like theirs must be below `MAX_CHANCE`.
3. It is judged when it fails. One that has failed so often in a row is judged again when others
   have served what they were sent meanwhile.
4. When other endpoints fail like requests after that, so that it no longer stands out, it is back
   at once.
5. A failure on trial that other endpoints would hardly have ejects it again.
6. Requests that were sent before an ejection, or during it because no other endpoint could take
   them, no longer count.
7. A 404 for a model counts as a failure if the endpoint still lists the model when it is asked
   next. Otherwise it does not count: the endpoint gets no such requests anyway.
8. An endpoint that has failed `NUM_SUSPECT` times in a row, whatever the requests, is suspect
   while others hardly fail. It gets single requests, each after twice as long a pause as the one
   before, so that others show what they do with the rest. A request that it serves ends that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable
from math import inf
from typing import NamedTuple

from extproc.learned.comparison import HOLLOW_BYTES, SHORT_BYTES, Comparison
from extproc.learned.ejections import Cause, Ejections, OutlierSettings, Standing
from extproc.learned.evidence import FAILURES, Evidence
from extproc.learned.failurestreaks import EndpointEnds, FailureStreak
from extproc.learned.recentends import NUM_BESIDE
from extproc.learned.tallies import Like

NUM_SUSPECT = 3
"""Failures in a row from which an endpoint is suspect."""
SUSPECT_S, MAX_SUSPECT_S = 0.5, 30.0
"""The first pause of a suspect, and the longest."""
_BREAKS = (Evidence.BROKEN, Evidence.UNREACHABLE)
_SERVED = Evidence.SERVED  # to look up a member takes 0.1 us
MAX_DOUBTS = 64
"""404s of an endpoint that wait for its next list of models; without one the oldest count for
nothing."""
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


class _Doubt(NamedTuple):
    """A 404 for a model, to be judged by whether the endpoint goes on listing that."""

    model: str
    like: Like
    ended_s: float
    trial: int
    sent_at_s: float
    outlived_s: float


class _Record(Standing):
    """The record of one endpoint."""

    __slots__ = (
        *("asked_s", "broke_s", "doubts", "num_again", "num_judged", "num_row", "own", "why"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.num_judged = 0  # requests since it was ejected
        self.asked_s = -inf  # when the newest of our own calls that it answered was sent
        self.broke_s = -inf  # when the last request ended that was cut
        self.num_row = 0  # failures since it last served anything, all of them
        self.num_again = 0  # ends elsewhere by which it was judged again since its last failure
        self.doubts = deque[_Doubt]()
        self.own = EndpointEnds()
        self.why: FailureStreak | None = None  # the streak that ejected it

    def trust(self) -> None:
        super().trust()
        self.num_row, self.own.streak = 0, FailureStreak()

    def suspect(self, now: float) -> None:
        """Take it for a suspect, that gets a request after the next pause."""
        pause_s = SUSPECT_S * 2.0 ** min(self.num_row - NUM_SUSPECT, 10)
        self.suspect_s = now + min(pause_s, MAX_SUSPECT_S)

    def eject(self, cause: Cause, now: float, for_s: float) -> None:
        is_compared = cause in (Cause.CONSECUTIVE_FAILURES, Cause.FAILURE_RATE)
        self.why = self.own.streak if is_compared else None
        if cause is not Cause.UNREACHABLE:
            self.num_judged = 0
        super().eject(cause, now, for_s)


class Outliers:
    """Judges endpoints by how requests to them end.

    Args:
        on_change: As `Ejections` has it.

    Attributes:
        ejections: Of those that fail.
    """

    def __init__(
        self,
        settings: OutlierSettings | None = None,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings or OutlierSettings()
        self._records: dict[str, _Record] = {}
        self._comparison = Comparison()
        self._rows: set[str] = set()  # who has failed often in a row, and some who did
        self.ejections = Ejections(self._settings, on_change)

    def configure(self, settings: OutlierSettings) -> None:
        """Apply new thresholds. Ejections that they leave no room for end."""
        self._settings = settings
        self.ejections.apply(settings, self._records)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Judge exactly these endpoints; one that returns starts with a clean record."""
        before = self._records
        self._records = {each: before.get(each) or _Record() for each in addresses}
        for address, record in before.items():
            if address not in self._records:
                self._comparison.forget(record.own)
        self.ejections.apply(self._settings, self._records)

    # --- events -----------------------------------------------------------------------------

    def picked(self, address: str, *, now: float) -> int:
        """Record that a request is sent there. Return the `trial` to pass to `ended`."""
        record = self._records[address]
        if record.cause is None:
            if record.num_row >= NUM_SUSPECT and record.suspect_s > -inf:
                record.suspect(now)
            return 0
        if record.is_out(now):
            return 0
        return record.begin_trial()

    def ended(
        self,
        address: str,
        verdict: Evidence,
        like: Like,
        *,
        model: str = "",
        trial: int = 0,
        num_bytes: int = SHORT_BYTES,
        sent_at_s: float = inf,
        outlived_s: float = -inf,
        ended_s: float | None = None,
        now: float,
    ) -> None:
        """Record the end of a request there; an endpoint that has left is not judged.

        It ended at `ended_s` (None for `now`), which was reported at `now`. Ejections begin at
        `now`, so that clocks that disagree do not shorten them. `trial` is the result of `picked`,
        `num_bytes` the length of what it has served. It was sent at `sent_at_s`; `outlived_s` is
        when the newest one was sent that is in flight there and was sent before. A 404 of its own
        to a request that named a `model` is judged once the endpoint has `listed` its models.
        """
        if (record := self._records.get(address)) is None:
            return
        ended_s = now if ended_s is None else ended_s
        if verdict is not _SERVED:
            if verdict is Evidence.NOT_FOUND and model:
                if len(record.doubts) == MAX_DOUBTS:
                    self._settle(address, record, Evidence.NONE, ended_s)
                record.doubts.append(_Doubt(model, like, ended_s, trial, sent_at_s, outlived_s))
                return
            if verdict in _BREAKS and self._comparison.is_rare_elsewhere(record.own):
                record.broke_s = max(record.broke_s, ended_s)
        if not self._settings.enabled:
            return
        is_trial = record.cause is not None and trial == record.serial
        if is_trial:
            record.end_trial()
        if not (is_trial or record.cause in (None, Cause.UNREACHABLE)):
            return
        self._comparison.forget_old(record.own, now)
        if verdict is _SERVED:
            self._comparison.served(record.own, address, like, num_bytes, sent_at_s)
            record.num_judged += 1
            if record.num_row and self._ends_row(record, like, num_bytes, sent_at_s):
                record.trust()
            if is_trial and record.passes_trial():
                self.ejections.readmit(address, now)
            if self._rows:
                self._judge_again(sent_at_s, now)
        elif verdict in FAILURES:
            record.own.streak.sent(sent_at_s, outlived_s)
            record.num_row += 1
            if self._counts(address, record, verdict, like, sent_at_s):
                is_gone = verdict is Evidence.UNREACHABLE and record.asked_s <= ended_s
                self._failed(address, record, now, is_trial=is_trial, is_gone=is_gone)
            self._suspect(record, now)

    def is_hollow(
        self, address: str, kind: Hashable, num_bytes: int, *, is_text: bool = False
    ) -> bool:
        """Return whether an answer of status 200 is so short that it may be an error alone.

        It is compared with answers of other endpoints. `is_text` says that it should be a generated
        text.
        """
        record = self._records.get(address)
        if record is None or num_bytes >= HOLLOW_BYTES:
            return False
        return self._comparison.is_hollow(record.own, address, kind, num_bytes, is_text=is_text)

    def listed(
        self, address: str, models: Container[str], *, asked_at_s: float, now: float
    ) -> None:
        """Judge the 404s for models by the endpoint's later list: it has failed models that it
        still lists, and has lost the rest.
        """
        record = self._records[address]
        while record.doubts and record.doubts[0].ended_s < asked_at_s:
            is_listed = record.doubts[0].model in models
            self._settle(address, record, Evidence.FAILED if is_listed else Evidence.NONE, now)

    def answered(self, address: str, *, asked_at_s: float) -> None:
        """Record that the endpoint answered a call of our own, begun at `asked_at_s`."""
        record = self._records[address]
        record.asked_s = max(record.asked_s, asked_at_s)
        if record.cause is Cause.UNREACHABLE and asked_at_s > record.since_s:
            self.ejections.readmit(address, asked_at_s)

    def has_answered(self, address: str, *, since_s: float) -> bool:
        """Return whether an endpoint has answered a call of our own, begun since then."""
        record = self._records.get(address)
        return record is not None and record.asked_s > since_s

    def restarted(self, address: str, *, now: float) -> None:
        """Record that a new process has started there: end the ejection, begin the trial."""
        self._records[address].restart(now)

    # --- state ------------------------------------------------------------------------------

    def standing(self, address: str, *, now: float) -> tuple[bool, bool, bool, float, bool]:
        """Return how an endpoint stands.

        The first part: whether it should get no requests now that other endpoints can take. The
        second: whether a request there was broken off, and no call of ours was answered since. The
        third: whether it is suspect, and gets none before the next pause is over. The fourth: the
        end of its last ejection, or of the pause; minus infinity without one. The fifth: whether it
        is well: neither ejected nor on trial, it has not been suspect of late, and has broken off
        nothing since it answered a call of ours.
        """
        record = self._records[address]
        suspect_s, has_broken = record.suspect_s, record.broke_s > record.asked_s
        is_suspect, is_ejected = now <= suspect_s, record.cause is not None
        ends_s = suspect_s if is_suspect else record.until_s
        is_well = not (is_ejected or has_broken or suspect_s > -inf)
        return is_ejected and record.is_out(now), has_broken, is_suspect, ends_s, is_well

    # --- inside -----------------------------------------------------------------------------

    def _settle(self, address: str, record: _Record, verdict: Evidence, now: float) -> None:
        doubt = record.doubts.popleft()
        self.ended(
            address,
            verdict,
            doubt.like,
            trial=doubt.trial,
            sent_at_s=doubt.sent_at_s,
            outlived_s=doubt.outlived_s,
            ended_s=doubt.ended_s,
            now=now,
        )

    def _ends_row(self, record: _Record, like: Like, num_bytes: int, sent_at_s: float) -> bool:
        """Return whether what an endpoint has served shows that it has ceased to fail."""
        if num_bytes < HOLLOW_BYTES and not self._comparison.knows_lengths(record.own, like.kind):
            return False  # it may be an error
        return not self._comparison.survives(record.own, sent_at_s)

    def _counts(
        self, address: str, record: _Record, verdict: Evidence, like: Like, sent_at_s: float
    ) -> bool:
        """Record a failure for comparison; return whether it counts."""
        if verdict is Evidence.UNREACHABLE:
            self._comparison.broke(record.own)
            return True
        is_rare = verdict is Evidence.BROKEN
        return self._comparison.failed(record.own, address, like, sent_at_s, is_rare=is_rare)

    def _failed(
        self, address: str, record: _Record, now: float, *, is_trial: bool, is_gone: bool
    ) -> None:
        """Judge an endpoint by a failure that counts."""
        record.num_judged += 1
        cause = self._cause(address, record, is_trial=is_trial)
        if cause is None and is_gone and record.cause is None:
            cause = Cause.UNREACHABLE
        if cause is not None:
            self.ejections.eject(address, cause, now)
        if record.cause is None and record.num_row >= self._settings.consecutive_failures:
            record.num_again = 0
            self._rows.add(address)
        self._exonerate(address, now)

    def _judge_again(self, sent_at_s: float, now: float) -> None:
        """Judge those that have failed often in a row by what others were sent meanwhile, and have
        served now.
        """
        for address in [*self._rows]:
            record = self._records.get(address)
            if record is None or record.cause is not None or not record.num_row:
                self._rows.discard(address)
            elif record.num_again < NUM_BESIDE and record.own.streak.spans(sent_at_s):
                record.num_again += 1
                self._comparison.forget_old(record.own, now)
                cause = self._cause(address, record, is_trial=False)
                if cause is not None:
                    self.ejections.eject(address, cause, now)

    def _suspect(self, record: _Record, now: float) -> None:
        """Take an endpoint for a suspect if it has failed often in a row, and others hardly do."""
        if record.cause is not None or record.num_row < NUM_SUSPECT:
            return
        has_place = record.suspect_s >= now or self.ejections.has_room(now)
        if has_place and self._comparison.is_rare_elsewhere(record.own):
            record.suspect(now)

    def _cause(self, address: str, record: _Record, *, is_trial: bool) -> Cause | None:
        settings, own, comparison = self._settings, record.own, self._comparison
        if not (is_trial or self._are_other_endpoints_steady(record)):
            return None
        max_chance = MAX_CHANCE if comparison.is_rare_elsewhere(own) else MAX_CHANCE_AMID
        num, chance, excess = comparison.judge(own, own.streak, address)
        if excess >= settings.min_excess_ratio:
            if is_trial and chance <= MAX_TRIAL_CHANCE:
                return Cause.FAILED_TRIAL
            if num >= settings.consecutive_failures and chance <= max_chance:
                return Cause.CONSECUTIVE_FAILURES
        is_far = comparison.recent.excess(address) >= settings.min_excess_ratio
        if record.num_judged >= settings.min_requests and is_far:
            for rates in comparison.judge_rates(own):
                is_far = rates.excess_ratio() >= settings.min_excess_ratio
                if is_far and rates.num >= settings.min_requests and rates.chance() <= max_chance:
                    return Cause.FAILURE_RATE
        return None

    def _are_other_endpoints_steady(self, record: _Record) -> bool:
        """Return whether at least half of the other endpoints do not fail in a row, too: those that
        do get few requests, so that little shows it.
        """
        others = [each for each in self._records.values() if each is not record and not each.cause]
        num_failing = sum(each.num_row >= NUM_SUSPECT for each in others)
        return 2 * num_failing <= len(others)

    def _exonerate(self, failed: str, now: float) -> None:
        """End ejections for failures that another endpoint turns out to share."""
        for address, record in self._records.items():
            if record.cause is None or record.why is None or address == failed:
                continue
            self._comparison.forget_old(record.own, now)
            if self._comparison.is_shared(record.own, record.why, EXONERATING_CHANCE):
                self.ejections.readmit(address, now, is_wrong=True)
