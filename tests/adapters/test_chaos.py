"""Ten virtual minutes of trouble: afterwards all is as declared, and no limit was exceeded.

`world.World` checks the limits at every call: one at once to a pod, four loads in the fleet, thirty
a minute on a pod with requests, nothing unloaded that nobody declared or that requests use.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.adapterstates import AdapterState
from extproc.adapters.declared import Declaration
from tests.adapters.world import FakePod, World, adapters, pods
from tests.conftest import some

TROUBLE_S = 600.0
SLOW_S = 100.0
"""Before the end: a load that is slow from then on would be trouble that lasts longer."""
CONVERGED_S = 30.0


class Chaos:
    """What goes wrong, by a seed."""

    def __init__(
        self, seed: int, *, num_planners: int, tells_process: bool, for_s: float = TROUBLE_S
    ) -> None:
        self.rng = Random(seed)
        fleet = pods(4, max_cpu_loras=16, process=1.0 if tells_process else None)
        fleet[0].models["own"] = "/own"
        self.world = World(
            fleet, num_planners=num_planners, lag_s=lambda: self.rng.choice((0.01, 0.05, 1.7))
        )
        self.versions = dict.fromkeys((each.name for each in adapters(12)), 0)
        self.end_s = self.world.now + for_s
        self.slow_until_s = self.end_s - SLOW_S
        self.declare()
        self.world.at(self.world.now + 5, self.trouble)
        self.world.at(self.world.now, self.requests)

    def declare(self) -> None:
        self.declared = [
            Declaration(
                name,
                f"/{name}/{version}",
                version=str(version) if version else "",
                min_replicas=1 + (name < "a2"),
            )
            for name, version in self.versions.items()
        ]
        self.world.declare(*self.declared)

    def requests(self) -> None:
        """Requests start and end, for the versions that are served then."""
        world, rng = self.world, self.rng
        for pod in world.pods.values():
            for name in list(pod.pending):
                if rng.random() < 0.5:
                    del pod.pending[name]
        told = {name: world.planner.holders(name) for name in self.versions}
        world.planner.forget_holders()
        for name in self.versions:
            assert world.planner.holders(name) == told[name], "as if looked for anew"
            served, holders = world.planner.serving(name), sorted(world.planner.holders(name))
            if served is not None and holders and rng.random() < 0.7:
                chosen = world.pods[rng.choice(holders)]
                if chosen.is_up:
                    chosen.pending[served] += 1
        world.at(world.now + 1, self.requests)

    def trouble(self) -> None:
        world, rng = self.world, self.rng
        pod = rng.choice(list(world.pods.values()))
        for_s = rng.uniform(1, 15)
        kinds = [self.kill, self.lie, self.lose, self.edit, self.change]
        if world.now < self.slow_until_s:
            kinds.append(self.slow)
        rng.choice(kinds)(pod, min(world.now + for_s, self.end_s))
        if world.now + 10 < self.end_s:
            world.at(world.now + rng.uniform(1, 10), self.trouble)

    def kill(self, pod: FakePod, until_s: float) -> None:
        if pod.is_up:
            self.world.kill(pod.address)
            self.world.at(until_s, lambda: self.world.start(pod.address))

    def lie(self, pod: FakePod, until_s: float) -> None:
        pod.lies = True
        self.world.at(until_s, lambda: setattr(pod, "lies", False))

    def slow(self, pod: FakePod, until_s: float) -> None:
        pod.load_s = self.rng.choice((5.0, 20.0, 70.0))
        self.world.at(until_s, lambda: setattr(pod, "load_s", 0.5))

    def lose(self, pod: FakePod, _until_s: float) -> None:
        pod.models = {name: root for name, root in pod.models.items() if name == "own"}

    def edit(self, _pod: FakePod, _until_s: float) -> None:
        name = self.rng.choice(list(self.versions) or ["a0"])
        self.versions[name] = max(0, self.versions.get(name, 0) + self.rng.choice((1, 1, -1)))
        self.declare()

    def change(self, _pod: FakePod, _until_s: float) -> None:
        name = self.rng.choice([each.name for each in adapters(12)])
        if self.versions.pop(name, None) is None:
            self.versions[name] = 0
        self.declare()

    def wrong(self) -> list[str]:
        """Return what is not as declared."""
        found, world = [], self.world
        for planner in world.planners:
            for each in self.declared:
                if planner.state(each.name) is not AdapterState.READY:
                    found.append(f"{each.name} is {planner.state(each.name)}")
                if planner.serving(each.name) != each.served_name:
                    found.append(f"{each.name} is served as {planner.serving(each.name)}")
        found += [
            f"{each.served_name} on {world.having(each.served_name)}"
            for each in self.declared
            if len(world.having(each.served_name)) < each.min_replicas
        ]
        names = {each.served_name: each.source for each in self.declared} | {"own": "/own"}
        for pod in world.pods.values():
            found += [
                f"{pod.address} has {name} from {root}"
                for name, root in pod.models.items()
                if names.get(name) != root and not pod.pending[name]
            ]
        return found


@pytest.mark.parametrize(
    ("seed", "num_planners", "tells_process"), some([(3, 2, True), (1, 1, False)], 1)
)
def test_thirty_seconds_after_the_last_trouble_all_is_as_declared(
    seed: int, num_planners: int, tells_process: bool
) -> None:
    chaos = Chaos(seed, num_planners=num_planners, tells_process=tells_process)
    chaos.world.run(TROUBLE_S)
    assert len(chaos.world.log) > 100

    took_s = chaos.world.until(lambda: not chaos.wrong(), CONVERGED_S)

    assert took_s <= CONVERGED_S
    assert chaos.world.pods["10.0.0.1:8000"].models["own"] == "/own"


@given(seed=st.integers(0, 2**32), num_planners=st.integers(1, 3), tells_process=st.booleans())
def test_after_any_trouble_all_is_as_declared(
    seed: int, num_planners: int, tells_process: bool
) -> None:
    chaos = Chaos(seed, num_planners=num_planners, tells_process=tells_process, for_s=60.0)
    chaos.world.run(60.0)

    chaos.world.until(lambda: not chaos.wrong(), CONVERGED_S)
