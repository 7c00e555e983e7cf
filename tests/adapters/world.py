"""Pods in virtual time, and planners that keep their adapters.

A pod answers calls after a while, lists its models when it is asked, and may be killed, lie, be
slow or lose what it has. Every limit that a planner has to keep is checked at every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from extproc.adapters.adapterstates import (
    Action,
    AdapterSettings,
    AdapterState,
    AdapterStatus,
    CallKind,
    Failure,
    Result,
)
from extproc.adapters.declared import Declaration
from extproc.adapters.planner import Planner, unsafe, without_effect
from extproc.pods.podstate import PodState
from extproc.types import ModelCard

BASE = "base"
SETTINGS = AdapterSettings()
MAX_WATCHED = 50
"""Adapters whose versions are followed, to know when each served last."""


@dataclass
class FakePod:
    """One pod as it really is.

    Attributes:
        models: Adapters that it lists: their roots.
        broken: What loads of these paths come to.
        lies: It says yes, and does nothing.
        without_effect: Paths of adapters that have none here.
        check_s: How long a check takes.
        checks: What checks come to; by default, what is so.
        pending: Requests by served name.
        loads: When they began, of those that did while it had requests.
    """

    address: str
    max_loras: int | None = 8
    max_cpu_loras: int | None = 8
    max_rank: int | None = None
    load_s: float = 0.5
    models: dict[str, str] = field(default_factory=dict)
    base: str = BASE
    pools: frozenset[str] = frozenset()
    broken: dict[str, Result] = field(default_factory=dict)
    lies: bool = False
    without_effect: set[str] = field(default_factory=set)
    check_s: float = 0.1
    checks: Result | None = None
    is_up: bool = True
    is_resolver: bool = False
    pending: Counter[str] = field(default_factory=Counter)
    num_base: int = 0
    process: float | None = 1.0
    unsafe_version: str = ""
    loads: list[float] = field(default_factory=list)
    generation: int = 0

    def call(self, action: Action) -> Result:
        """Do what is asked, as the engine does."""
        if action.kind is CallKind.UNLOAD:
            if not self.lies:
                self.models.pop(action.name, None)
            return Result()
        if action.kind is CallKind.CHECK:
            if self.checks is not None:
                return self.checks
            root = self.models.get(action.name, action.name if self.is_resolver else None)
            if root is None:
                return Result(Failure.UNCHECKED, "no such model")
            return Result(Failure.NO_EFFECT if root in self.without_effect else None)
        if action.path in self.broken:
            return self.broken[action.path]
        if action.name in self.models:
            return Result(Failure.REFUSED, "has already been loaded")
        if not self.lies:
            self.models[action.name] = action.path
        return Result()

    def listing(self) -> dict[str, ModelCard]:
        cards = {self.base: ModelCard(self.base, None, f"/models/{self.base}")}
        for name, root in self.models.items():
            cards[name] = ModelCard(name, self.base, root)
        return cards


class World:
    """Pods and planners.

    Attributes:
        now: Virtual seconds.
        log: All calls, with their times.
        static: What pods have by themselves, by address: never to be unloaded.
    """

    def __init__(
        self,
        pods: Iterable[FakePod],
        *,
        num_planners: int = 1,
        settings: AdapterSettings = SETTINGS,
        poll_s: float = 1.0,
        lag_s: Callable[[], float] = lambda: 0.02,
    ) -> None:
        self.pods = {pod.address: pod for pod in pods}
        self.now = 1000.0
        self.settings = settings
        self.planners = [Planner(settings) for _ in range(num_planners)]
        self.views: list[dict[str, tuple[float, Mapping[str, ModelCard]]]] = [
            {} for _ in self.planners
        ]
        self.leading = set(range(num_planners))
        self.led = set[int]()
        self.log: list[tuple[float, Action]] = []
        self.demand: dict[str, float] = {}
        self.names: list[str] = []
        self.held: list[str] = []
        self.static = {pod.address: dict(pod.models) for pod in self.pods.values()}
        self.served_at: dict[str, float] = {}
        self._lag_s, self._poll_s = lag_s, poll_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._in_flight: list[set[str]] = [set() for _ in self.planners]
        self._loading: list[int] = [0 for _ in self.planners]
        for number in range(num_planners):
            self.at(self.now + 0.1 * number, partial(self._poll, number))

    # --- time -------------------------------------------------------------------------------

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._numbers), event))

    def run(self, for_s: float) -> None:
        end_s = self.now + for_s
        while self._events and self._events[0][0] <= end_s:
            self.now, _, event = heappop(self._events)
            event()
        self.now = end_s

    def until(self, holds: Callable[[], bool], most_s: float) -> float:
        """Run until something holds; return how long that took."""
        start_s = self.now
        while not holds():
            assert self.now - start_s < most_s, "it never happened"
            self.run(0.25)
        return self.now - start_s

    # --- what planners see ------------------------------------------------------------------

    def _poll(self, number: int) -> None:
        for pod in self.pods.values():
            self._list(number, pod)
        self.at(self.now + self._poll_s, lambda: self._poll(number))
        self.tick(number)

    def _list(self, number: int, pod: FakePod) -> None:
        """Ask a pod for its models; the answer takes a while, and may overtake others."""
        if not pod.is_up:
            return
        asked_at_s, listing, generation = self.now, pod.listing(), pod.generation

        def arrive() -> None:
            if pod.is_up and pod.generation == generation:
                before = self.views[number].get(pod.address)
                same = before is not None and before[1] == listing
                models = before[1] if before is not None and same else listing
                self.views[number][pod.address] = asked_at_s, models
                self.tick(number)

        self.at(self.now + self._lag_s(), arrive)

    def states(self, number: int = 0) -> list[PodState]:
        states = []
        for pod in self.pods.values():
            asked_at_s, models = self.views[number].get(pod.address, (float("-inf"), None))
            states.append(
                PodState(
                    pod.address,
                    pod.is_up,
                    models,
                    asked_at_s,
                    pod.max_loras,
                    pod.max_cpu_loras,
                    pod.max_rank,
                    pod.num_base + pod.pending.total(),
                    {name: num for name, num in pod.pending.items() if num},
                    pod.process,
                    pod.is_resolver,
                    pod.pools,
                    pod.unsafe_version,
                )
            )
        return states

    def tick(self, number: int = 0) -> None:
        planner = self.planners[number]
        actions = planner.tick(
            self.states(number),
            self.demand,
            self.held,
            now=self.now,
            is_leading=number in self.leading,
            is_led=number in self.led,
        )
        assert (+planner.num_by_state, planner.failures()) == counted(planner)
        for name in self.names:
            self.served_at[planner.serving(name) or ""] = self.now
        for action in actions:
            self._start(number, action)

    # --- calls ------------------------------------------------------------------------------

    def _start(self, number: int, action: Action) -> None:
        pod = self.pods[action.address]
        self.log.append((self.now, action))
        self._check(number, action, pod)
        assert bool(action.path) is (action.kind is CallKind.LOAD)
        self._in_flight[number].add(action.address)
        is_load = action.kind is CallKind.LOAD
        self._loading[number] += is_load
        if is_load and pod.num_base + pod.pending.total():
            pod.loads.append(self.now)
        is_check = action.kind is CallKind.CHECK
        generation, takes_s = pod.generation, pod.load_s if is_load else 0.01
        takes_s = pod.check_s if is_check else takes_s
        takes_s = takes_s if pod.is_up else 0.1

        def work() -> None:
            if pod.is_up and pod.generation == generation:
                result = pod.call(action)
            else:
                result = Result(Failure.UNREACHABLE, "connection refused")
            if takes_s <= action.timeout_s:
                end(result)

        def end(result: Result) -> None:
            self._in_flight[number].discard(action.address)
            self._loading[number] -= is_load
            self.planners[number].finished(action, result, now=self.now)
            self._list(number, pod)
            self.tick(number)

        self.at(self.now + takes_s, work)
        if takes_s > action.timeout_s:
            late = Result(Failure.TIMEOUT, "no answer")
            self.at(self.now + action.timeout_s, lambda: end(late))

    def _check(self, number: int, action: Action, pod: FakePod) -> None:
        """Check every limit and promise that a call could break."""
        assert action.address not in self._in_flight[number], "two calls at once to one pod"
        if action.kind is CallKind.LOAD:
            assert self._loading[number] < self.settings.max_loads, "too many loads in the fleet"
            recent = [s for s in pod.loads if s > self.now - 60 + 1e-6]
            is_serving = pod.num_base + pod.pending.total()
            most = self.settings.max_loads_per_minute * len(self.planners)
            assert not is_serving or len(recent) < most, "too many loads a minute"
            return
        if action.kind is CallKind.CHECK:
            return
        assert action.name not in self.static[action.address], "unloaded what nobody declared"
        if pod.pending[action.name]:
            since_s = self.served_at.get(action.name, self.now)
            assert self.now - since_s >= self.settings.drain_s, "unloaded under requests"

    # --- what people do ---------------------------------------------------------------------

    def declared(self, *declarations: Declaration, for_s: float) -> World:
        """The world after these have been declared for a while."""
        self.declare(*declarations)
        self.run(for_s)
        return self

    def declare(self, *declarations: Declaration) -> None:
        self.names = [each.name for each in declarations][:MAX_WATCHED]
        for planner in self.planners:
            planner.declare(declarations, now=self.now)
        for number in range(len(self.planners)):
            self.tick(number)

    def kill(self, address: str) -> None:
        pod = self.pods[address]
        pod.is_up, pod.models, pod.generation = False, {}, pod.generation + 1
        pod.pending.clear()
        for view in self.views:
            view.pop(address, None)

    def start(self, address: str) -> None:
        pod = self.pods[address]
        pod.is_up, pod.models = True, dict(self.static[address])
        pod.process = None if pod.process is None else self.now

    def having(self, served: str) -> list[str]:
        return [pod.address for pod in self.pods.values() if served in pod.models]

    def loads_of(self, served: str) -> int:
        return sum(action.kind is CallKind.LOAD and action.name == served for _, action in self.log)

    @property
    def planner(self) -> Planner:
        return self.planners[0]

    def state(self, name: str) -> AdapterState:
        return self.planner.state(name)

    def status(self, name: str) -> AdapterStatus:
        status = self.planner.status(name)
        assert status is not None
        return status


def pods(num: int, **fields: object) -> list[FakePod]:
    return [FakePod(f"10.0.0.{number}:8000", **fields) for number in range(1, num + 1)]  # type: ignore[arg-type]


def adapters(num: int, **fields: object) -> list[Declaration]:
    return [
        Declaration(f"a{number}", f"/adapters/a{number}", **fields)  # type: ignore[arg-type]
        for number in range(num)
    ]


def counted(
    planner: Planner,
) -> tuple[Mapping[AdapterState, int], Mapping[tuple[str, Failure], int]]:
    """Return how many there are, counted one by one."""
    failures = Counter(
        (address, each.failure)
        for address, attempts in planner.fleet.attempts._by_address.items()
        for each in attempts.values()
    )
    for kept in planner.kept.values():
        failures.update((address, Failure.UNSAFE_VERSION) for address in unsafe(planner, kept))
        failures.update((address, Failure.NO_EFFECT) for address in without_effect(planner, kept))
    return Counter(status.state for status in planner.statuses()), failures
