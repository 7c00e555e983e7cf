"""What is sent, in blocks: of scenarios of suites, and of workloads for a fleet given by options.

A block is one scenario at one rate with one seed, or a slice of a workload. Every block is sent
to every target, and targets are compared block by block: differences between blocks cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.workloads import make
from extproc.lab.trials import suites
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import (
    PlanError,
    find_suite,
    in_fleet,
    make_trial_parts,
    parse_suite,
    slo_of,
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


def rotated(turns: Sequence[_T], number: int) -> list[_T]:
    """Return the order of the targets in block `number`: each begins as often as the others."""
    start = number % len(turns)
    return [*turns[start:], *turns[:start]]


# --- suites and workloads ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overrides:
    """The fleet and the objective of a workload, or in place of a suite's.

    Attributes:
        knobs: Fields of `FleetSettings`, each `KEY=VALUE`.
        profile: Name of an engine profile, "" for the suite's.
        slo: Fields of `SloSpec`; None leaves one unchanged.
    """

    knobs: Sequence[str] = ()
    profile: str = ""
    slo: Mapping[str, float | None] = field(default_factory=dict)

    def apply(self, suite: Suite) -> Suite:
        """Return the suite with these overrides.

        Raises:
            PlanError: A profile or a knob is unknown.
        """
        slo = {name: value for name, value in self.slo.items() if value is not None}
        profile = self.profile or suite.profile
        if profile not in PROFILES:
            raise PlanError(f"profile {profile}: allowed: {', '.join(PROFILES)}")
        return msgspec.structs.replace(
            suite,
            fleet={**suite.fleet, **self._knobs()},
            profile=profile,
            slo=msgspec.structs.replace(suite.slo, **slo),
        )

    def _knobs(self) -> dict[str, Any]:
        allowed = set(FleetSettings.__dataclass_fields__) - {"profile", "warm_up_s"}
        knobs: dict[str, Any] = {}
        for text in self.knobs:
            key, _, value = text.partition("=")
            if key not in allowed or not value:
                raise PlanError(f"fleet {text!r}: give KEY=VALUE; {', '.join(sorted(allowed))}")
            knobs[key] = yaml.safe_load(value)
        try:
            msgspec.convert(knobs, type=FleetSettings)
        except msgspec.ValidationError as error:
            raise PlanError(f"fleet: {error}") from error
        return knobs


NO_OVERRIDES = Overrides()


def read_suite(name: str, overrides: Overrides = NO_OVERRIDES) -> Suite:
    """Read a suite by its name or file.

    Raises:
        PlanError: There is none, or it cannot be used.
    """
    suite = suites.read_suite(name)
    if overrides == NO_OVERRIDES:
        return suite
    # Parsed again to check the overrides.
    return parse_suite(yaml.safe_dump(msgspec.to_builtins(overrides.apply(suite))))


def is_suite(name: str) -> bool:
    """Whether this is the name of a suite, or a path that may be one's."""
    try:
        return find_suite(name).suffix in (".yaml", ".yml")
    except PlanError:
        return Path(name).suffix in (".yaml", ".yml")


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
    return Block(scenario.name, rate_rps, seed, workload, settings, slo_of(suite), variants)


def workload_block(
    name: str,
    overrides: Overrides,
    *,
    rate_rps: float | None,
    num_requests: int | None,
    seed: int,
) -> Block:
    """Return a workload by its name or file (see `workloads.make`), for the overrides' fleet.

    Raises:
        PlanError: There is no such workload, or no such fleet.
    """
    empty = Suite(
        name="", about="", num_requests=1, seeds=[], rates_rps=[], policies=[], scenarios=[]
    )
    suite = overrides.apply(empty)
    try:
        settings = FleetSettings(**suite.fleet, profile=PROFILES[suite.profile])
        settings.profile.kv_blocks(settings.max_loras, settings.max_lora_rank)
    except (TypeError, ValueError) as error:
        raise PlanError(f"fleet: {error}") from error
    workload = make(name, rate_rps=rate_rps, num_requests=num_requests, seed=seed)
    settings = replace(settings, warm_up_s=WARM_UP * workload.duration_s)
    rate_rps = round(workload.rate_rps, 2) if rate_rps is None else rate_rps
    return Block(workload.name, rate_rps, seed, workload, settings, slo_of(suite))
