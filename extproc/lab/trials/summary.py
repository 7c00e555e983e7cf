"""From the trials of a suite to the table that is printed, saved as JSON and drawn.

For each scenario and policy there is the SLO capacity with its interval over seeds, and its paired
ratio to the baseline and to the bounds. The other measures are at the suite's main rate, the middle
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from extproc.lab.trials.specs import Suite
from extproc.lab.trials.trials import INFORMED, POOLED, POOLED_SLOTS, STALE, TrialResult
from extproc.lab.workload.intervals import Interval, interval, paired_ratio

FORMAT = "extproc-lab-3"
FIXED = "fixed"
"""Stands for the sweep's name in runs at a fixed rate, which is their value."""
ALONE = ", alone"
"""Follows the name of a scenario without the tenants beside."""
BySeed = Mapping[int, float]
MEASURES = (
    "attainment",
    "throughput_rps",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "tpot_p99_s",
    "slora_satisfaction",
    "loads_per_1000",
    "disk_loads_per_1000",
    "queue_wait_s",
    "max_over_mean_load",
    "worst_adapter",
)


_CALLED = {
    POOLED: "bound: perfect pooling",
    POOLED_SLOTS: "bound: adapter slots pooled",
    INFORMED: "reference: omniscient greedy",
}


def is_bound(policy: str) -> bool:
    """Return whether a policy is a bound, with knowledge that no router has."""
    return policy in _CALLED or policy.startswith(STALE)


def called(policy: str) -> str:
    """Return the name of a policy or bound for people."""
    if policy.startswith(STALE):
        return f"reference: greedy, {policy.removeprefix(STALE)} old"
    return _CALLED.get(policy, policy)


def main_rate(rates_rps: Sequence[float]) -> float:
    """Return the rate of the main table."""
    return sorted(rates_rps)[len(rates_rps) // 2]


def summarize(suite: Suite, trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the results of a suite for JSON; `timing` is all that seeds do not determine.

    Scenarios that were run at fixed rates alone have no summary.
    """
    scenarios = {}
    for scenario in suite.scenarios:
        own = [t for t in trials if t.scenario == scenario.name and not t.sweep]
        if not own:
            continue
        rate_rps = main_rate(suite.rates_of(scenario))
        rows = rows_of(suite, own, rate_rps)
        scenarios[scenario.name] = {"main_rate_rps": rate_rps, "rows": rows}
    kept = [asdict(trial) for trial in trials]
    timing = [
        {key: trial[key] for key in ("scenario", "policy", "seed", "sweep", "value")}
        | {key: trial.pop(key) for key in ("num_simulated", "cpu_s")}
        for trial in kept
    ]
    return {
        "format": FORMAT,
        "suite": suite,
        "summary": scenarios,
        "trials": kept,
        "timing": timing,
    }


def speed(timing: Sequence[Mapping[str, Any]]) -> str:
    """Say how fast a result's trials were simulated, from its `timing`."""
    num, cpu_s = (sum(each.get(key, 0) for each in timing) for key in ("num_simulated", "cpu_s"))
    return f"{num:,} requests simulated, {num / cpu_s if cpu_s else 0:,.0f} per CPU second"


def rows_of(suite: Suite, trials: Sequence[TrialResult], rate_rps: float) -> list[dict[str, Any]]:
    """Return the table of one scenario, highest capacity first: for each policy

    - `policy`, `is_bound`, and `capacity_rps` with its interval;
    - `worst_adapter`: attainment of the worst served adapter at the highest rate of each search
      that attained the target;
    - `over_baseline`, and `over_pooled`, `over_slots`, `over_informed`: paired ratios of capacities
      to the baseline's and to B0's, B1's and B3's, over the seeds that both were run with; None
      without these;
    - `measures`: means over the seeds at the main rate.
    """
    capacities: dict[str, dict[int, float]] = {}
    worst: dict[str, list[float]] = {}
    for trial in sorted(trials, key=lambda trial: trial.seed):
        capacities.setdefault(trial.policy, {})[trial.seed] = trial.capacity_rps
        worst.setdefault(trial.policy, []).append(trial.worst_adapter)
    runs = {policy: _runs(trials, policy, rate_rps) for policy in capacities}
    baseline = suite.baseline if suite.baseline in capacities else next(iter(capacities))
    means = {policy: interval(list(values.values())) for policy, values in capacities.items()}
    return [
        {
            "policy": policy,
            "is_bound": is_bound(policy),
            "capacity_rps": means[policy],
            "worst_adapter": interval(worst[policy]),
            "over_baseline": _over(values, capacities[baseline]),
            "over_pooled": _over(values, capacities.get(POOLED)),
            "over_slots": _over(values, capacities.get(POOLED_SLOTS)),
            "over_informed": _over(values, capacities.get(INFORMED)),
            "measures": {
                name: fmean(run[name] for run in runs[policy].values()) for name in MEASURES
            },
        }
        for policy in sorted(capacities, key=lambda policy: (-means[policy].mean, policy))
        for values in [capacities[policy]]
    ]


def _runs(trials: Sequence[TrialResult], policy: str, rate_rps: float) -> dict[int, dict[str, Any]]:
    return {
        trial.seed: run
        for trial in sorted(trials, key=lambda trial: trial.seed)
        if trial.policy == policy
        for run in trial.runs
        if run["rate_rps"] == rate_rps
    }


def pairs(values: BySeed, others: BySeed) -> tuple[list[float], list[float]]:
    """Return what two policies have for the seeds that both were run with."""
    seeds = sorted(values.keys() & others.keys())
    return [values[seed] for seed in seeds], [others[seed] for seed in seeds]


def _over(values: BySeed, others: BySeed | None) -> Interval | None:
    return paired_ratio(*pairs(values, others)) if others else None
