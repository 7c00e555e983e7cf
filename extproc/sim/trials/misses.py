"""Misses: how much of what is offered at a fixed rate each policy does not serve well.

Policies get the same requests for the same seed, so their difference is known much better than
either part: at one rate, a minute shows what a search for capacities shows in an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from extproc.sim.trials.specs import ScenarioSpec, Suite
from extproc.sim.trials.suites import (
    SuiteError,
    check_policies,
    in_fleet,
    make_trial_parts,
    variant_of,
)
from extproc.sim.trials.summary import is_bound
from extproc.sim.trials.table import line, rule
from extproc.sim.trials.trials import Trial, TrialResult
from extproc.workload.intervals import standard_error

SWEEP = "misses"


def plan_misses(
    suite: Suite,
    places: Sequence[str],
    policies: Sequence[str],
    *,
    fleet: Mapping[str, Any],
    profile: Mapping[str, float],
) -> list[Trial]:
    """Return a trial for each place, policy and seed of the suite.

    Args:
        suite: With the seeds and the number of requests to run.
        places: Scenarios and their rates in requests per second, as `zipf@68`.
        policies: Policies or bounds as a suite names them, or labels of its variants.
        fleet: Fields of `FleetSettings`, over the suite's and the scenarios'.
        profile: Costs of the engine, over the suite's and the scenarios'.

    Raises:
        SuiteError: A place, a policy or a key is unknown.
    """
    variants = [variant_of(suite, name) for name in policies]
    check_policies(each.policy for each in variants if not is_bound(each.policy))
    trials = []
    for place in places:
        scenario, rate_rps = _at(suite, place)
        scenario = replace(scenario, profile={**scenario.profile, **profile})
        for variant in variants:
            changed = in_fleet(scenario, {**fleet, **variant.fleet})
            make_trial_parts(suite, changed, rate_rps=rate_rps, seed=0, num=10)
            trials += [
                Trial(
                    suite,
                    changed,
                    variant.policy,
                    (seed,),
                    (rate_rps,),
                    sweep=SWEEP,
                    value=rate_rps,
                    label=variant.label,
                )
                for seed in suite.seeds
            ]
    return trials


def _at(suite: Suite, place: str) -> tuple[ScenarioSpec, float]:
    name, _, rate = place.rpartition("@")
    known = {scenario.name: scenario for scenario in suite.scenarios}
    if name not in known:
        raise SuiteError(f"{place}: not SCENARIO@RATE; scenarios: {', '.join(known)}")
    try:
        return known[name], float(rate)
    except ValueError as error:
        raise SuiteError(f"{place}: {rate} is no rate in requests per second") from error


def misses_table(results: Sequence[TrialResult]) -> str:
    """Format misses in % as Markdown: a line per policy, a column per place.

    In brackets the difference to the first policy, seed by seed, with its standard error.
    """
    misses: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        place = f"{result.scenario}@{result.value:g}"
        missed = 100 * (1 - result.runs[0]["attainment"])
        misses.setdefault(result.policy, {}).setdefault(place, {})[result.seed] = missed
    first = next(iter(misses.values()))
    lines = [line("misses in % (less the first, ± standard error)", *first), rule(len(first))]
    for policy, own in misses.items():
        cells = [_cell(own[place], first[place]) for place in first]
        lines.append(line(f"`{policy}`", *cells))
    return "\n".join(lines)


def tails_table(results: Sequence[TrialResult]) -> str:
    """Format the 99th percentile of adapters' first tokens: the median adapter's, the worst one's.

    In seconds, each the mean over the seeds; a line per policy, a column per place.
    """
    tails: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        place, run = f"{result.scenario}@{result.value:g}", result.runs[0]
        pair = run["adapter_ttft_p99_s"], run["worst_adapter_ttft_p99_s"]
        tails.setdefault(result.policy, {}).setdefault(place, []).append(pair)
    first = next(iter(tails.values()))
    lines = [line("p99 of the median adapter / of the worst, s", *first), rule(len(first))]
    for policy, own in tails.items():
        means = [[fmean(each) for each in zip(*own[place], strict=True)] for place in first]
        lines.append(line(f"`{policy}`", *(f"{mid:.2f} / {worst:.2f}" for mid, worst in means)))
    return "\n".join(lines)


def _cell(own: Mapping[int, float], first: Mapping[int, float]) -> str:
    mean = f"{fmean(own.values()):.2f}"
    if own is first:
        return mean
    differences = [own[seed] - first[seed] for seed in first]
    if len(differences) == 1:
        return f"{mean} ({differences[0]:+.2f})"
    return f"{mean} ({fmean(differences):+.2f} ± {standard_error(differences):.2f})"
