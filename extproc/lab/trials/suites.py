"""Suites: scenarios, policies, rates and seeds, read from a file.

The files are in `loadtest/scenarios/`. *development* is for choosing and tuning policies;
*evaluation* has other seeds and parameters and is run only for a final table; *quick* shows the
whole laboratory in about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fleet.settings import (
    AdapterRegistered,
    FleetEvent,
    FleetSettings,
    PodJoin,
    PodKind,
    PodLoss,
    SlowPod,
)
from extproc.lab.opponents import opponent
from extproc.lab.trials.specs import EventSpec, ScenarioSpec, Suite, SweepSpec, VariantSpec
from extproc.lab.workload.clientele import WorkloadSpec, make_workload, own_folder
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.synthetic import flash_crowd
from extproc.queue import QueueSettings

SCENARIOS_DIR = own_folder("scenarios")


class PlanError(Exception):
    """The wanted suite cannot be run; the message says why."""


def find_suite(name: str) -> Path:
    """Return the file of a suite: a path, or a name in `loadtest/scenarios/`.

    Raises:
        PlanError: There is none.
    """
    for path in (SCENARIOS_DIR / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in SCENARIOS_DIR.glob("*.yaml")))
    raise PlanError(f"suite {name}: no such file; known: {known or 'none'}")


def read_suite(name: str) -> Suite:
    """Read the suite called `name`; see `find_suite`.

    Raises:
        PlanError: There is none, or it cannot be read or run.
    """
    path = find_suite(name)
    try:
        return parse_suite(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error


def parse_suite(text: str) -> Suite:
    """Parse a suite.

    Raises:
        PlanError: Not a suite, or one that cannot be run.
    """
    try:
        suite = msgspec.convert(yaml.safe_load(text), type=Suite)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise PlanError(f"not a suite: {error}") from error
    check_policies([*suite.policies, *(variant.policy for variant in suite.variants)])
    rows = [*suite.bounds, *suite.policies, *(variant.label for variant in suite.variants)]
    if len(set(rows)) < len(rows):
        raise PlanError("two policies or variants are called the same")
    names = {scenario.name for scenario in suite.scenarios}
    for scenario in suite.scenarios:
        for fleet in ({}, *(variant.fleet for variant in suite.variants)):
            rate_rps, changed = suite.rates_of(scenario)[0], in_fleet(scenario, fleet)
            make_trial_parts(suite, changed, rate_rps=rate_rps, seed=0, num=10)
    for sweep in suite.sweeps:
        if sweep.scenario not in names or sweep.section not in ("workload", "fleet", "profile"):
            raise PlanError(f"sweep {sweep.name}: unknown scenario or section")
    return suite


def check_policies(labels: Iterable[str]) -> None:
    """Raise PlanError for policies that are unknown, or do not take their arguments."""
    try:
        unknown = [label for label in labels if opponent(label) is None]
    except (TypeError, ValueError) as error:
        raise PlanError(f"policies: {error}") from error
    if unknown:
        raise PlanError(f"unknown policies: {', '.join(unknown)}")


def variant_of(suite: Suite, label: str) -> VariantSpec:
    """Return a suite's variant by its label; other names are policies in its own fleet."""
    named = {variant.label: variant for variant in suite.variants}
    return named.get(label) or VariantSpec(label=label, policy=label, fleet={})


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


def in_fleet(scenario: ScenarioSpec, fleet: Mapping[str, Any]) -> ScenarioSpec:
    """Return the scenario with other fields of its fleet."""
    return msgspec.structs.replace(scenario, fleet={**scenario.fleet, **fleet})


def with_workload(scenario: ScenarioSpec, **changed: int | None) -> ScenarioSpec:
    """Return the scenario with other fields of its workload; None leaves one as it is.

    Those of the scenario override the suite's.
    """
    given = {key: value for key, value in changed.items() if value is not None}
    return msgspec.structs.replace(scenario, workload={**scenario.workload, **given})


def varied(scenario: ScenarioSpec, sweep: SweepSpec, value: float) -> ScenarioSpec:
    """Return the scenario with the sweep's factor set to `value`."""
    number = int(value) if float(value).is_integer() and sweep.section != "profile" else value
    section = {**getattr(scenario, sweep.section), sweep.key: number}
    return msgspec.structs.replace(scenario, **{sweep.section: section})


def make_trial_parts(
    suite: Suite, scenario: ScenarioSpec, *, rate_rps: float, seed: int, num: int | None = None
) -> tuple[FleetSettings, Workload, list[FleetEvent]]:
    """Make fleet, clients and events of one run.

    Raises:
        PlanError: A setting or an event is unknown or impossible.
    """
    try:
        spec = msgspec.convert(scenario.workload, type=WorkloadSpec)
        workload = make_workload(
            spec, num_requests=num or suite.num_of_run(rate_rps), rate_rps=rate_rps, seed=seed
        )
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise PlanError(f"scenario {scenario.name}: {_sentence(error)}") from error
    settings = make_settings(suite, scenario, workload)
    duration_s = workload.duration_s
    events: list[FleetEvent] = []
    for event in scenario.events:
        if event.kind == "flash_crowd":
            workload = _with_crowd(workload, event, duration_s, seed)
        else:
            events.append(_fleet_event(event, event.at * duration_s, workload))
    return settings, workload, events


def make_settings(suite: Suite, scenario: ScenarioSpec, workload: Workload) -> FleetSettings:
    """Make the fleet of a scenario for a workload.

    Raises:
        PlanError: A setting is unknown or impossible.
    """
    try:
        return _settings(suite, scenario, workload)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"scenario {scenario.name}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return f"unknown: {error}" if isinstance(error, KeyError) else str(error)


def _settings(suite: Suite, scenario: ScenarioSpec, workload: Workload) -> FleetSettings:
    profile = PROFILES[suite.profile].changed(scenario.profile)
    knobs = {**suite.fleet, **scenario.fleet}
    knobs["kinds"] = tuple(PodKind(**each) for each in knobs.get("kinds", ()))
    knobs["queue"] = QueueSettings(**knobs.get("queue", {}))
    knobs["declared"] = suite.slo if knobs.pop("declares", False) else None
    settings = FleetSettings(
        **knobs, profile=profile, warm_up_s=workload.duration_s * suite.warm_up
    )
    for group in ("", *settings.groups):
        own = settings.of(group)
        profile.kv_blocks(own.max_loras, own.max_lora_rank)  # or vLLM would not start
    if (rank := max(workload.adapters.values(), default=0)) > settings.largest_rank:
        raise ValueError(f"an adapter of rank {rank} fits no pod: {settings.largest_rank} at most")
    return settings


def _with_crowd(workload: Workload, event: EventSpec, duration_s: float, seed: int) -> Workload:
    return flash_crowd(
        workload,
        adapter=_by_popularity(workload, event.popularity_rank),
        share=event.share,
        start_s=event.at * duration_s,
        end_s=event.until * duration_s,
        seed=seed,
    )


def _fleet_event(event: EventSpec, at_s: float, workload: Workload) -> FleetEvent:
    match event.kind:
        case "pod_loss":
            return PodLoss(at_s, event.pod)
        case "pod_join":
            return PodJoin(at_s)
        case "slow_pod":
            return SlowPod(at_s, event.pod, event.factor)
        case "adapter_registered":
            return AdapterRegistered(at_s, _by_popularity(workload, event.popularity_rank))
    raise PlanError(f"unknown event {event.kind}")


def _by_popularity(workload: Workload, rank: int) -> str:
    """Return the adapter at a place of popularity; -1 is the least popular that exists."""
    shares: Mapping[str | None, float] = workload.shares
    asked = [name for name in shares if name is not None]
    silent = sorted(set(workload.adapters) - set(asked))
    return [*asked, *silent][rank]
