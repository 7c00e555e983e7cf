"""The virtual twin of a real run: the same requests, fleet and policy in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.commands.labrun import make_policy
from extproc.loadtest.measures import summarize_records
from extproc.loadtest.results import RunResult
from extproc.sim.fleet.fleet import Fleet
from extproc.sim.trials.suites import ScenarioSpec, Suite, make_trial_parts, slo_of
from extproc.workload.exchange import RequestRecord
from extproc.workload.flights import FleetResult, Flight, FlightState
from extproc.workload.judge import measure

PREFIX = "policy:"
"""The beginning of a target that has a twin; other gateways in front of pods are not simulated."""


def virtual_run(
    suite: Suite,
    scenario: ScenarioSpec,
    rule: str,
    *,
    rate_rps: float,
    seed: int,
    num_requests: int | None = None,
) -> RunResult:
    """Run a policy in virtual time.

    Args:
        suite: Where settings come from.
        scenario: One of its scenarios.
        rule: The policy, without `policy:`.
        rate_rps: Offered rate.
        seed: Of workload and fleet.
        num_requests: Instead of the suite's.

    Raises:
        SuiteError: The scenario cannot be run.
        PolicyError: The rule cannot be had.
    """
    settings, workload, events = make_trial_parts(
        suite, scenario, rate_rps=rate_rps, seed=seed, num=num_requests
    )
    result = Fleet(
        settings, workload, make_policy(rule), seed=seed, events=events, policy_name=rule
    ).run()
    slo = slo_of(suite)
    return RunResult(
        target=f"{PREFIX}{rule}",
        scenario=scenario.name,
        rate_rps=rate_rps,
        seed=seed,
        kind="virtual",
        summary=summarize_records(records_of(result), slo=slo, warm_up_s=settings.warm_up_s),
        metrics=measure(result, slo),
        knows_pods=True,
    )


def twins_of(suite: Suite, runs: Sequence[RunResult], *, more_rates: int = 0) -> list[RunResult]:
    """Virtual twins of real runs, with all of the suite's seeds, and of the rates between theirs.

    What the laboratory predicts is what its seeds agree on, however few of them were run for real.

    Args:
        suite: What the real runs ran.
        runs: Any; those of targets that are not rules of this suite's laboratory have no twin.
        more_rates: So many rates between two of the real ones, for lines.

    Raises:
        SuiteError: A scenario cannot be run.
        PolicyError: A rule cannot be had.
    """
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    wanted: dict[tuple[str, str, float, int], None] = {}
    for run in runs:
        if run.kind == "real" and run.target.startswith(PREFIX) and run.scenario in scenarios:
            rates = sorted({r.rate_rps for r in runs if r.scenario == run.scenario})
            for rate_rps in _filled(run.rate_rps, rates, more_rates):
                wanted[run.scenario, run.policy, rate_rps, run.seed] = None
            for seed in suite.seeds:
                wanted[run.scenario, run.policy, run.rate_rps, seed] = None
    return [
        virtual_run(suite, scenarios[name], rule, rate_rps=rate_rps, seed=seed)
        for name, rule, rate_rps, seed in wanted
    ]


def _filled(rate_rps: float, rates: Sequence[float], num: int) -> list[float]:
    """A rate, and `num` between it and the next one."""
    above = next((rate for rate in rates if rate > rate_rps), rate_rps)
    if above == rate_rps:
        return [rate_rps]
    return [round(rate_rps * (above / rate_rps) ** (k / (num + 1)), 3) for k in range(num + 1)]


def records_of(result: FleetResult) -> list[RequestRecord]:
    """A run in virtual time as records, so that it is told in the same words as a real one.

    Times between tokens are not in it, and its generator is never late.
    """
    return [_record(index, flight) for index, flight in enumerate(result.flights)]


def _record(index: int, flight: Flight) -> RequestRecord:
    arrival, is_finished = flight.arrival, flight.state is FlightState.FINISHED
    refused = f"http_{flight.status}" if flight.status else flight.state.value
    return RequestRecord(
        index=index,
        adapter=arrival.adapter,
        tenant=arrival.tenant,
        at_s=arrival.at_s,
        sent_s=arrival.at_s,
        ended_s=arrival.at_s if flight.ended_s is None else flight.ended_s,
        first_token_s=flight.first_token_s,
        num_tokens=arrival.output_tokens if is_finished else 0,
        wanted_tokens=arrival.output_tokens,
        prompt_tokens=arrival.prompt_tokens,
        status=200 if is_finished else flight.status,
        error="" if is_finished else refused,
        served_by=flight.pod,
    )
