"""Trials: one policy on one scenario, seed by seed, at several rates: the unit of work of a suite.

Trials share nothing, so a suite's result does not depend on how many run at once. Within a trial
the search for a seed's capacity begins at the earlier seeds' capacity. Runs at the suite's own
rates are complete; other runs end once they can only fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import geometric_mean
from typing import Any

from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.opponents import make_policy
from extproc.lab.trials.bestcase import (
    count_belady,
    pooled_settings,
    pooled_slots,
    pooled_workload,
)
from extproc.lab.trials.oracle import Oracle, attach_oracles
from extproc.lab.trials.search import CapacitySearch
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import make_trial_parts
from extproc.lab.workload.judge import Slo, attainment_at_most, measure
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FleetResult, LabFlight
from extproc.routing.policies import Policy, RandomChoice

POOLED = "B0_pooled"
POOLED_SLOTS = "B1_pooled_slots"
INFORMED = "B3_informed"
STALE = "B4_stale_"
HOPELESS = 0.9
"""A run that cannot attain more is given up."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy on one scenario.

    Attributes:
        scenario: One of the suite's, or a variation of it.
        policy: A policy or a bound.
        label: The name of its results; the policy if empty.
        seeds: One run each at every rate.
        rates_rps: Rates at which runs are complete.
        sweep: Its sweep, or "".
        value: The sweep's factor.
    """

    suite: Suite
    scenario: ScenarioSpec
    policy: str
    seeds: tuple[int, ...]
    rates_rps: tuple[float, ...]
    sweep: str = ""
    value: float = 0.0
    label: str = ""


@dataclass(slots=True)
class TrialResult:
    """The result for one seed, ready for JSON.

    Attributes:
        policy: The trial's label.
        capacity_rps: SLO capacity; 0 in a sweep.
        runs: Per rate: the metrics and the run's digest.
        cut: Per rate at which the run was given up: the attainment that was still possible.
        worst_adapter: Attainment of the worst served adapter at the highest rate that attained the
            target; 0 without one.
        num_simulated: Requests of all its runs, given up ones included.
        cpu_s: CPU seconds that they took; 0 where nobody measured.
    """

    scenario: str
    policy: str
    seed: int
    sweep: str
    value: float
    capacity_rps: float = 0.0
    runs: list[dict[str, Any]] = field(default_factory=list)
    cut: list[dict[str, float]] = field(default_factory=list)
    worst_adapter: float = 0.0
    num_simulated: int = 0
    cpu_s: float = 0.0


def run_trial(trial: Trial) -> list[TrialResult]:
    """Run a trial, seed by seed.

    Raises:
        ValueError: The policy broke its contract.
    """
    results: list[TrialResult] = []
    for seed in trial.seeds:
        known = [result.capacity_rps for result in results if result.capacity_rps]
        near_rps = geometric_mean(known) if known else None
        results.append(_run_seed(trial, seed, near_rps))
    return results


def _run_seed(trial: Trial, seed: int, near_rps: float | None) -> TrialResult:
    label = trial.label or trial.policy
    done = TrialResult(trial.scenario.name, label, seed, trial.sweep, trial.value)
    slo = trial.suite.slo

    def attainment_at(rate_rps: float) -> float:
        is_whole = rate_rps in trial.rates_rps
        result, settings, workload = _run(trial, seed, rate_rps, is_whole)
        done.num_simulated += len(result.flights)
        if result.is_cut:
            at_most = _ceiling(slo, workload, settings)(result.flights, result.ended_s)
            done.cut.append({"rate_rps": rate_rps, "attainment_at_most": at_most})
            return at_most
        metrics = measure(result, slo)
        run = {"rate_rps": rate_rps, "digest": result.digest(), **asdict(metrics)}
        if rate_rps == max(trial.rates_rps):
            run["belady_loads_per_1000"] = count_belady(workload, settings)
        done.runs.append(run)
        return metrics.attainment

    if trial.sweep:
        for rate_rps in trial.rates_rps:
            attainment_at(rate_rps)
    else:
        search = CapacitySearch(slo.target, trial.suite.resolution)
        for rate_rps in search.rates(trial.rates_rps, near_rps):
            search.points[rate_rps] = attainment_at(rate_rps)
        done.capacity_rps = search.capacity_rps
    done.runs.sort(key=lambda run: float(run["rate_rps"]))
    passed = [run for run in done.runs if run["attainment"] >= slo.target]
    done.worst_adapter = passed[-1]["worst_adapter"] if passed else 0.0
    return done


def _run(
    trial: Trial,
    seed: int,
    rate_rps: float,
    is_whole: bool,
) -> tuple[FleetResult, FleetSettings, Workload]:
    suite = trial.suite
    is_short = suite.num_search_requests and not is_whole
    num = suite.num_of_search(rate_rps) if is_short else None
    parts = make_trial_parts(suite, trial.scenario, rate_rps=rate_rps, seed=seed, num=num)
    settings, workload, events = parts
    if trial.policy in (POOLED, POOLED_SLOTS):
        # Events are about single pods, so there are none here.
        return _run_pooled(trial, settings, workload, seed), settings, workload
    at_most = _ceiling(trial.suite.slo, workload, settings)

    def gives_up(flights: Iterable[LabFlight], now: float) -> bool:
        return at_most(flights, now) < HOPELESS

    fleet = Fleet(
        settings,
        workload,
        _bound(trial) or make_policy(trial.policy),
        seed=seed,
        events=events,
        policy_name=trial.policy,
        gives_up=None if is_whole else gives_up,
    )
    attach_oracles(fleet)
    return fleet.run(), settings, workload


def _run_pooled(
    trial: Trial, settings: FleetSettings, workload: Workload, seed: int
) -> FleetResult:
    if trial.policy == POOLED:
        settings, workload = pooled_settings(settings), pooled_workload(workload)
    else:
        settings = pooled_slots(settings, patience_s=trial.suite.slo.ttft_s)
    return Fleet(settings, workload, RandomChoice, seed=seed).run()


def _ceiling(
    slo: Slo, workload: Workload, settings: FleetSettings
) -> Callable[[Iterable[LabFlight], float], float]:
    """Return a function that bounds attainment by the requests so far and the time."""
    counted = sum(arrival.at_s >= settings.warm_up_s for arrival in workload.arrivals)
    return partial(
        attainment_at_most, slo=slo, warm_up_s=settings.warm_up_s, num_counted=max(1, counted)
    )


def _bound(trial: Trial) -> Callable[[], Policy] | None:
    slo = trial.suite.slo
    if trial.policy == INFORMED:
        return lambda: Oracle(slo)
    if trial.policy.startswith(STALE):
        age_s = float(trial.policy.removeprefix(STALE).removesuffix("ms")) / 1000
        return lambda: Oracle(slo, age_s)
    return None
