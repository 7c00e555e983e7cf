"""What a router believes that loads and prompts cost, beside what they cost, after 300 requests of
clients that always have 16 under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from extproc.costs import BYTES_PER_TOKEN, DEFAULT, Costs
from extproc.lab.engine.profiles import H100_8B, EngineProfile
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.requests import Arrival
from extproc.lab.workload.running import FlightState
from extproc.routing.policies import LeastHarm, LeastPending, Policy
from tests.conftest import some
from tests.lab.lab import arrival, workload

NUM_REQUESTS, IN_FLIGHT, TICK_S = 300, 16, 0.004
ENGINE = replace(
    H100_8B,
    step_s=0.0075,
    step_per_decode_s=0.0006,
    step_per_kv_token_s=0.0,
    step_per_prefill_token_s=0.00008,
    lora_ratio=0.0,
    lora_per_adapter_ratio=0.0,
    max_num_seqs=4,
)
TRUE_S_PER_BYTE = ENGINE.step_per_prefill_token_s / BYTES_PER_TOKEN


def engine(cold_s: float, cached_s: float, num_sequences: int = 4) -> EngineProfile:
    return replace(
        ENGINE,
        disk_load_s=cold_s - cached_s,
        disk_load_per_rank_s=0.0,
        gpu_load_s=cached_s,
        gpu_load_per_rank_s=0.0,
        max_num_seqs=num_sequences,
    )


class _Clients:
    """Clients that ask again as soon as they have an answer, in a fleet's virtual time."""

    def __init__(self, rng: Random, spread_tokens: int, num_adapters: int) -> None:
        self.rng, self.spread_tokens = rng, spread_tokens
        self.adapters = [f"a{number}" for number in range(num_adapters)]

    def requests(self, fleet: Fleet) -> Iterator[Arrival]:
        weights = [1 / (place + 1) ** 0.9 for place in range(len(self.adapters))]
        for _ in range(NUM_REQUESTS):
            while _num_open(fleet) >= IN_FLIGHT:
                _pass(fleet)
            yield arrival(
                fleet.now,
                self.rng.choices(self.adapters, weights)[0],
                prompt_tokens=64 + self.rng.randrange(self.spread_tokens + 1),
                output_tokens=self.rng.randint(12, 20),
            )


def _num_open(fleet: Fleet) -> int:
    return sum(each.state is FlightState.RUNNING for each in fleet.flights.values())


def _pass(fleet: Fleet) -> None:
    """Let a moment pass, and see which responses have ended."""
    fleet._agenda.go_to(fleet.now + TICK_S)
    for pod in fleet.pods.values():
        pod.catch_up(fleet.now)
        fleet.routers[0].ended += pod.take_ended()


def beliefs(
    profile: EngineProfile,
    *,
    seed: int,
    spread_tokens: int = 4,
    num_adapters: int = 6,
    num_pods: int = 2,
    max_loras: int = 2,
    policy: type[Policy] = LeastHarm,
) -> list[Costs]:
    """Return what a router believes of each pod after the requests."""
    clients = _Clients(Random(seed), spread_tokens, num_adapters)
    settings = FleetSettings(
        num_pods=num_pods,
        profile=profile,
        max_loras=max_loras,
        max_cpu_loras=2 * max_loras,
        max_hold_s=60.0,
    )
    fleet = Fleet(settings, workload(adapters=clients.adapters), policy, seed=seed)
    object.__setattr__(fleet.workload, "arrivals", clients.requests(fleet))
    fleet.run()
    return [view.costs for view in fleet.routers[0].pool.snapshot(now=fleet.now).endpoints]


def is_right(believed_s: float | None, true_s: float) -> bool:
    return believed_s is None or true_s / 2 <= believed_s <= 2 * true_s


@pytest.mark.parametrize("seed", some(range(8), 3))
def test_a_load_of_a_millisecond_to_two_seconds_is_known_within_twice_or_unknown(seed: int) -> None:
    rng = Random(seed)
    cold_s = 10 ** rng.uniform(-3, 0.3)
    cached_s = max(0.001, cold_s * 10 ** rng.uniform(-3, 0))
    (costs, *_) = beliefs(
        engine(max(cold_s, cached_s), cached_s, rng.choice([4, 8, 64])),
        seed=seed,
        spread_tokens=rng.choice([0, 4, 200]),
        num_adapters=rng.choice([4, 6, 12]),
        num_pods=rng.choice([1, 2, 4]),
        max_loras=rng.choice([1, 2, 4]),
        policy=rng.choice([LeastHarm, LeastPending]),
    )

    assert is_right(costs.known_cold_load_s, max(cold_s, cached_s))
    assert is_right(costs.known_cached_load_s, cached_s)


@pytest.mark.parametrize(
    ("cold_s", "cached_s", "seed"),
    some([(0.111, 0.049, 0), (0.5, 0.1, 1), (1.0, 0.2, 2), (2.0, 0.5, 1)], 2),
)
def test_loads_that_are_clearly_longer_than_a_step_are_known_under_load(
    cold_s: float, cached_s: float, seed: int
) -> None:
    for costs in beliefs(engine(cold_s, cached_s), seed=seed):
        assert costs.known_cold_load_s == pytest.approx(cold_s, rel=0.3)
        assert costs.known_cached_load_s == pytest.approx(cached_s, rel=0.3)


@pytest.mark.parametrize("seed", some(range(2), 1))
def test_loads_shorter_than_a_step_are_taken_for_as_long_as_first_tokens_show_at_most(
    seed: int,
) -> None:
    for costs in beliefs(engine(0.0017, 0.0006), seed=seed):
        assert costs.known_cold_load_s is None
        assert costs.cold_load_s < DEFAULT.cold_load_s


@pytest.mark.parametrize("seed", some(range(2), 1))
def test_prompts_of_one_length_leave_their_cost_as_configured_under_load(seed: int) -> None:
    for costs in beliefs(engine(0.111, 0.049), seed=seed):
        assert costs.prompt_s_per_byte == DEFAULT.prompt_s_per_byte


@pytest.mark.parametrize("seed", some(range(2), 1))
def test_prompts_of_many_lengths_show_it_within_twice(seed: int) -> None:
    for costs in beliefs(engine(0.111, 0.049), seed=seed, spread_tokens=800):
        assert is_right(costs.prompt_s_per_byte, TRUE_S_PER_BYTE)
