"""The loads that can be sent: scenarios of suites, and workloads for a fleet given by options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.blocks import WARM_UP, Block
from extproc.lab.loadtest.workloads import make
from extproc.lab.trials import suites
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import (
    PlanError,
    find_suite,
    in_fleet,
    make_trial_parts,
    parse_suite,
    scenarios_of,
    slo_of,
    with_workload,
)
from extproc.lab.workload.judge import Slo


@dataclass(frozen=True, slots=True)
class SuiteLoad:
    """A scenario of a suite."""

    suite: Suite
    scenario: ScenarioSpec

    def block(self, *, rate_rps: float, num_requests: int | None, seed: int) -> Block:
        """Return a block of about `num_requests`; None for the load's own number.

        Raises:
            PlanError: There is no such block.
        """
        scenario = with_workload(self.scenario, num_requests=num_requests)
        settings, workload, events = make_trial_parts(
            self.suite, scenario, rate_rps=rate_rps, seed=seed
        )
        if events:
            kinds = ", ".join(sorted({type(event).__name__ for event in events}))
            raise PlanError(f"scenario {self.scenario.name}: {kinds}: in virtual time only")
        variants = {
            variant.label: make_trial_parts(
                self.suite, in_fleet(scenario, variant.fleet), rate_rps=rate_rps, seed=seed
            )[0]
            for variant in self.suite.variants
        }
        slo = slo_of(self.suite)
        return Block(self.scenario.name, rate_rps, seed, workload, settings, slo, variants)


@dataclass(frozen=True, slots=True)
class WorkloadLoad:
    """A workload by its name or file (see `workloads.make`), for a fleet given by options."""

    name: str
    settings: FleetSettings
    slo: Slo

    def block(self, *, rate_rps: float | None, num_requests: int | None, seed: int) -> Block:
        """See `SuiteLoad`; the default rate is the workload's own."""
        workload = make(self.name, rate_rps=rate_rps, num_requests=num_requests, seed=seed)
        settings = replace(self.settings, warm_up_s=WARM_UP * workload.duration_s)
        rate_rps = round(workload.rate_rps, 2) if rate_rps is None else rate_rps
        return Block(workload.name, rate_rps, seed, workload, settings, self.slo)


Load = SuiteLoad | WorkloadLoad
"""Makes blocks of one kind at any rate."""


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
    slo: tuple[float | None, float | None, float | None] = (None, None, None)

    def apply(self, suite: Suite) -> Suite:
        """Return the suite with these overrides.

        Raises:
            PlanError: A profile or a knob is unknown.
        """
        names = ("ttft_s", "tpot_s", "target")
        slo = {k: v for k, v in zip(names, self.slo, strict=True) if v is not None}
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


def find_load(name: str, overrides: Overrides = NO_OVERRIDES) -> Load:
    """Return a load by its name: `SUITE/SCENARIO`, a suite for its first scenario, or a workload.

    Raises:
        PlanError: There is none, or it cannot be used.
    """
    if is_suite(name):
        suite = read_suite(name, overrides)
        return SuiteLoad(suite, suite.scenarios[0])
    suite_name, _, scenario_name = name.rpartition("/")
    if suite_name and is_suite(suite_name):
        suite = read_suite(suite_name, overrides)
        return SuiteLoad(suite, scenarios_of(suite, [scenario_name])[0])
    return workload_load(name, overrides)


def workload_load(name: str, overrides: Overrides) -> WorkloadLoad:
    """Return a workload by its name, for the fleet of the overrides.

    Raises:
        PlanError: There is no such fleet.
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
    return WorkloadLoad(name, settings, slo_of(suite))


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
        SuiteLoad(suite, scenario).block(rate_rps=rate_rps, num_requests=None, seed=seed)
        for scenario in scenarios
        for seed in seeds or suite.seeds
        for rate_rps in rates_rps or suite.rates_of(scenario)
    ]
