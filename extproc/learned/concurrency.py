"""How many requests one endpoint should have at a time, by what its engine says: in its reports
(`EndpointRoom`), and by refusing some (`Fullness`).

An engine admits as many requests as its limits allow (sequences, tokens of a step, KV blocks). The
rest wait in it, first come first served. If some wait, the engine runs as many as it can, whichever
limit it reached. More requests than those, and a few that keep it busy until the next report, wait
better in the router's queue, which knows order, turns and patience.

Rules:
1. A report with requests that wait shows that the engine runs as many as run in it. The highest of
   the last `NUM_WAITING` such reports counts, as one may fall between the end of many and the
   admission of the next. Waiting says nothing where requests picked since the report before explain
   it: the engine may not have looked at those yet. Waiting for an adapter slot alone says nothing
   either: it holds up no request whose adapter runs.
2. It has room for that many, for `SPARE`, and for those that have ended without our knowledge, on
   average. The latter are known to be there, and a report does not show them.
3. Nobody waits and more run than that: there is room for one more than run, then for 2, 4, 8 and so
   on. It has not run so many for `FORGET_S`: nothing is known, as at first.
   Where `MANY` requests and more have their places for long (`LONG_S`), what waits behind them
   waits for long, too, and others get what is freed elsewhere meanwhile. There none are spare,
   unless nobody has waited for `FORGET_S` and as long as a place is had. Of few places an empty one
   is too large a part.
   Of many that come at once to an engine of which nothing is known, all but a few would wait in it.
   So from one report to the next it gets `START`, or twice as many as it has lately got in such a
   time while nobody waited, less those that wait. It gets more than `START` where even an endpoint
   that surprises is seldom asked. One that has run and ended since waits no longer, so another may
   take its place. With half of them the next report is due: none are held for it.
4. An engine counts sequences: a request for several is as many. Of those some end before others,
   so an end without our knowledge is one of a whole request.
5. The requests there are those that routers know of, and no more than the last report has and picks
   that it may not show: we may hear of ends late. A page shows the end of a step, and a step begins
   with the requests that came before. So a report has a pick for sure once its page has changed
   twice, or the running requests have got two tokens each. A report that is not trusted says
   nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from extproc.types import LoadReport

NUM_WAITING = 2
SPARE = 1
"""Requests that may wait in an engine, beyond those that end until we hear of it."""
FORGET_S = 10.0
START, START_S = 32, 0.05
"""Sequences that an engine gets at least in that time, the usual one between two reports, though
all may wait. Where reports are rarer it gets as many more from one to the next: requests would wait
for the report of an idle engine."""
LONG_S, LONG_KEPT = 1.0, 31 / 32
"""A place that is freed with so long before the next one is; what is kept of the mean, with each
end."""
MANY = 8
"""Places, of which one may be empty until the next request comes, and requests of a tenant that
leaves one to others: an eighth of them at most."""
LATE_KEPT = 7 / 8
"""Of the mean number of ends that were not heard of, with each report."""
NUM_STEPS = 2
"""Between two pages, so that the last has all that came before the first."""
_NEVER_S = float("-inf")


class EndpointRoom:
    """The room of one endpoint, by its reports.

    Attributes:
        limit: Requests that its engine runs at a time; None for not known.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self._waiting: deque[int] = deque(maxlen=NUM_WAITING)  # that ran while others waited
        self._full_s = self._waited_s = _NEVER_S
        self._took_s = self._took_s2 = 0.0  # means: of the time to the end, and of its square
        self._step = 1
        self._mean_late = 0.0  # ends that were not heard of when a report came
        self._asked_s = _NEVER_S  # for the last report
        self._report = LoadReport()
        self._shown = _shown(self._report)
        # The page did not change last, and the time before, until then.
        self._moved_s = self._before_s = _NEVER_S
        self._num_seen = self._num_deferred = 0  # by the last report
        self._num_young = 0  # picks that it may not show
        # Picks since the last report, those of them that have run, the most of late, and so many
        # until the next one.
        self._num_new, self._num_run, self._most_new, self._most_open = 0, 0, 0, START
        self._most_new_s = _NEVER_S
        self._num_due: float = START  # picks with which the next report is due

    def picked(self, num: int, at_s: float) -> bool:
        """Count a pick of any router that tells us, of so many sequences; return whether the next
        report is due, so that more can follow."""
        self._num_new += num
        if at_s > self._before_s:
            self._num_young += num
        return self._num_new - self._num_run >= self._num_due

    def ended(self, num: int, num_ended: int, took_s: float | None, at_s: float) -> None:
        """Count the end of picks that were made at `at_s`, of so many sequences together. `took_s`
        is for how long they had their places, in the mean, if they had some."""
        if at_s > self._before_s:
            num_young = self._num_young - num
            self._num_young = num_young if num_young > 0 else 0
        if took_s is not None:
            if at_s > self._asked_s:
                self._num_run += num
            kept, took_s2 = LONG_KEPT**num_ended, took_s * took_s
            self._took_s = took_s + kept * (self._took_s - took_s)
            self._took_s2 = took_s2 + kept * (self._took_s2 - took_s2)

    @property
    def held_s(self) -> float:
        """For how long a place is had, in the mean over time: between a few long responses many
        short ones may end."""
        return self._took_s2 / self._took_s if self._took_s > 0 else 0.0

    def reported(
        self,
        report: LoadReport,
        num_since: Callable[[float], int],
        *,
        num_requests: int,
        next_s: float = START_S,
        asked_at_s: float,
        now: float,
    ) -> None:
        """Record a report.

        Args:
            num_since: Counts the sequences of unfinished picks after some time.
            num_requests: All unfinished picks.
            next_s: From one question to an endpoint that surprises to the next.
        """
        before, self._report = self._report, report
        self._num_deferred = _num_deferred(report)
        num_waiting = report.num_waiting - self._num_deferred
        is_old = now >= self._most_new_s + FORGET_S
        num_new = round(self._num_new / max(1.0, (asked_at_s - self._asked_s) / next_s))
        if num_waiting <= 0 and (is_old or num_new > self._most_new):
            self._most_new, self._most_new_s = num_new, now
        self._num_new, self._num_run = num_since(asked_at_s), 0
        least = round(START * max(1.0, next_s / START_S))
        self._most_open = max(least, 2 * self._most_new) - num_waiting
        shown_before, self._shown = self._shown, _shown(report)
        if shown_before != self._shown:
            self._before_s, self._moved_s = self._moved_s, self._asked_s
            if _num_tokens_each(before, report) >= NUM_STEPS:
                self._before_s = self._asked_s
            if num_waiting > 0 and num_waiting > num_since(self._moved_s):
                self._limit_to(report.num_running, now)
            elif num_waiting <= 0 and self.limit is not None:
                self._grow(report.num_running, now)
        self._asked_s = asked_at_s
        self._num_due = self._most_open / 2 if self.limit is None else inf
        self._num_seen = report.num_running + report.num_waiting
        self._num_young = num_since(self._before_s)
        num_late = max(0, num_requests - self._num_seen - self._num_young)
        self._mean_late = LATE_KEPT * self._mean_late + (1 - LATE_KEPT) * num_late

    def places(
        self, num_known: int, max_in_flight: int | None, is_known: bool
    ) -> tuple[float, int]:
        """Return for how many sequences it has room, infinite for not known, and how many are
        there.

        Args:
            num_known: Unfinished sequences there, as far as routers know.
            max_in_flight: The limit that is configured, instead of a learned one; None for none.
            is_known: The last report is trusted.
        """
        if is_known:
            num_known = min(num_known, self._num_seen + self._num_young) - self._num_deferred
        if max_in_flight is not None:
            return max_in_flight, num_known
        if self.limit is None:
            return inf, num_known
        return self.limit + self.num_spare, num_known

    def is_open(self, num_known: int, max_in_flight: int | None, is_known: bool) -> bool:
        """Return whether one more request would run soon; arguments as for `places`.

        Where nobody knows for how many it has room, it gets some until its next report, whatever
        that shows.
        """
        if max_in_flight is None and self.limit is None:
            return not is_known or self._num_new - self._num_run < self._most_open
        most, num_there = self.places(num_known, max_in_flight, is_known)
        return num_there < most

    @property
    def num_spare(self) -> int:
        """Of the places that are learned, those in which a request may have to wait."""
        limit = self.limit or 0
        held_s = self.held_s
        is_soon = held_s < LONG_S or limit < MANY
        is_tried = is_soon or self._asked_s >= self._waited_s + max(FORGET_S, held_s)
        return SPARE * is_tried + min(limit, round(self._mean_late))

    def _limit_to(self, num_running: int, now: float) -> None:
        self._waiting.append(num_running)
        self.limit, self._step = max(self._waiting), 1
        self._full_s = self._waited_s = now

    def _grow(self, num_running: int, now: float) -> None:
        assert self.limit is not None
        if num_running >= max(1, self.limit - SPARE):  # a place may be left to others (`tenants`)
            self._full_s = now
        if now - self._full_s >= FORGET_S:
            self.limit = None
            self._waiting.clear()
        elif num_running > self.limit:
            self.limit = num_running + self._step
            self._step *= 2
            self._waiting.clear()


def _num_deferred(report: LoadReport) -> int:
    """Return how many wait for an adapter slot; perhaps all, where the engine does not say and more
    adapters have requests than there are slots."""
    if report.num_deferred is not None:
        return report.num_deferred
    slots = report.max_loras
    return report.num_waiting if slots and len(report.active_adapters) > slots else 0


def _shown(report: LoadReport) -> tuple[object, ...]:
    """Return what changes with the steps of an engine."""
    counted = report.generated_tokens, report.work_tokens, report.num_deferred
    return (report.num_running, report.num_waiting, report.kv_usage_ratio, *counted)


def _num_tokens_each(before: LoadReport, report: LoadReport) -> float:
    """Return how many tokens those that run have got between two reports; 0 where unknown."""
    num, num_before = report.generated_tokens, before.generated_tokens
    if num is None or num_before is None:
        return 0.0
    return (num - num_before) / max(1, report.num_running, before.num_running)


# How much an endpoint takes that has said that it is full.
#
# It refuses requests so that another endpoint takes them; that is no failure.
#
# Rules:
# 1. A refusal says that an endpoint takes no more than it had, unless its reports have shown more
#    within `SHOWN_S`: then the request may be too large for any (vLLM counts `n` of them), so it
#    says so only where another endpoint takes the request. Until that is known, it has no room
#    either.
# 2. The limit holds until the endpoint's first answer to a call of ours (a report or its models)
#    after `FIRST_HOLD_S`. Then one more is tried, after further answers 2, 4, 8 and so on, until
#    nothing is left of the limit. A refusal meanwhile begins again, and each time the limit holds
#    for twice as long, up to `MAX_HOLD_S`.

TAKEN_S = 0.25
"""A request that was refused and has not ended for so long is with another endpoint: the data plane
tries the next one at once."""
FIRST_HOLD_S = 1.0
"""Where all are full, whoever it is tried with gets the refusal: that is to be rare."""
MAX_HOLD_S = 10.0
MAX_STEP = 64
SHOWN_S = 30.0
"""Reports count for the last half to whole of it."""
MAX_OPEN = 64
"""Refusals kept of which it is not known yet whether another endpoint took the request."""


class Fullness:
    """The room of one endpoint, by its refusals.

    Attributes:
        limit: Unfinished requests that it takes; None for not known.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self._known: int | None = None  # the limit before it was tried to go beyond
        self._hold_s, self._since_s = FIRST_HOLD_S, 0.0
        self._step, self._has_grown = 1, False
        self._open: dict[str, tuple[int, float]] = {}
        self._half = self._shown = self._shown_before = 0

    @property
    def is_idle(self) -> bool:
        """Whether it has refused nothing of late."""
        return self.limit is None and not self._open

    def reported(self, report: LoadReport, *, now: float) -> None:
        """Record how many unfinished requests its report shows."""
        num_unfinished, half = report.num_running + report.num_waiting, int(now // (SHOWN_S / 2))
        if half > self._half:
            self._shown_before = self._shown if half == self._half + 1 else 0
            self._half, self._shown = half, 0
        self._shown = max(self._shown, num_unfinished)
        if self.limit is not None and self._known is not None:
            self._known = max(self._known, min(num_unfinished, self.limit))

    def refused(self, pick_id: str, num_pending: int, *, now: float) -> None:
        """Record that it refused a request that was sent beside so many unfinished ones."""
        most = max(self._shown, self._shown_before)
        if num_pending >= (most if self._known is None else min(most, self._known)):
            self._limit_to(num_pending, now)
        elif len(self._open) < MAX_OPEN:
            self._open[pick_id] = num_pending, now

    def ended(self, pick_id: str, *, was_taken: bool) -> None:
        """Record that a request that it refused ended: another endpoint took it, or none did."""
        num_pending, at_s = self._open.pop(pick_id, (0, None))
        if was_taken and at_s is not None:
            self._limit_to(num_pending, at_s)

    def answered(self, *, asked_at_s: float) -> None:
        """Record that it answered a call of ours, begun at `asked_at_s`."""
        if self.is_idle:
            return
        taken = [each for each, (_, at_s) in self._open.items() if asked_at_s - at_s >= TAKEN_S]
        for pick_id in taken:
            self.ended(pick_id, was_taken=True)
        if self.limit is None or taken or asked_at_s <= self._since_s + self._hold_s:
            return
        self.limit, self._has_grown = self.limit + self._step, True
        self._step *= 2
        if self._step > MAX_STEP:
            self.limit = self._known = None
            self._hold_s = FIRST_HOLD_S

    def is_full(self, num_pending: int) -> bool:
        """Return whether it has no room beside so many unfinished requests."""
        if self.limit is not None and num_pending >= self.limit:
            return True
        refusals = self._open.values()
        return bool(refusals) and any(num_pending >= at_refusal for at_refusal, _ in refusals)

    def _limit_to(self, num_pending: int, now: float) -> None:
        if self._has_grown:
            self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)
        # Of several that were sent there at once the first one tells, and some were sent before it
        # was tried to go beyond.
        known = num_pending if self._known is None else self._known
        self.limit = self._known = min(num_pending, known)
        self._since_s, self._step, self._has_grown = now, 1, False
