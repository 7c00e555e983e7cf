"""The virtual twin of a real run: the same requests, fleet and policy in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from extproc.commands.labrun import make_policy
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.loadtest.measures import summarize_records
from extproc.lab.loadtest.results import LoadResult, RunResult
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import in_fleet, make_trial_parts, slo_of, variant_of
from extproc.lab.trials.summary import FIXED
from extproc.lab.trials.table import places
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.flights import FleetResult, Flight, FlightState
from extproc.lab.workload.judge import measure

PREFIX = "policy:"
"""Prefix of the targets that have a twin; other gateways are not simulated."""


def virtual_run(
    suite: Suite,
    scenario: ScenarioSpec,
    policy: str,
    *,
    rate_rps: float,
    seed: int,
    num_requests: int | None = None,
) -> RunResult:
    """Run a scenario of a suite with a policy, or a variant, in virtual time.

    `num_requests` replaces the suite's number.

    Raises:
        PlanError: The scenario cannot be run.
        PolicyError: The policy cannot be loaded.
    """
    variant, slo = variant_of(suite, policy), slo_of(suite)
    changed = in_fleet(scenario, variant.fleet)
    settings, workload, events = make_trial_parts(
        suite, changed, rate_rps=rate_rps, seed=seed, num=num_requests
    )
    make, tenants = make_policy(variant.policy), workload.tenants
    result = Fleet(
        settings, workload, make, seed=seed, events=events, policy_name=variant.policy
    ).run()
    records = records_of(result)
    return RunResult(
        target=f"{PREFIX}{policy}",
        scenario=scenario.name,
        rate_rps=rate_rps,
        seed=seed,
        kind="virtual",
        summary=summarize_records(records, slo=slo, warm_up_s=settings.warm_up_s, tenants=tenants),
        metrics=measure(result, slo),
        knows_pods=True,
    )


def twins_of(suite: Suite, runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the virtual twins of real runs.

    Runs of targets that the laboratory does not simulate have no twin.

    Raises:
        PlanError: A scenario cannot be run.
        PolicyError: A policy cannot be loaded.
    """
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    return [
        virtual_run(
            suite, scenarios[run.scenario], run.policy, rate_rps=run.rate_rps, seed=run.seed
        )
        for run in runs
        if run.kind == "real" and run.target.startswith(PREFIX) and run.scenario in scenarios
    ]


def records_of(result: FleetResult) -> list[RequestRecord]:
    """Return a virtual run as records, so that it is summarized like a real one.

    There are no times between tokens, and requests are never sent late.
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
        code=flight.reason,
        served_by=flight.pod,
    )


def load_test_tables(result: LoadResult) -> str:
    """Return the runs of a load test by place, with their virtual twins' figures in brackets.

    Raises:
        ValueError: It has no suite.
    """
    if result.suite is None:
        raise ValueError(f"{result.name}: a load test without a suite")
    real, virtual = (
        {
            "suite": {"baseline": result.suite.baseline},
            "summary": {},
            "trials": [
                {"sweep": FIXED, "value": run.rate_rps, "runs": [measures], **measures}
                for run in result.runs
                if run.kind == kind
                for measures in [{**asdict(run.metrics), **_names(run)}]
            ],
        }
        for kind in ("real", "virtual")
    )
    return places(real, virtual)


def _names(run: RunResult) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("scenario", "policy", "seed", "rate_rps")}
