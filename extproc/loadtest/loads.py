"""What can be sent: scenarios of suites, and workloads for a fleet that is said beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import yaml

from extproc.loadtest.blocks import WARM_UP, Block, PlanError
from extproc.loadtest.workloads import WorkloadError, make
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.fleet.settings import FleetSettings
from extproc.sim.trials import suites
from extproc.sim.trials.suites import (
    ScenarioSpec,
    Suite,
    SuiteError,
    find_suite,
    make_trial_parts,
    parse_suite,
    slo_of,
)
from extproc.workload.judge import Slo


class Load(Protocol):
    """Makes blocks of one kind at any rate."""

    def block(self, *, rate_rps: float, num_requests: int | None, seed: int) -> Block:
        """One of about `num_requests`; None for what its name comes with.

        Raises:
            PlanError: It cannot be made so.
        """
        ...


@dataclass(frozen=True, slots=True)
class SuiteLoad:
    """A scenario of a suite."""

    suite: Suite
    scenario: ScenarioSpec

    def block(self, *, rate_rps: float, num_requests: int | None, seed: int) -> Block:
        """See `Load`."""
        scenario = self.scenario
        if num_requests is not None:
            # Some scenarios have a number of their own, which would win.
            workload_spec = {**scenario.workload, "num_requests": num_requests}
            scenario = msgspec.structs.replace(scenario, workload=workload_spec)
        try:
            settings, workload, events = make_trial_parts(
                self.suite, scenario, rate_rps=rate_rps, seed=seed
            )
        except SuiteError as error:
            raise PlanError(str(error)) from error
        if events:
            kinds = ", ".join(sorted({type(event).__name__ for event in events}))
            raise PlanError(f"scenario {self.scenario.name}: {kinds}: in virtual time only")
        return Block(self.scenario.name, rate_rps, seed, workload, settings, slo_of(self.suite))


@dataclass(frozen=True, slots=True)
class WorkloadLoad:
    """A workload by its name or file, for a fleet that is said beside it.

    Attributes:
        name: See `workloads.make`.
        settings: The fleet; its warm-up does not count.
        slo: What requests must meet.
    """

    name: str
    settings: FleetSettings
    slo: Slo

    def block(self, *, rate_rps: float | None, num_requests: int | None, seed: int) -> Block:
        """See `Load`; the name may also come with a rate."""
        try:
            workload = make(self.name, rate_rps=rate_rps, num_requests=num_requests, seed=seed)
        except WorkloadError as error:
            raise PlanError(str(error)) from error
        settings = replace(self.settings, warm_up_s=WARM_UP * workload.duration_s)
        rate_rps = round(workload.rate_rps, 2) if rate_rps is None else rate_rps
        return Block(workload.name, rate_rps, seed, workload, settings, self.slo)


@dataclass(frozen=True, slots=True)
class Overrides:
    """The fleet and the objective: of a workload, or instead of what a suite says.

    Attributes:
        knobs: Of `FleetSettings`, each `KEY=VALUE`.
        profile: Name of an engine profile, "" for the one that there is.
        slo: Fields of `SloSpec`; None is left out.
    """

    knobs: Sequence[str] = ()
    profile: str = ""
    slo: tuple[float | None, float | None, float | None] = (None, None, None)

    def apply(self, suite: Suite) -> Suite:
        """The suite with these.

        Raises:
            PlanError: A profile or a knob is unknown.
        """
        names = ("ttft_s", "tpot_s", "target")
        slo = {k: v for k, v in zip(names, self.slo, strict=True) if v is not None}
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
    """The suite called so.

    Raises:
        PlanError: There is none, or it cannot be used.
    """
    try:
        suite = suites.read_suite(name)
        if overrides == Overrides():
            return suite
        # Once more, now that something else is asked for.
        return parse_suite(yaml.safe_dump(msgspec.to_builtins(overrides.apply(suite))))
    except SuiteError as error:
        raise PlanError(str(error)) from error


def find_load(name: str, overrides: Overrides = NO_OVERRIDES) -> Load:
    """What is called so: `SUITE/SCENARIO`, a suite's first scenario, or a workload.

    Raises:
        PlanError: Nothing is, or it cannot be used.
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
    """The workload called so, for the fleet that the overrides say.

    Raises:
        PlanError: The fleet cannot be so.
    """
    empty = Suite(name="", about="", num_requests=1, seeds=[], rates_rps=[], rules=[], scenarios=[])
    suite = overrides.apply(empty)
    try:
        settings = FleetSettings(**suite.fleet, profile=PROFILES[suite.profile])
        settings.profile.kv_blocks(settings.max_loras, settings.max_lora_rank)
    except (TypeError, ValueError) as error:
        raise PlanError(f"fleet: {error}") from error
    return WorkloadLoad(name, settings, slo_of(suite))


def is_suite(name: str) -> bool:
    """Whether a suite is called so, or it is the path of a file that could be one."""
    try:
        return find_suite(name).suffix in (".yaml", ".yml")
    except SuiteError:
        return Path(name).suffix in (".yaml", ".yml")


def scenarios_of(suite: Suite, names: Sequence[str]) -> list[ScenarioSpec]:
    """Some of a suite's scenarios; all if none is named.

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
    """Every scenario at every rate with every seed; one fleet's blocks follow each other.

    Args:
        suite: Where they are.
        scenarios: Which.
        rates_rps: Instead of the suite's.
        seeds: Instead of the suite's.

    Raises:
        PlanError: One cannot be made.
    """
    return [
        SuiteLoad(suite, scenario).block(rate_rps=rate_rps, num_requests=None, seed=seed)
        for scenario in scenarios
        for seed in seeds or suite.seeds
        for rate_rps in rates_rps or suite.rates_of(scenario)
    ]
