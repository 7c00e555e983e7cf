"""What prompts and loads cost each endpoint, learned from first tokens.

The configured costs are where this begins. A pick's time to its first token tells of them if
nothing was ahead of it: it is a step's time, its prompt, but for what was cached, and its adapter's
load. Other picks do not count, nor do those whose adapter may have waited for a slot. Only where
prompts are taken to be ahead of all picks for a while, these count as well, their prompts and what
is ahead taken together: or else, nothing would show that prompts cost less than they are taken to.

Rules:
1. **Prompts**: the slope of first tokens over bytes, where nothing was loaded. What all of them
   have in common (a step, the way, the tokens of a template) is the line's base, so short prompts
   do not look slow. The line is Tukey's resistant one, through the medians of the outer thirds
   (Exploratory Data Analysis, 1977, chapter 5): a sixth of the first tokens may be late for other
   reasons.
2. A slope counts as far as it is sure. An endpoint's is drawn to the one of its group, and that one
   to the configured one, by the squares of their errors (a normal prior): prompts that are all
   alike teach nothing. How much a group's endpoints differ is learned as well, as what their slopes
   vary by beyond their errors (DerSimonian and Laird, 1986): those that are alike have one cost,
   whatever a few late tokens say, and a new one has that of its group.
3. **Loads**: the median of what a first token took beyond base and prompt, and of some that are as
   configured.
4. What is learned stays within bounds of what is configured, and only the latest first tokens
   count.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from math import sqrt
from statistics import fmean, median
from typing import NamedTuple

from extproc.core.costs import Costs, Load, Probe
from extproc.core.tracked import Tracked
from extproc.core.types import RequestInfo

MAX_RATIO = 8.0
"""Of a learned cost of prompts and the configured one, either way."""
MIN_LOAD_S, MAX_LOAD_S = 0.001, 30.0
NUM_OF_ENDPOINT, NUM_OF_GROUP, NUM_LOADS = 48, 256, 64
"""The latest first tokens that count, and loads of either kind."""
MAX_BEHIND = 16
"""Picks in a row that an endpoint may get while prompts are ahead, before those tell as well."""
NUM_PRESUMED_LOADS = 8
"""Loads that took as long as configured, before any is seen."""

_MIN_THIRD = 4
_PER_LOOK_AT_ENDPOINT, _PER_LOOK_AT_GROUP = 4, 16
"""First tokens from one look to the next: they take 15 and 100 us. For a group they are as many as
it has endpoints, if those are more: each of them gets its costs anew."""
_SPREAD = 1.0
"""By how much groups differ from their configuration: the standard deviation, as a part of it."""
_ERROR = 2 * 1.4826 * 1.2533 * sqrt(2)
"""Of the difference of two medians of n, over their spread / sqrt(n): a normal distribution's
standard deviation is 1.4826 median deviations, a median's error 1.2533 times a mean's. Twice that,
as what comes at the same time is late together."""


class Line(NamedTuple):
    """Seconds over bytes: the time of no bytes, the slope, and its standard error."""

    base_s: float
    s_per_byte: float
    error_s_per_byte: float

    def drawn_to(self, s_per_byte: float, variance: float) -> float:
        """Return the slope that is likeliest if such slopes are `s_per_byte`, with a variance."""
        weight = variance / (variance + self.error_s_per_byte**2) if variance else 0.0
        return s_per_byte + weight * (self.s_per_byte - s_per_byte)


def fit(points: Iterable[tuple[int, float]]) -> Line | None:
    """Return the resistant line through (bytes, seconds); None if they are few, or all alike."""
    ordered = sorted(points)
    third = len(ordered) // 3
    if third < _MIN_THIRD:
        return None
    (low_bytes, low_s), (high_bytes, high_s) = map(_middle, (ordered[:third], ordered[-third:]))
    width = high_bytes - low_bytes
    if not width:
        return None
    slope = (high_s - low_s) / width
    rests = [seconds - slope * num_bytes for num_bytes, seconds in ordered]
    base_s = median(rests)
    spread_s = median([abs(rest - base_s) for rest in rests])
    return Line(base_s, slope, _ERROR * spread_s / sqrt(third) / width)


def _middle(points: list[tuple[int, float]]) -> tuple[float, float]:
    return median([each for each, _ in points]), median([each for _, each in points])


def probe_of(
    tracked: Tracked, request: RequestInfo, adapter: str | None, *, now: float
) -> Probe | None:
    """Return what the first token of a request will tell of, before it is counted there; None for
    nothing."""
    if request.context_bytes is not None:  # it is no text
        return None
    prompts = tracked.prompts
    ahead_s = max(0.0, prompts.done_s - now)
    prompts.num_behind = prompts.num_behind + 1 if ahead_s else 0
    if 0 < prompts.num_behind <= MAX_BEHIND:
        return None
    load = Load.NONE
    if adapter is not None:
        active = tracked.adapters.keys() | tracked.others.adapters.keys()
        slots = tracked.residency.num_slots
        if slots is None or len(active | {adapter}) > slots:
            return None
        if adapter not in active and adapter not in tracked.gpu_adapters:
            load = Load.CACHED if adapter in tracked.cpu_adapters else Load.COLD
    ahead_bytes = ahead_s / prompts.costs.prompt_s_per_byte
    return Probe(request.rest_bytes(tracked.endpoint.address) + int(ahead_bytes), load)


class _Tokens:
    """The latest first tokens, and the line through them as of the last look."""

    def __init__(self, num: int, per_look: int) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=num)
        self.per_look = per_look
        self._num_unseen = 0
        self.line: Line | None = None

    def record(self, num_bytes: int, seconds: float) -> bool:
        """Record a first token; return whether it was looked at."""
        self._points.append((num_bytes, seconds))
        self._num_unseen += 1
        if self._num_unseen < self.per_look:
            return False
        self._num_unseen, self.line = 0, fit(self._points)
        return True

    def s_per_byte(self, presumed: float, variance: float) -> float:
        """Return the cost of prompts where such costs are `presumed`, with a variance."""
        return presumed if self.line is None else self.line.drawn_to(presumed, variance)


class _Group:
    """What the endpoints of a group have in common."""

    def __init__(self) -> None:
        self.tokens = _Tokens(NUM_OF_GROUP, _PER_LOOK_AT_GROUP)
        self.endpoints: dict[Tracked, _Tokens] = {}
        self._variance = 0.0
        self._loads: dict[Load, deque[float]] = {
            load: deque(maxlen=NUM_LOADS) for load in (Load.CACHED, Load.COLD)
        }

    def set_endpoints(self, endpoints: Iterable[Tracked]) -> None:
        """Replace the endpoints; new ones are taken for what the group is."""
        before, self.endpoints = self.endpoints, {}
        for tracked in endpoints:
            own = before.get(tracked) or _Tokens(NUM_OF_ENDPOINT, _PER_LOOK_AT_ENDPOINT)
            self.endpoints[tracked] = own
            self.apply(tracked)
        self.tokens.per_look = max(_PER_LOOK_AT_GROUP, len(self.endpoints))

    def record(self, tracked: Tracked, num_bytes: int, seconds: float) -> None:
        """Record a first token without a load."""
        is_seen = self.endpoints[tracked].record(num_bytes, seconds)
        if self.tokens.record(num_bytes, seconds):
            self._variance = self._look()
            for each in self.endpoints:
                self.apply(each)
        elif is_seen:
            self.apply(tracked)

    def _look(self) -> float:
        """Return the variance of the endpoints' slopes beyond that of their errors."""
        lines = [own.line for own in self.endpoints.values() if own.line is not None]
        if self.tokens.line is None or not lines:
            return 0.0
        middle = self.tokens.line.s_per_byte
        beyond = [(each.s_per_byte - middle) ** 2 - each.error_s_per_byte**2 for each in lines]
        return max(0.0, fmean(beyond))

    def record_load(self, load: Load, seconds: float) -> None:
        self._loads[load].append(seconds)

    def load_s(self, load: Load, presumed_s: float) -> float:
        seen = self._loads[load]
        if not seen:
            return presumed_s
        middle_s = median([presumed_s] * NUM_PRESUMED_LOADS + list(seen))
        return min(max(middle_s, MIN_LOAD_S), MAX_LOAD_S)

    def apply(self, tracked: Tracked) -> None:
        """Let an endpoint have the costs that have been learned of it."""
        given = tracked.traits.costs
        s_per_byte = given.prompt_s_per_byte
        presumed = _near(self.tokens.s_per_byte(s_per_byte, (_SPREAD * s_per_byte) ** 2), given)
        learned = _near(self.endpoints[tracked].s_per_byte(presumed, self._variance), given)
        cold_s = self.load_s(Load.COLD, given.cold_load_s)
        cached_s = self.load_s(Load.CACHED, given.cached_load_s)
        tracked.set_costs(Costs(learned, cold_s, cached_s, tracked.decoding.learned))


def _near(s_per_byte: float, given: Costs) -> float:
    """Return a cost of prompts within its bounds."""
    presumed = given.prompt_s_per_byte
    return min(max(s_per_byte, presumed / MAX_RATIO), presumed * MAX_RATIO)


class Speeds:
    """Learns what prompts and loads cost the endpoints of a pool, and lets them have it."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def set_endpoints(self, endpoints: Iterable[Tracked]) -> None:
        """Replace the endpoints, or take note of other groups and configured costs.

        What a group has learned stays while it has an endpoint.
        """
        before, self._groups = self._groups, {}
        members = defaultdict(list)
        for tracked in endpoints:
            members[tracked.group].append(tracked)
        for name, group_endpoints in members.items():
            group = self._groups[name] = before.get(name) or _Group()
            group.set_endpoints(group_endpoints)

    def record_first_token(self, tracked: Tracked, probe: Probe, ttft_s: float) -> None:
        """Record how long an endpoint took for the first token of a pick; it may have left."""
        group = self._groups.get(tracked.group)
        if group is None or tracked not in group.endpoints:
            return
        num_bytes = probe.prompt_bytes
        if probe.load is Load.NONE:
            group.record(tracked, num_bytes, ttft_s)
        elif group.tokens.line is not None:
            base_s = max(0.0, group.tokens.line.base_s)
            rest_s = ttft_s - base_s - num_bytes * tracked.prompts.costs.prompt_s_per_byte
            group.record_load(probe.load, rest_s)
