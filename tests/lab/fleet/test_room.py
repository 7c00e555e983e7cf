"""Whatever an engine is short of, requests wait in the router and not in it, and it stays busy."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from extproc.lab.engine.profiles import A100_8B
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FlightState
from extproc.learned.concurrency import SPARE, EndpointRoom
from extproc.routing.policies import LeastHarm
from tests.lab.lab import arrival, workload

SETTLED_S = 2.0
"""From then on the engines are full."""
LOOK_S = 0.02
NUM_PODS = 2
SEEDS = 1, 2, 3
MAX_LORAS = 2
LATE = {"scrape_interval_s": 0.05, "scrape_delay_s": 0.005, "completion_flush_s": 0.05}
LIMITS: dict[str, Any] = {
    "sequences": (
        300,
        {"max_num_seqs": 8},
        {"rate_rps": 60, "prompt": (20, 60), "output": (10, 40)},
    ),
    "tokens of a step": (
        60,
        {"max_num_batched_tokens": 512},
        {"rate_rps": 14, "prompt": (1500, 3000), "output": (10, 40)},
    ),
    "KV blocks": (
        120,
        {"kv_capacity_tokens": 16_000},
        {"rate_rps": 16, "prompt": (500, 1500), "output": (50, 200)},
    ),
    "slots": (
        300,
        {},
        {"rate_rps": 60, "prompt": (20, 60), "output": (10, 40), "num_adapters": 12},
    ),
}
"""What engines are short of: how many requests, the profile, and the requests, about one and a half
times what two engines can do."""


def requests(
    num: int,
    *,
    rate_rps: float,
    prompt: tuple[int, int],
    output: tuple[int, int],
    num_adapters: int = 0,
    seed: int = 1,
) -> Workload:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    names = [f"a{number}" for number in range(num_adapters)]
    for _ in range(num):
        at_s += rng.expovariate(rate_rps)
        name = rng.choice(names) if names else None
        lengths = {"prompt_tokens": rng.randint(*prompt), "output_tokens": rng.randint(*output)}
        arrivals.append(arrival(at_s, name, **lengths))
    return workload(*arrivals, adapters=names)


class Watched:
    """A run, and what waited in its engines while requests came: but for a slot, and all."""

    def __init__(self, work: Workload, profile: dict[str, Any], **settings: Any) -> None:
        sizes = {"num_pods": NUM_PODS, "max_loras": MAX_LORAS, "max_cpu_loras": 16}
        patience = {"max_hold_s": 600.0, "drain_s": 600.0}
        fleet = FleetSettings(
            profile=replace(A100_8B, **profile), **{**sizes, **patience, **LATE, **settings}
        )
        self._fleet = Fleet(fleet, work, LeastHarm, seed=1)
        self._last_s = work.arrivals[-1].at_s
        self.waiting: list[int] = []
        self.deferred: list[int] = []
        self._fleet._agenda.at(SETTLED_S, self._look)
        flights = self._fleet.run().flights
        ends_s = [flight.ended_s for flight in flights if flight.state is FlightState.FINISHED]
        assert len(ends_s) == len(flights)
        self.last_end_s = max(end_s for end_s in ends_s if end_s is not None)

    def _look(self) -> None:
        for pod in self._fleet.pods.values():
            pod.poll(self._fleet.now)
            stats = pod.engine.report(now=self._fleet.now).stats
            self.waiting.append(stats.num_waiting - stats.num_deferred)
            self.deferred.append(stats.num_deferred)
        if self._fleet.now < self._last_s:
            self._fleet._agenda.after(LOOK_S, self._look)


@pytest.mark.parametrize("limit", LIMITS)
def test_few_wait_in_an_engine_whatever_it_is_short_of(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, profile, shape = LIMITS[limit]
    # Of all seeds, as the last responses of one may be long ones.
    num_held = num_unheld = held_s = unheld_s = 0.0
    for seed in SEEDS:
        work = requests(num, **shape, seed=seed)
        held = Watched(work, profile)
        ends_per_s = len(work.arrivals) / held.last_end_s / NUM_PODS
        num_late = max(1.0, ends_per_s * LATE["scrape_interval_s"])
        assert max(held.waiting) <= SPARE + 3 * num_late  # ends are heard of two reports late
        assert sum(held.waiting) / len(held.waiting) <= SPARE + 1.5 * num_late
        assert max(held.deferred) <= 1

        with monkeypatch.context() as patch:
            patch.setattr(EndpointRoom, "places", lambda *_args, **_more: (inf, 0))
            patch.setattr(EndpointRoom, "is_open", lambda *_args, **_more: True)
            unheld = Watched(work, profile)
        num_held = max(num_held, *held.waiting)
        num_unheld = max(num_unheld, *unheld.waiting)
        held_s, unheld_s = held_s + held.last_end_s, unheld_s + unheld.last_end_s
    assert limit == "slots" or num_unheld > 3 * num_held
    assert held_s <= unheld_s / 0.98
