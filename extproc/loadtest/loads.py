"""The loads that can be sent: scenarios of suites, and workloads for a fleet given by options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.loadtest.blocks import WARM_UP, Block, PlanError
from extproc.loadtest.workloads import WorkloadError, make
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.fleet.settings import FleetSettings
from extproc.sim.trials import suites
from extproc.sim.trials.specs import ScenarioSpec, Suite
from extproc.sim.trials.suites import (
    SuiteError,
    find_suite,
    in_fleet,
    make_trial_parts,
    parse_suite,
    slo_of,
)


@dataclass(frozen=True, slots=True)
class Overrides:
    """The fleet and the objective of a workload, or in place of a suite's.

    Attributes:
        knobs: Fields of `FleetSettings`, each `KEY=VALUE`.
        profile: Name of an engine profile, "" for the suite's.
        slo_ttft_s: Of `SloSpec`; None leaves it unchanged.
        slo_tpot_s: The same.
    """

    knobs: Sequence[str] = ()
    profile: str = ""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    def apply(self, suite: Suite) -> Suite:
        """Return the suite with these overrides.

        Raises:
            PlanError: A profile or a knob is unknown.
        """
        given = {"ttft_s": self.slo_ttft_s, "tpot_s": self.slo_tpot_s}
        slo = {key: value for key, value in given.items() if value is not None}
        return msgspec.structs.replace(
            suite,
            fleet={**suite.fleet, **self._knobs()},
            profile=self._profile(suite.profile),
            slo=msgspec.structs.replace(suite.slo, **slo),
        )

    def _profile(self, name: str) -> str:
        if (self.profile or name) not in PROFILES:
            raise PlanError(f"profile {self.profile}: allowed: {', '.join(PROFILES)}")
        return self.profile or name

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
    try:
        suite = suites.read_suite(name)
        if overrides == Overrides():
            return suite
        # Parsed again to check the overrides.
        return parse_suite(yaml.safe_dump(msgspec.to_builtins(overrides.apply(suite))))
    except SuiteError as error:
        raise PlanError(str(error)) from error


def workload_block(
    name: str,
    overrides: Overrides,
    *,
    rate_rps: float | None,
    num_requests: int | None,
    seed: int,
) -> Block:
    """Return a workload by its name or file (see `workloads.make`), for the overrides' fleet.

    None leaves its own rate and number.

    Raises:
        PlanError: There is no such workload or fleet.
    """
    empty = Suite(
        name="", about="", num_requests=1, seeds=[], rates_rps=[], policies=[], scenarios=[]
    )
    suite = overrides.apply(empty)
    try:
        settings = FleetSettings(**suite.fleet, profile=PROFILES[suite.profile])
        settings.profile.kv_blocks(settings.max_loras, settings.max_lora_rank)
        workload = make(name, rate_rps=rate_rps, num_requests=num_requests, seed=seed)
    except WorkloadError as error:
        raise PlanError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise PlanError(f"fleet: {error}") from error
    settings = replace(settings, warm_up_s=WARM_UP * workload.duration_s)
    rate_rps = round(workload.rate_rps, 2) if rate_rps is None else rate_rps
    return Block(workload.name, rate_rps, seed, workload, settings, slo_of(suite))


def is_suite(name: str) -> bool:
    """Whether this is the name of a suite, or a path that may be one's."""
    try:
        return find_suite(name).suffix in (".yaml", ".yml")
    except SuiteError:
        return Path(name).suffix in (".yaml", ".yml")


def scenarios_of(suite: Suite, names: Sequence[str]) -> list[ScenarioSpec]:
    """Return some of a suite's scenarios; all if none is named.

    Raises:
        PlanError: One is unknown.
    """
    by_name = {scenario.name: scenario for scenario in suite.scenarios}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join(by_name)
        raise PlanError(f"suite {suite.name} has no scenario {', '.join(unknown)}: {known}")
    return [by_name[name] for name in names or by_name]


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
        _suite_block(suite, scenario, rate_rps, seed)
        for scenario in scenarios
        for seed in seeds or suite.seeds
        for rate_rps in rates_rps or suite.rates_of(scenario)
    ]


def _suite_block(suite: Suite, scenario: ScenarioSpec, rate_rps: float, seed: int) -> Block:
    try:
        settings, workload, events = make_trial_parts(suite, scenario, rate_rps=rate_rps, seed=seed)
    except SuiteError as error:
        raise PlanError(str(error)) from error
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
