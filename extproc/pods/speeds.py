"""The cost of prompts and loads at each endpoint, learned from first tokens.

The configured costs are where this begins. A pick's time to its first token is a step, what was
ahead, its prompt without the cached part, and its adapter's load. It shows the cost of prompts if
nothing was ahead of it. If another pick's first token came while it waited, it shows the cost of
the prompts in between. If prompts were ahead of it by estimate alone, it shows only the most that a
byte can cost. Picks whose adapter may have waited for a slot do not count.

Rules:
1. **Prompts**: the slope of first tokens over bytes, where nothing was loaded. Their common part (a
   step, the way, the tokens of a template) is no part of it, so short prompts do not look slow. The
   line is Tukey's resistant one, through the medians of the outer thirds (Exploratory Data
   Analysis, 1977, chapter 5). A sixth of the first tokens may be late for other reasons. Prompts
   that are computed one after the other have a rate: their bytes over the time between two first
   tokens. No prompt costs more than its whole time to the first token, even if unknown prompts were
   ahead.
2. A slope counts as far as it is sure. An endpoint's slope is drawn to that of its group, and the
   group's to the configured one, by the squares of their errors (a normal prior). One whose error
   is greater than the configured cost is none: prompts that are all alike teach nothing. The
   difference between a group's endpoints is learned as well: the
   variation of their slopes beyond their errors (DerSimonian and Laird, 1986). Equal endpoints have
   one cost, whatever a few late tokens say, and a new one has that of its group.
3. **Loads**: the time of first tokens beyond prompt and beyond that of first tokens without a load
   at the same endpoint, with prompts ahead or without. Of those, the lower quartile is compared:
   other requests' loads only add. A load's level is the median. A load that takes less than a part
   of a first token cannot be seen. A load is known if all that it may take is within twice and half
   of its level. Else it is as configured, unless that is more or less than it may take.
4. Learned costs stay within bounds of the configured ones, and only the latest first tokens count.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from math import inf

from extproc.costs import Costs, Load, Probe
from extproc.learned.slopes import Level, Point, Slope, beyond, drawn, fit, level, most, rate
from extproc.pods.endpointstate import EndpointState
from extproc.types import RequestInfo

MAX_RATIO = 8.0
"""Of a learned cost of prompts and the configured one, either way."""
MIN_LOAD_S, MAX_LOAD_S = 0.001, 30.0
NUM_OF_ENDPOINT, NUM_OF_GROUP, NUM_LOADS = 48, 256, 64
"""The latest first tokens that count, and loads of either kind."""
NUM_SENT = 16
"""First tokens of an endpoint that later ones are compared with."""
NUM_ALIKE, MIN_ALIKE = 16, 4
"""The latest first tokens without a load that those with one are compared with, and the fewest."""
UNSEEN_RATIO = 0.4
"""Of the time of a first token, what may be no load's: a step that runs takes more or less."""
MAX_ERROR_RATIO = 2.0
"""Of a load's level and a bound, either way, if it is known."""

_PER_FIT_OF_ENDPOINT, _PER_FIT_OF_GROUP = 4, 16
"""First tokens from one fit to the next: they take 15 and 100 us. For a group they are as many as
it has endpoints, if those are more: each of them gets its costs anew."""
MIN_FIT_S = 0.25
"""From one fit of an endpoint or a group to the next, however many first tokens come: costs do not
change that fast."""
_NO_LOAD = Load.NONE  # to look up a member takes 0.1 us
_SPREAD = 1.0
"""By how much groups differ from their configuration: the standard deviation, as a part of it."""


def probe_of(
    pod: EndpointState, request: RequestInfo, num_bytes: int, adapter: str | None, *, now: float
) -> Probe | None:
    """Return of which costs the first token of a request will tell, before it is counted there;
    None for none.

    `num_bytes` are those of the request that it has to compute.
    """
    if request.context_bytes is not None:  # it is no text
        return None
    prompts, load = pod.load.prompts, _NO_LOAD
    if adapter is not None:
        residency, foreign = pod.load.residency, pod.load.foreign.adapters
        active = residency.in_flight
        if foreign:
            active = foreign | active
        num_free = (residency.num_slots or 0) - len(active)  # below 0 where nobody knows how many
        if adapter not in active:
            if num_free <= 0:
                return None
            gpu_adapters, cpu_adapters, _ = pod.load.seen
            if adapter not in gpu_adapters:
                load = Load.CACHED if adapter in cpu_adapters else Load.COLD
        elif num_free < 0:
            return None
    return Probe(num_bytes, load, prompts.sent_bytes, prompts.done_s > now)


class _Tokens:
    """The latest first tokens, and what they show as of the last fit.

    Attributes:
        slope: Of those that had nothing ahead.
        rate: Of those that had.
        most_s_per_byte: That a prompt can cost by all of them.
    """

    def __init__(self, num: int, per_fit: int) -> None:
        self._points: deque[Point] = deque(maxlen=num)
        self._behind: deque[Point] = deque(maxlen=num)
        self._all: deque[Point] = deque(maxlen=num)
        self.per_fit = per_fit
        self._num_unseen, self._fitted_s = 0, -inf
        self.slope: Slope | None = None
        self.rate: Slope | None = None
        self.most_s_per_byte = inf

    def record(self, prompt: Point, alone: Point | None, behind: Point | None, now: float) -> bool:
        """Record a first token; return whether it is time for a fit.

        Args:
            prompt: Its bytes, and the seconds since it was sent.
            alone: The same, if nothing was ahead of it.
            behind: The bytes that were computed one after the other up to it, and the seconds.
        """
        self._all.append(prompt)
        if alone is not None:
            self._points.append(alone)
        if behind is not None:
            self._behind.append(behind)
        self._num_unseen += 1
        return self._num_unseen >= self.per_fit and now >= self._fitted_s + MIN_FIT_S

    def refit(self, now: float, presumed: float) -> None:
        """See what the latest first tokens show, where prompts are `presumed` to cost as much."""
        self._num_unseen, self._fitted_s = 0, now
        found = fit(self._points), rate(self._behind)
        self.slope, self.rate = (
            each if each and each.error_s_per_byte <= _SPREAD * presumed else None for each in found
        )
        self.most_s_per_byte = most(self._all)

    def s_per_byte(self, presumed: float, variance: float) -> float:
        """Return the cost of prompts where such costs are `presumed`, with a variance."""
        found = drawn(presumed, variance, self.slope, self.rate)
        return min(found, self.most_s_per_byte)


class _EndpointTokens(_Tokens):
    """Those of one endpoint.

    Attributes:
        rests: The latest without a load, beyond their prompts: with nothing ahead, and the others.
    """

    def __init__(self) -> None:
        super().__init__(NUM_OF_ENDPOINT, _PER_FIT_OF_ENDPOINT)
        # First tokens, and all bytes that were sent up to their prompts.
        self._sent: deque[tuple[float, int]] = deque()
        self._in_order: list[tuple[float, int]] = []
        self.rests: tuple[deque[float], ...] = deque(maxlen=NUM_ALIKE), deque(maxlen=NUM_ALIKE)

    def since(self, sent_at_s: float, first_s: float, until_bytes: int) -> Point | None:
        """Return the bytes that were computed up to a first token since the first one that came
        while its request waited, and the seconds of that; None where none did."""
        ordered, found = self._in_order, None
        for at_s, num_bytes in ordered[bisect_left(ordered, (sent_at_s,)) :]:
            if at_s >= first_s:
                break
            if num_bytes < until_bytes:
                found = until_bytes - num_bytes, first_s - at_s
                break
        if len(ordered) >= NUM_SENT:
            ordered.remove(self._sent.popleft())
        own = first_s, until_bytes
        self._sent.append(own)
        insort(ordered, own)
        return found


class _Group:
    """The common values of a group's endpoints."""

    def __init__(self) -> None:
        self.tokens = _Tokens(NUM_OF_GROUP, _PER_FIT_OF_GROUP)
        self.endpoints: dict[EndpointState, _EndpointTokens] = {}
        self._latest_s = -inf
        self._variance = 0.0
        self._loads: dict[Load, deque[tuple[float, float]]] = {
            load: deque(maxlen=NUM_LOADS) for load in (Load.CACHED, Load.COLD)
        }
        self._levels: dict[Load, Level] = {}  # until one more is seen

    def set_endpoints(self, endpoints: Iterable[EndpointState]) -> None:
        """Replace the endpoints; new ones are taken for what the group is."""
        before, self.endpoints = self.endpoints, {}
        for pod in endpoints:
            own = before.get(pod) or _EndpointTokens()
            self.endpoints[pod] = own
            self.apply(pod)
        self.tokens.per_fit = max(_PER_FIT_OF_GROUP, len(self.endpoints))

    def record(
        self,
        pod: EndpointState,
        prompt: Point,
        alone: Point | None,
        behind: Point | None,
        *,
        at_s: float,
    ) -> None:
        """Record a first token without a load that came at `at_s`, as `_Tokens.record` has it."""
        own = self.endpoints[pod]
        # First tokens are reported when responses end.
        now = self._latest_s = max(self._latest_s, at_s)
        presumed = pod.flags.costs.prompt_s_per_byte
        is_time = own.record(prompt, alone, behind, now)
        if is_time:
            own.refit(now, presumed)
        if self.tokens.record(prompt, alone, behind, now):
            self.tokens.refit(now, presumed)
            self._variance = self._own_variance()
            for each in self.endpoints:
                self.apply(each)
        elif is_time:
            self.apply(pod)

    def _own_variance(self) -> float:
        """Return the variance of the endpoints' slopes beyond that of their errors."""
        return max(
            beyond([own.slope for own in self.endpoints.values()], self.tokens.slope),
            beyond([own.rate for own in self.endpoints.values()], self.tokens.rate),
        )

    def record_load(self, load: Load, seconds: float, unseen_s: float) -> None:
        """Record what a load took, and how much of it may be something else."""
        self._loads[load].append((seconds, unseen_s))
        self._levels.pop(load, None)

    def load_s(self, load: Load, presumed_s: float) -> tuple[float, float | None]:
        """Return what a load is taken to cost, and that if it is known."""
        if (found := self._levels.get(load)) is None:
            seen = self._loads[load]
            low_s, middle_s, high_s = level([seconds for seconds, _ in seen])
            unseen_s = level([unseen_s for _, unseen_s in seen]).middle_s
            found = self._levels[load] = Level(low_s - unseen_s, middle_s, high_s + unseen_s)
        low_s, middle_s, high_s = found
        is_known = high_s / MAX_ERROR_RATIO <= middle_s <= low_s * MAX_ERROR_RATIO
        is_presumed = not is_known and low_s <= presumed_s <= high_s
        load_s = presumed_s if is_presumed else middle_s
        if not is_presumed:
            load_s = min(max(load_s, MIN_LOAD_S), MAX_LOAD_S)
        return load_s, load_s if is_known else None

    @property
    def doubt(self) -> tuple[int, float] | None:
        """The presumed size of a CPU cache, and the time of a load from it, if that is as long as
        from disk: the cache may be smaller."""
        flags = next((pod.flags for pod in self.endpoints), None)
        if flags is None or flags.max_cpu_loras is None:
            return None
        cold_s, _ = self.load_s(Load.COLD, flags.costs.cold_load_s)
        _, cached_s = self.load_s(Load.CACHED, flags.costs.cached_load_s)
        if cached_s is None or cached_s <= cold_s / 2:
            return None
        return flags.max_cpu_loras, cached_s

    def apply(self, pod: EndpointState) -> None:
        """Let an endpoint have the costs that have been learned of it."""
        given = pod.flags.costs
        s_per_byte = given.prompt_s_per_byte
        presumed = _near(self.tokens.s_per_byte(s_per_byte, (_SPREAD * s_per_byte) ** 2), given)
        learned = _near(self.endpoints[pod].s_per_byte(presumed, self._variance), given)
        cold_s, known_cold_s = self.load_s(Load.COLD, given.cold_load_s)
        cached_s, known_cached_s = self.load_s(Load.CACHED, given.cached_load_s)
        decode = pod.reports.decoding.decode
        costs = Costs(learned, cold_s, cached_s, decode, known_cold_s, known_cached_s)
        if costs != pod.load.prompts.costs:
            pod.load.prompts.price(costs)
            pod.row.renew()


def _near(s_per_byte: float, given: Costs) -> float:
    """Return a cost of prompts within its bounds."""
    presumed = given.prompt_s_per_byte
    return min(max(s_per_byte, presumed / MAX_RATIO), presumed * MAX_RATIO)


class Speeds:
    """Learns what prompts and loads cost the endpoints of a pool, and lets them have it."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._warned_of: set[tuple[str, int]] = set()

    def set_endpoints(self, endpoints: Iterable[EndpointState]) -> None:
        """Replace the endpoints, or take note of other groups and configured costs.

        A group keeps its learned values while it has an endpoint.
        """
        before, self._groups = self._groups, {}
        members = defaultdict(list)
        for pod in endpoints:
            members[pod.group].append(pod)
        for name, group_endpoints in members.items():
            group = self._groups[name] = before.get(name) or _Group()
            group.set_endpoints(group_endpoints)

    def had_first_token(
        self, pod: EndpointState, probe: Probe, sent_at_s: float, ttft_s: float
    ) -> None:
        """Record how long an endpoint took for the first token of a pick; it may have left."""
        group = self._groups.get(pod.group)
        if group is None or pod not in group.endpoints:
            return
        num_bytes = probe.prompt_bytes
        first_s, until_bytes = sent_at_s + ttft_s, probe.before_bytes + num_bytes
        endpoint = group.endpoints[pod]
        since = endpoint.since(sent_at_s, first_s, until_bytes)
        alike = endpoint.rests[probe.is_behind]
        rest_s = ttft_s - num_bytes * pod.load.prompts.costs.prompt_s_per_byte
        if probe.load is _NO_LOAD:
            alike.append(rest_s)
            prompt = num_bytes, ttft_s
            alone = prompt if since is None and not probe.is_behind else None
            group.record(pod, prompt, alone, since, at_s=first_s)
        elif len(alike) >= MIN_ALIKE:
            base_s = max(0.0, sorted(alike)[len(alike) // 4])
            # What was sent at once after it is computed in the same step.
            num_after = pod.load.prompts.sent_by(sent_at_s + base_s) - until_bytes
            after_s = max(0, num_after) * pod.load.prompts.costs.prompt_s_per_byte
            unseen_s = UNSEEN_RATIO * base_s + after_s
            group.record_load(probe.load, rest_s - base_s - after_s, unseen_s)

    def take_news(self) -> Iterator[str]:
        """Yield a line for each group whose CPU caches seem smaller than configured, once a size.

        Larger ones are not seen: a load from them is too short to be told from a step.
        """
        for name, group in self._groups.items():
            if (doubt := group.doubt) is not None and (name, doubt[0]) not in self._warned_of:
                places, load_s = doubt
                self._warned_of.add((name, places))
                field = f"pods.{f'groups.{name}.' if name else ''}max_cpu_loras"
                yield (
                    f"adapters that should be in the pods' CPU caches take {load_s * 1e3:.0f} ms "
                    f"to load, as from disk. Is {field} ({places}) more than the pods' "
                    "--max-cpu-loras?"
                )
