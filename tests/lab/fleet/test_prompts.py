"""Overload by prompts: what is held at the router while pods compute as fast as they can."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from extproc.costs import BYTES_PER_TOKEN, Costs
from extproc.lab.engine.profiles import A100_8B
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.pods.serverflags import PoolSettings
from extproc.routing.policies import LeastHarm
from tests.lab.lab import arrival, workload

TRUE_TOKENS_PER_S = 1 / A100_8B.step_per_prefill_token_s
LOOK_S = 0.05
"""As often as pods are scraped."""
MAX_HELD = 8
LEARNED_BY_S, UNTIL_S = 20.0, 30.0


@dataclass
class Look:
    """What a router has and takes its pods for at one moment, a value for each pod."""

    at_s: float
    num_held: int
    num_running: list[int]
    num_there: list[int]
    tokens_per_s: list[float]


def overload(configured_tokens_per_s: float) -> list[Look]:
    """Prompts of 24 kB at twice what two pods compute, with a speed that is configured."""
    rng, at_s, requests = Random(2), 0.0, []
    while at_s < UNTIL_S:
        at_s += rng.expovariate(8.0)
        tokens = 6000 + rng.randrange(32)
        requests.append(arrival(at_s, None, prompt_tokens=tokens, output_tokens=10))
    settings = FleetSettings(num_pods=2, profile=A100_8B, max_hold_s=60.0, drain_s=0.0)
    fleet = Fleet(settings, workload(*requests), LeastHarm, seed=1)
    (router,) = fleet.routers
    costs = Costs(1 / (configured_tokens_per_s * BYTES_PER_TOKEN))
    router.pool.configure(PoolSettings(costs=costs))
    looks = []

    def look() -> None:
        views = router.pool.snapshot(now=fleet.now).endpoints
        speeds = [1 / (view.costs.prompt_s_per_byte * BYTES_PER_TOKEN) for view in views]
        running = [view.num_running for view in views]
        there = [len(pod.flights) for pod in fleet.pods.values()]
        looks.append(Look(fleet.now, len(router.router.queue), running, there, speeds))
        fleet._agenda.after(LOOK_S, look)

    fleet._agenda.at(LOOK_S, look)
    fleet.run()
    return looks


@pytest.mark.parametrize("configured_tokens_per_s", [24_000, 12_000])
def test_pods_are_never_idle_beside_a_queue_and_their_speed_is_learned(
    configured_tokens_per_s: float,
) -> None:
    looks = overload(configured_tokens_per_s)
    starved = [look for look in looks if look.num_held > MAX_HELD and min(look.num_running) < 2]
    assert max(look.num_held for look in looks) > 10 * MAX_HELD
    assert starved == []
    assert max(max(look.num_there) for look in looks) <= 12  # what waits does so at the router

    idle = [look.num_held > 0 and min(look.num_there) == 0 for look in looks]
    assert not any(all(idle[at : at + 3]) for at in range(len(idle)))  # no longer than two reports

    speeds = [speed for look in looks if look.at_s >= LEARNED_BY_S for speed in look.tokens_per_s]
    assert max(speeds) < 1.5 * TRUE_TOKENS_PER_S
    assert min(speeds) > TRUE_TOKENS_PER_S / 1.5
