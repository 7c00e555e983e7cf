"""Overload: what is still served well at rates beyond a capacity, and who suffers.

A scenario's first rate is taken for its capacity, its others are multiples of that. Where a
workload has tenants beside its own clients, those clients are run alone as well: they send the same
requests, so the difference is what the others cost them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from extproc.sim.trials.misses import plan_misses
from extproc.sim.trials.specs import ScenarioSpec, Suite
from extproc.sim.trials.table import line, mean_cell, rule
from extproc.sim.trials.trials import Trial, TrialResult

ALONE = ", alone"
"""Follows the name of a scenario without the tenants beside."""

Json = Mapping[str, Any]
Runs = Mapping[int, Json]
"""Measures by seed."""


def plan_overload(
    suite: Suite, policies: Sequence[str] = (), *, fleet: Mapping[str, Any]
) -> list[Trial]:
    """Return a trial for each scenario, rate, policy and seed of the suite.

    Args:
        policies: Policies or labels of variants; none for all of the suite's.
        fleet: Fields of `FleetSettings`, over the suite's and the scenarios'.

    Raises:
        SuiteError: A policy or a key is unknown.
    """
    suite = with_alone(suite)
    places = [f"{each.name}@{rate:g}" for each in suite.scenarios for rate in suite.rates_of(each)]
    names = policies or [*suite.policies, *(variant.label for variant in suite.variants)]
    return plan_misses(suite, places, names, fleet=fleet, profile={})


def with_alone(suite: Suite) -> Suite:
    """Return the suite with the scenarios in which those of its scenarios with others are alone."""
    alone = [_alone(scenario) for scenario in suite.scenarios if _has_tenants(scenario)]
    return replace(suite, scenarios=[*suite.scenarios, *alone])


def _has_tenants(scenario: ScenarioSpec) -> bool:
    return "beside" in scenario.workload


def _alone(scenario: ScenarioSpec) -> ScenarioSpec:
    own = {key: value for key, value in scenario.workload.items() if key != "beside"}
    return replace(scenario, name=scenario.name + ALONE, workload=own)


def overload_tables(suite: Suite, results: Sequence[TrialResult]) -> str:
    """Format goodput, and what tenants get, as Markdown, each figure ± its standard error.

    Scenarios without a result are left out, and so are rates and policies.
    """
    runs: dict[tuple[str, str, float], dict[int, Json]] = {}
    for result in results:
        own = runs.setdefault((result.scenario, result.policy, result.value), {})
        own[result.seed] = result.runs[0]
    policies = list(dict.fromkeys(result.policy for result in results))
    goodput, tenants = list[str](), list[str]()
    shown = [scenario for scenario in suite.scenarios if not scenario.name.endswith(ALONE)]
    for scenario in shown:
        first, *_ = rates = suite.rates_of(scenario)
        whole = runs.get((scenario.name, policies[0], first), {})
        for rate in rates:
            for policy in policies:
                if (scenario.name, policy, rate) not in runs:
                    continue
                place, own = f"{scenario.name}@{rate:g}", runs[scenario.name, policy, rate]
                if _has_tenants(scenario):
                    alone = runs.get((scenario.name + ALONE, policy, rate), {})
                    tenants += _tenant_lines((place, f"`{policy}`"), own, alone)
                else:
                    cells = place, f"{rate / first:.3g}", f"`{policy}`", *_goodput(own, whole)
                    goodput.append(line(*cells))
    return "\n".join([*_with_head(goodput, _GOODPUT), *_with_head(tenants, _TENANTS)])


_GOODPUT = (
    *("scenario", "of capacity", "policy", "served well, req/s"),
    *("of the first line's, %", "refused, %"),
)
_TENANTS = (
    *("scenario", "policy", "tenant", "served well, %", "less alone, points"),
    *("longest wait, s", "refused, %"),
)


def _with_head(lines: Sequence[str], head: Sequence[str]) -> list[str]:
    return [line(*head), rule(len(head) - 1), *lines, ""] if lines else []


def _goodput(own: Runs, whole: Runs) -> Sequence[str]:
    """Format what is served well, in parts of the whole as well, and what is refused."""
    parts = [
        100 * run["goodput_rps"] / max(1e-9, whole[seed]["goodput_rps"])
        for seed, run in own.items()
        if seed in whole
    ]
    return mean_cell([run["goodput_rps"] for run in own.values()]), mean_cell(parts), _refused(own)


def _tenant_lines(names: Sequence[str], own: Runs, alone: Runs) -> list[str]:
    """Format what each tenant gets, and the first one's difference to being alone."""
    lines = list[str]()
    for tenant in next(iter(own.values()))["tenants"]:
        of = {seed: run["tenants"][tenant] for seed, run in own.items()}
        cells = [
            tenant,
            mean_cell([100 * each["attainment"] for each in of.values()]),
            mean_cell(_less(of, alone, tenant)),
            mean_cell([each["longest_wait_s"] for each in of.values()]),
        ]
        lines.append(line(*names, *cells, "" if lines else _refused(own)))
    return lines


def _less(of: Runs, alone: Runs, tenant: str) -> list[float]:
    """Return the attainment less that alone, in points; nothing for one that never was alone."""
    return [
        100 * (each["attainment"] - alone[seed]["tenants"][tenant]["attainment"])
        for seed, each in of.items()
        if seed in alone and tenant in alone[seed]["tenants"]
    ]


def _refused(runs: Runs) -> str:
    """Format the part of the requests that is refused, by reason."""
    reasons = sorted({reason for run in runs.values() for reason in run["refusals"]})
    parts = [
        [100 * run["refusals"].get(reason, 0) / run["num_offered"] for run in runs.values()]
        for reason in reasons
    ]
    return ", ".join(
        f"{reason} {mean_cell(part)}" for reason, part in zip(reasons, parts, strict=True)
    )
