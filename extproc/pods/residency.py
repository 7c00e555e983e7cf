"""Residency: the adapters in one endpoint's GPU slots and in its CPU cache.

vLLM (as of 0.33) does not report it, but its rule is simple enough to follow from outside. Both
caches evict the least recently used adapter, and both are touched together: by a load, and in every
step of the model by each adapter in the batch. So the CPU cache holds the `max_cpu_loras` adapters
touched last, the GPU slots the first `max_loras` of those, and it suffices to know when each
adapter was touched last.

Rules:
1. An adapter with running requests is touched now. At most `max_loras` adapters run at a time;
   one keeps its slot until its last request ends, then the longest waiting one gets it. An adapter
   that waits for a slot is not loaded and counts as touched when it last ran.
2. We see the end of our own requests, which is better than the engine's log: the log shows neither
   responses of one token nor the last token of any. For foreign requests there is only the log.
3. The log uses the engine's wall clock. A new entry in a report is from between the previous report
   and this one, whatever that clock says; the clock offset, learned from the same fact, places it
   within that time.
4. A load is seen when the name appears in `/v1/models`. The names of the first listing count as
   loaded in listing order before all else, as an engine loads them at its start.
5. Unloading a name frees nothing, but no request can use it: the adapter is not reported and
   keeps its place until it is evicted. Loaded again it is a second adapter alongside the old one.
6. The statements of a newer engine override all of this.

Some facts are invisible from outside. One is the order of adapters last touched in the same step.
Another is the order of our and foreign adapters touched within the few milliseconds before an end
is reported to us. Of foreign requests these are responses of one token, loads before the first
listing, and loads of a name unloaded since then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from operator import itemgetter
from typing import Any, Final, Literal

from msgspec.structs import replace

from extproc.types import LoadReport

_Touch = tuple[float, float]
"""When an adapter was touched: by our clock, then the order among touches of one moment."""

Change = Literal[0, 1, 2]
"""Whether other adapters may be resident than before: none, or this one for another, or others for
another that have no requests."""
NO_ADAPTER: Final = 0
THIS_ADAPTER: Final = 1
OTHER_ADAPTERS: Final = 2

_LAST_TOUCH = itemgetter(1)

MAX_REMEMBERED = 1024
"""Adapters kept per endpoint, unless the operator configures a larger cache. The endpoint's own
statements about slots and names are no reason to keep more: they may be anything.
"""


class Residency:
    """One endpoint's resident adapters, inferred from reports, listings and our own requests.

    Where the number of slots is unknown, only the most recently used adapter is surely resident.

    Args:
        max_loras: GPU slots until a report has the number; None for unknown.
        max_cpu_loras: Adapters in the CPU cache; None for as many as GPU slots, vLLM's default.

    Attributes:
        in_flight: Unfinished requests by adapter, longest active first; changed in place.
        num_slots: On the GPU; None for unknown.
    """

    def __init__(self, *, max_loras: int | None, max_cpu_loras: int | None) -> None:
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self.in_flight: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        """Start afresh: the process restarted. Our requests ended with it, whose ends are told
        later."""
        self._touched: dict[str, _Touch] = {}
        self._is_sorted, self._latest = True, (-inf, -inf)  # by their touches
        self._ghosts: list[_Touch] = []  # unloaded, then loaded again under the same name
        self._ended = set(self.in_flight)  # adapters whose requests all ended with a process
        self._seen_running: set[str] = set()  # ours that the last report shows in a slot
        self._report: LoadReport | None = None
        self.num_slots = self._max_loras
        self._asked_at_s = -inf
        self._logged_s: dict[str, float] = {}
        self._clock = ClockOffset()
        self._used_since_report: set[str] = set()
        self._active_not_ours: list[str] = []
        self._registered: dict[str, None] | None = None
        self._unloaded: set[str] = set()
        # Conclusions, until something changes them: the order, what was taken for running in it,
        # and what follows of slots and cache.
        self._ordered: list[str | None] | None = None
        self._ordered_running: list[str] = []
        self._concluded: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._stated: tuple[object, ...] = ()  # of slots and caches, by the last report
        self._is_unstated = True  # all that is known of them follows from the order
        self._num_kept = -1  # touched and logged adapters after the last trim

    # --- reports ----------------------------------------------------------------------------

    def reported(self, report: LoadReport, *, asked_at_s: float | None = None, now: float) -> None:
        """Record the result of a scrape, requested at `asked_at_s`. O(adapters in its log)."""
        touched = self._read_log(report.adapter_log, now)
        active, running, used = report.active_adapters, self._active(), self._used_since_report
        self._active_not_ours = [] if active <= used else sorted(active - used)
        self._used_since_report = set(running)
        self._seen_running = set(active.intersection(running))
        self._asked_at_s = now if asked_at_s is None else asked_at_s
        stated = report.max_loras, report.gpu_adapters, report.cpu_adapters
        self._report, self.num_slots = report, report.max_loras or self._max_loras
        if stated != self._stated:
            self._stated, self._ordered, self._num_kept = stated, None, -1
            self._is_unstated = report.gpu_adapters is report.cpu_adapters is None
        if len(self._touched) + len(self._logged_s) != self._num_kept:
            self._trim()
        if self._ordered is not None:
            running = self._running()
            # While they are the same, and no other one is touched, it holds.
            if running != self._ordered_running or (touched and not touched.keys() <= set(running)):
                self._ordered = None

    def lapse(self) -> None:
        """Forget what the last report says of the present: it has expired."""
        report, not_ours = self._report, self._active_not_ours
        if report is not None and (not_ours or not self._is_unstated):
            self._report = replace(report, gpu_adapters=None, cpu_adapters=None)
            self._active_not_ours, self._stated, self._ordered = [], (), None
            self._is_unstated = True

    def listed(self, adapters: Sequence[str], *, now: float) -> None:
        """Record the adapters that `/v1/models` lists, all of them, in its order."""
        names = dict.fromkeys(adapters)
        before = self._registered
        new = [each for each in names if before is None or each not in before]
        at_s, first = -inf if before is None else now, -self._num_remembered
        for place, adapter in enumerate(new, start=-len(new)):  # below any wall time
            # Of more than are kept, the first have been evicted by the last.
            if place >= first or adapter in self._touched:
                self._load(adapter, (at_s, place))
        self._registered = names
        self.listed_same()
        self._trim()
        self._ordered = None

    def listed_same(self) -> None:
        """Record that `/v1/models` lists the same adapters as before."""
        self._unloaded = self._touched.keys() - (self._registered or {}).keys()

    # --- our requests -----------------------------------------------------------------------

    def picked(self, adapter: str, num: int = 1) -> Change:
        """Record that requests for `adapter` were sent; return what may be resident for that.
        O(1)."""
        num_before = self.in_flight.get(adapter, 0)
        self.in_flight[adapter] = num_before + num
        self._used_since_report.add(adapter)
        if num_before and adapter not in self._ended:
            return NO_ADAPTER
        self._ended.discard(adapter)
        if self._ordered is None:
            return THIS_ADAPTER
        running = self._ordered_running
        if len(running) >= (self.num_slots or 1):
            return NO_ADAPTER  # it waits for a slot
        is_running = adapter in running  # for others
        running.append(adapter)
        return NO_ADAPTER if is_running else self._place(adapter, len(set(running)) - 1)

    def ended(self, adapter: str, num: int, has_run: bool, now: float) -> Change:
        """Record that requests for `adapter` ended at `now`, and return what may be resident for
        that. O(1).

        Requests that were forgotten are counted off and change nothing else. `now` is when they
        ended, which may lie in the past, not when the end was reported. `has_run` is False if the
        engine surely did nothing for them: refused, no connection, 404.
        """
        num_before = self.in_flight[adapter]
        if num_before > num:
            self.in_flight[adapter] = num_before - num
        else:
            del self.in_flight[adapter]
            self._seen_running.discard(adapter)
        if adapter in self._ended:
            if num_before <= num:
                self._ended.remove(adapter)
            return NO_ADAPTER
        if has_run:
            self._touch(adapter, (now, 0.0))
        running = self._ordered_running
        if self._ordered is not None and adapter in running:
            if num_before > num:
                return NO_ADAPTER
            # It is the idle one that was used last, and no other has waited for its slot.
            is_first_idle = has_run and next(reversed(self._touched)) == adapter
            num_running = len(self._active_not_ours) + len(self._active())
            is_not_ours = adapter in self._active_not_ours
            has_free = num_running < (self.num_slots or 1) and not is_not_ours
            if is_first_idle and has_free and self._is_sorted:
                running.remove(adapter)
                return self._place(adapter, len(set(running)))
        self._ordered = None
        is_latest = num_before > num or (has_run and self._latest == (now, 0.0))
        return THIS_ADAPTER if is_latest else OTHER_ADAPTERS

    # --- conclusions ------------------------------------------------------------------------

    @property
    def arranged(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters in GPU slots and in the CPU cache; the same objects as long as they stay."""
        order = self._ordered
        if order is None:
            order = self._order()
        found = self._concluded
        if found is None:
            found = self._concluded = self._conclude(order)
        return found

    @property
    def gpu_adapters(self) -> tuple[str, ...]:
        """Adapters in GPU slots, most recently used first."""
        return self.arranged[0]

    @property
    def cpu_adapters(self) -> tuple[str, ...]:
        """Adapters in the CPU cache, those in GPU slots included, most recently used first."""
        return self.arranged[1]

    def configure(self, *, max_loras: int | None, max_cpu_loras: int | None) -> None:
        """Apply other sizes."""
        self._max_loras, report = max_loras, self._report
        self.num_slots = (report.max_loras if report else None) or max_loras
        self._max_cpu_loras = max_cpu_loras
        self._trim()
        self._ordered = None

    # --- inside -----------------------------------------------------------------------------

    @property
    def _num_cached(self) -> int | None:
        # The engine does not start with a CPU cache smaller than its GPU slots.
        slots, cached = self.num_slots, self._max_cpu_loras
        return None if slots is None and cached is None else max(slots or 1, cached or 1)

    @property
    def _num_remembered(self) -> int:
        return max(MAX_REMEMBERED, self._max_cpu_loras or 0)

    def _touch(self, adapter: str, touch: _Touch) -> None:
        touched = self._touched
        before = touched.get(adapter)
        if before is not None:
            if touch < before:
                return
            # Of equal touches the one recorded last counts as the later one.
            del touched[adapter]
        touched[adapter] = touch
        if touch >= self._latest:
            self._latest = touch
        else:
            self._is_sorted = False

    def _load(self, adapter: str, touch: _Touch) -> None:
        """Record a name that is in the listing now and was not in the one before."""
        if adapter in self._unloaded and adapter in self._touched:
            self._ghosts.append(self._touched.pop(adapter))
        if adapter not in self._touched:  # else it was used since, which is later than the load
            self._touch(adapter, touch)

    def _read_log(
        self, log: Iterable[tuple[str, float]], taken_at_s: float
    ) -> Mapping[str, _Touch]:
        """Record the touches that a log shows, and return them."""
        logged_s, asked_at_s, clock = self._logged_s, self._asked_at_s, self._clock
        before, new = self._report, dict[str, float]()
        if before is None or log is not before.adapter_log:
            new = {a: wall_s for a, wall_s in log if logged_s.get(a) != wall_s}
        if not new and not self._active_not_ours:
            return {}
        if new:
            clock.narrow(asked_at_s - min(new.values()), taken_at_s - max(new.values()))
        # Requests that were running at the last report have had a step since, their last if the log
        # shows no more of them. Placed as the new entries are, it comes before all of them.
        unended = {a: logged_s.get(a, -inf) for a in self._active_not_ours}
        logged_s.update(new)
        ours_s, theirs_s, used = clock.low_s, clock.middle_s, self._used_since_report
        touches = {}
        for adapter, wall_s in (unended | new if unended else new).items():
            # A possible trace of our own requests must not count as later than their end.
            at_s = wall_s + (ours_s if adapter in used else theirs_s)
            at_s = asked_at_s if at_s < asked_at_s else at_s
            touch = touches[adapter] = taken_at_s if at_s > taken_at_s else at_s, wall_s
            self._touch(adapter, touch)
        return touches

    def _trim(self) -> None:
        """Forget evicted adapters: only a touch brings one back."""
        most = self._num_remembered
        limit = min(self._num_cached or most, most)
        if len(self._logged_s) > most:
            newest = nlargest(most // 2, self._logged_s.items(), key=_LAST_TOUCH)
            self._logged_s = dict(newest)
        if len(self._touched) + len(self._ghosts) > limit:
            self._evict(limit)
        is_trimmed = len(self._touched) + len(self._ghosts) <= limit  # or several are the oldest
        self._num_kept = len(self._touched) + len(self._logged_s) if is_trimmed else -1

    def _evict(self, limit: int) -> None:
        oldest = sorted([*self._touched.values(), *self._ghosts], reverse=True)[limit - 1]
        self._touched = {a: touch for a, touch in self._touched.items() if touch >= oldest}
        self._ghosts = [touch for touch in self._ghosts if touch >= oldest]
        self._ordered = None

    def _place(self, adapter: str, place: int) -> Change:
        """Move an adapter in the order, to a place among those with a slot."""
        order, num_slots = self._ordered or [], self.num_slots or 1
        if place < len(order) and order[place] == adapter:
            return NO_ADAPTER
        is_same = adapter in order[:num_slots] and self._is_unstated
        if adapter in order:
            order.remove(adapter)
        order.insert(place, adapter)
        self._ordered, self._concluded = order, None
        # As many have slots and are in the cache, and those that were there.
        return NO_ADAPTER if is_same else THIS_ADAPTER

    def _conclude(self, order: list[str | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        report, num_slots = self._report, self.num_slots or 1
        num_cached = max(num_slots, self._max_cpu_loras or 1)
        gpu, cpu = order[:num_slots], order[:num_cached]
        if report is not None and report.gpu_adapters is not None:
            gpu = _sort(report.gpu_adapters, order)
            rest = [adapter for adapter in cpu if adapter not in gpu]
            cpu = gpu + rest[: max(0, num_cached - len(gpu))]
        if report is not None and report.cpu_adapters is not None:
            cpu = _sort(report.cpu_adapters.union(filter(None, gpu)), order)
        known = self._registered
        is_usable: Any = None if known is None else known.__contains__  # no ghost is
        usable = tuple(filter(is_usable, cpu))
        return usable if gpu == cpu else tuple(filter(is_usable, gpu)), usable

    def _order(self) -> list[str | None]:
        """Return everything in the engine's caches, most recently used first; None for a ghost."""
        if (order := self._ordered) is not None:
            return order
        self._concluded = None
        if not self._is_sorted:
            self._touched = dict(sorted(self._touched.items(), key=_LAST_TOUCH))
            self._is_sorted = True
        self._ordered_running = self._running()
        running = dict.fromkeys(self._ordered_running)
        if not self._ghosts:
            order = self._ordered = [*running]
            for adapter in reversed(self._touched):
                if adapter not in running:
                    order.append(adapter)
            return order
        touches: list[tuple[str | None, _Touch]] = [(None, touch) for touch in self._ghosts]
        touches += self._touched.items()
        touches.sort(key=_LAST_TOUCH)
        idle = [adapter for adapter, _ in reversed(touches) if adapter not in running]
        self._ordered = [*running, *idle]
        return self._ordered

    def _active(self) -> Collection[str]:
        """Return the adapters with requests that the process has, longest active first."""
        ended = self._ended
        return [a for a in self.in_flight if a not in ended] if ended else self.in_flight

    def _running(self) -> list[str]:
        """Return the adapters that hold a slot through requests, as far as can be known."""
        seen, ended = self._seen_running, self._ended
        found, unseen = [*self._active_not_ours], list[str]()
        for adapter in self.in_flight:
            if adapter not in ended:
                (found if adapter in seen else unseen).append(adapter)
        found += unseen
        return found[: self.num_slots or 1]


def _sort(stated: frozenset[str], order: Sequence[str | None]) -> list[str | None]:
    """Return the engine's statement in our order; adapters unknown to us come last, by name."""
    known = [adapter for adapter in order if adapter in stated]
    return [*known, *sorted(stated.difference(filter(None, known)))]


# The offset between an engine's wall clock and ours, learned from when its log can be from.


@dataclass(slots=True)
class ClockOffset:
    """Bounds of our clock minus the engine's wall clock, in seconds."""

    low_s: float = -inf
    high_s: float = inf

    def narrow(self, low_s: float, high_s: float) -> None:
        """Apply new bounds. If they contradict the old ones, one of the clocks was set."""
        low, high = max(low_s, self.low_s), min(high_s, self.high_s)
        if low > high:
            low, high = low_s, max(low_s, high_s)
        self.low_s, self.high_s = low, high

    @property
    def middle_s(self) -> float:
        """The likeliest offset; -inf without a lower bound."""
        return self.low_s if self.low_s == -inf else (self.low_s + self.high_s) / 2
