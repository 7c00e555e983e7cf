"""The runs of a suite: a search for the capacity of each policy, or its runs at fixed rates.

Policies get the same requests for the same seed, so their difference is known much better than
either part. At one rate, a minute shows as much as a search for capacities in an hour. Where a
workload has tenants beside its own clients, those clients are run alone as well. They send the same
requests, so the difference is the cost of the other tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from extproc.lab.trials.specs import ScenarioSpec, Suite, VariantSpec
from extproc.lab.trials.suites import (
    PlanError,
    check_policies,
    in_fleet,
    make_trial_parts,
    variant_of,
    varied,
)
from extproc.lab.trials.summary import ALONE, FIXED, is_bound
from extproc.lab.trials.trials import Trial

Place = tuple[ScenarioSpec, float]
"""A scenario and a rate in requests per second."""


def plan(suite: Suite) -> list[Trial]:
    """Return every trial of a suite in a fixed order: bounds first, because they take longest."""
    plain = [_plain(policy) for policy in [*suite.bounds, *suite.policies]]
    trials = [
        Trial(
            suite,
            in_fleet(scenario, variant.fleet),
            variant.policy,
            tuple(suite.seeds),
            tuple(suite.rates_of(scenario)),
            label=variant.label,
        )
        for variants in (plain, suite.variants)
        for scenario in suite.scenarios
        for variant in variants
    ]
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    return trials + [
        Trial(
            suite,
            varied(scenarios[sweep.scenario], sweep, value),
            policy,
            tuple(suite.seeds[: sweep.num_seeds]),
            (sweep.rate_rps,),
            sweep=sweep.name,
            value=value,
        )
        for sweep in suite.sweeps
        for value in sweep.values
        for policy in sweep.policies
    ]


def plan_fixed(suite: Suite, places: Sequence[Place]) -> list[Trial]:
    """Return a trial for each place, row and seed of a suite: complete runs, without a search."""
    plain = [_plain(policy) for policy in [*suite.policies, *suite.bounds]]
    return [
        Trial(
            suite,
            in_fleet(scenario, variant.fleet),
            variant.policy,
            (seed,),
            (rate_rps,),
            sweep=FIXED,
            value=rate_rps,
            label=variant.label,
        )
        for scenario, rate_rps in places
        for variant in [*plain, *suite.variants]
        for seed in suite.seeds
    ]


def _plain(policy: str) -> VariantSpec:
    return VariantSpec(label="", policy=policy, fleet={})


def places_of(suite: Suite, names: Sequence[str] = ()) -> list[Place]:
    """Return places by name, as `zipf@68`, each with the same alone; none for all of a suite's.

    Raises:
        PlanError: There is no such scenario, or it cannot be run at the rate.
    """
    suite = with_alone(suite)
    known = {scenario.name: scenario for scenario in suite.scenarios}
    places = [(each, rate_rps) for each in known.values() for rate_rps in suite.rates_of(each)]
    if names:
        places = []
    for name in names:
        scenario, _, rate = name.rpartition("@")
        if scenario not in known:
            raise PlanError(f"{name}: not SCENARIO@RATE; scenarios: {', '.join(known)}")
        try:
            own = [each for each in (scenario, scenario + ALONE) if each in known]
            places += [(known[each], float(rate)) for each in own]
        except ValueError as error:
            raise PlanError(f"{name}: {rate} is no rate in requests per second") from error
    for each, rate_rps in places:
        make_trial_parts(suite, each, rate_rps=rate_rps, seed=0, num=10)
    return places


def with_alone(suite: Suite) -> Suite:
    """Return the suite with added scenarios, in which the clients of scenarios with tenants are
    alone.
    """
    alone = [
        replace(scenario, name=scenario.name + ALONE, workload=own)
        for scenario in suite.scenarios
        if (own := {key: value for key, value in scenario.workload.items() if key != "beside"})
        != scenario.workload
    ]
    return replace(suite, scenarios=[*suite.scenarios, *alone])


def with_only(suite: Suite, names: Sequence[str]) -> Suite:
    """Return the suite with these policies, bounds and variants alone, and without its sweeps.

    The rest are compared with the first of them. Names with a colon are modules' own.

    Raises:
        PlanError: A policy is unknown.
    """
    if not names:
        return suite
    names = list(dict.fromkeys(names))
    variants = [variant for variant in suite.variants if variant.label in names]
    others = [name for name in names if variant_of(suite, name) not in variants]
    bounds = [name for name in others if is_bound(name)]
    policies = [name for name in others if name not in bounds]
    check_policies(name for name in policies if ":" not in name)
    return replace(
        suite, policies=policies, bounds=bounds, variants=variants, sweeps=[], baseline=names[0]
    )


def changed(suite: Suite, fleet: Mapping[str, Any], profile: Mapping[str, float]) -> Suite:
    """Return the suite with these fields of every fleet and costs of every engine.

    Raises:
        PlanError: One is unknown, or impossible.
    """
    scenarios = [
        in_fleet(replace(scenario, profile={**scenario.profile, **profile}), fleet)
        for scenario in suite.scenarios
    ]
    for each in scenarios:
        make_trial_parts(suite, each, rate_rps=suite.rates_of(each)[0], seed=0, num=10)
    return replace(suite, scenarios=scenarios)


def read_values(pairs: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` pairs, whose values are JSON.

    Raises:
        PlanError: One is not such a pair.
    """
    values = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            values[key] = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise PlanError(f"{pair}: not key=value, as num_routers=1") from error
    return values
