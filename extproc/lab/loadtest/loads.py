"""The load, in blocks: of scenarios of suites, and of workloads for a fleet given by options.

A block is one scenario at one rate with one seed, or a slice of a workload. Every block is sent
to every target, and targets are compared block by block: differences between blocks cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from typing import Any, TypeVar

import msgspec

from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.workloads import make
from extproc.lab.trials.runplan import changed
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import (
    SCENARIOS_DIR,
    PlanError,
    in_fleet,
    make_settings,
    make_trial_parts,
)
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Workload

WARM_UP = 0.15
"""Share of a slice of a workload that does not count; also the default of suites."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Block:
    """One load that is sent to every target.

    Attributes:
        rate_rps: The nominal rate.
        settings: The fleet of targets that are started here, and the warm-up.
        variants: Other fleets, by the labels of the targets that have them.
    """

    scenario: str
    rate_rps: float
    seed: int
    workload: Workload
    settings: FleetSettings
    slo: Slo
    variants: Mapping[str, FleetSettings] = field(default_factory=dict)

    def settings_of(self, label: str) -> FleetSettings:
        """Return the fleet of a target."""
        return self.variants.get(label, self.settings)

    @property
    def name(self) -> str:
        """The block's name for people."""
        return f"{self.scenario} at {self.rate_rps:g}/s, seed {self.seed}"

    @property
    def num_counted(self) -> int:
        """The number of requests after the warm-up."""
        arrivals = self.workload.arrivals
        return sum(arrival.at_s >= self.settings.warm_up_s for arrival in arrivals)


def sliced(block: Block, num_slices: int) -> list[Block]:
    """Cut a block into slices of the same length, each with a warm-up of its own.

    Raises:
        PlanError: A slice would have no request that counts.
    """
    workload, width_s = block.workload, block.workload.duration_s / num_slices
    settings = replace(block.settings, warm_up_s=WARM_UP * width_s)
    slices = []
    for number in range(num_slices):
        end_s = inf if number == num_slices - 1 else (number + 1) * width_s
        part = workload.window(number * width_s, end_s)
        name = f"{block.scenario} {number + 1}/{num_slices}"
        slices.append(replace(block, scenario=name, workload=part, settings=settings))
    if any(part.num_counted < 1 for part in slices):
        raise PlanError(f"{num_slices} slices are too many for {len(workload.arrivals)} requests")
    return slices


def by_fleet(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group consecutive blocks that can use the same running fleet."""

    def fleet(block: Block) -> object:
        workload = block.workload
        return replace(block.settings, warm_up_s=0.0), workload.adapters, workload.tenants

    return [list(group) for _, group in groupby(blocks, key=fleet)]


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """Return the order of the targets in block `number`: each begins equally often."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


# --- suites and workloads ---------------------------------------------------------------------


def overridden(
    suite: Suite, fleet: Mapping[str, Any], profile: str, slo: Mapping[str, float | None]
) -> Suite:
    """Return the suite with other fields of its fleets, another engine and another objective.

    Args:
        suite: The suite.
        fleet: Fields of `FleetSettings`.
        profile: Name of an engine profile, "" for the suite's.
        slo: Fields of `Slo`; None leaves one unchanged.

    Raises:
        PlanError: A profile or a field is unknown, or impossible.
    """
    if profile and profile not in PROFILES:
        raise PlanError(f"profile {profile}: allowed: {', '.join(PROFILES)}")
    given = {name: value for name, value in slo.items() if value is not None}
    suite = msgspec.structs.replace(
        suite,
        fleet={**suite.fleet, **fleet},
        profile=profile or suite.profile,
        slo=msgspec.structs.replace(suite.slo, **given),
    )
    return changed(suite, fleet, {})


def is_suite(name: str) -> bool:
    """Whether this is the name of a suite, or a path that may be one's."""
    return (SCENARIOS_DIR / f"{name}.yaml").is_file() or name.endswith((".yaml", ".yml"))


def plan_suite(
    suite: Suite,
    scenarios: Sequence[ScenarioSpec],
    *,
    rates_rps: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> list[Block]:
    """Return every scenario at every rate with every seed; one fleet's blocks are consecutive.

    Rates and seeds replace the suite's.

    Raises:
        PlanError: A block cannot be made.
    """
    return [
        _block(suite, scenario, rate_rps, seed)
        for scenario in scenarios
        for seed in seeds or suite.seeds
        for rate_rps in rates_rps or suite.rates_of(scenario)
    ]


def _block(suite: Suite, scenario: ScenarioSpec, rate_rps: float, seed: int) -> Block:
    settings, workload, events = make_trial_parts(suite, scenario, rate_rps=rate_rps, seed=seed)
    if events:
        kinds = ", ".join(sorted({type(event).__name__ for event in events}))
        raise PlanError(f"scenario {scenario.name}: {kinds}: in virtual time only")
    variants = {
        variant.label: make_trial_parts(
            suite, in_fleet(scenario, variant.fleet), rate_rps=rate_rps, seed=seed
        )[0]
        for variant in suite.variants
    }
    return Block(scenario.name, rate_rps, seed, workload, settings, suite.slo, variants)


def workload_block(
    suite: Suite, name: str, *, rate_rps: float | None, num_requests: int | None, seed: int
) -> Block:
    """Return a workload by its name or file (see `workloads.make`), for the suite's fleet.

    Raises:
        PlanError: There is no such workload, or the fleet cannot have it.
    """
    workload = make(name, rate_rps=rate_rps, num_requests=num_requests, seed=seed)
    settings = make_settings(suite, ScenarioSpec(name=name), workload)
    rate_rps = round(workload.rate_rps, 2) if rate_rps is None else rate_rps
    return Block(workload.name, rate_rps, seed, workload, settings, suite.slo)
