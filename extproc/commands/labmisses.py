"""Policies at fixed rates: for their misses, and for what overload leaves of goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import msgspec

from extproc.commands.labrun import Watching, run_all, unwatched
from extproc.loadtest.results import LoadResult
from extproc.sim.trials.misses import misses_table, plan_misses, tails_table
from extproc.sim.trials.overload import overload_tables, plan_overload
from extproc.sim.trials.suites import read_suite
from extproc.sim.trials.trials import TrialResult


def misses(
    name: str,
    places: Sequence[str],
    policies: Sequence[str],
    *,
    num_seeds: int,
    num_requests: int,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    profile: Mapping[str, float] = MappingProxyType({}),
    jobs: int = 0,
    watching: Watching = unwatched,
) -> str:
    """Return the misses of policies at fixed rates, and the tails of adapters, as Markdown tables;
    see `plan_misses`.

    The seeds are as many as `num_seeds`, counted from the suite's first.

    Raises:
        SuiteError: The suite, a place, a policy or a key cannot be used.
    """
    suite = read_suite(name)
    seeds = [suite.seeds[0] + number for number in range(num_seeds)]
    suite = msgspec.structs.replace(suite, seeds=seeds, num_requests=num_requests)
    trials = plan_misses(suite, places, policies, fleet=fleet, profile=profile)
    results = run_all(trials, jobs, watching)
    return f"{misses_table(results)}\n\n{tails_table(results)}"


def overload(
    name: str,
    policies: Sequence[str] = (),
    *,
    num_seeds: int,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    jobs: int = 0,
    watching: Watching = unwatched,
) -> str:
    """Return goodput beyond capacity, and what tenants get, as Markdown; see `plan_overload`.

    Raises:
        SuiteError: The suite, a policy or a key cannot be used.
    """
    suite = read_suite(name)
    suite = msgspec.structs.replace(suite, seeds=suite.seeds[:num_seeds])
    trials = plan_overload(suite, policies, fleet=fleet)
    return overload_tables(suite, run_all(trials, jobs, watching))


def load_test_tables(result: LoadResult) -> str:
    """Return the tables of `overload` about a load test: its real runs, then their virtual twins.

    Raises:
        ValueError: It has no suite.
    """
    if result.suite is None:
        raise ValueError(f"{result.name}: a load test without a suite")
    tables = list[str]()
    for kind in ("real", "virtual"):
        results = [
            TrialResult(
                run.scenario, run.policy, run.seed, "", run.rate_rps, runs=[asdict(run.metrics)]
            )
            for run in result.of_kind(kind)
        ]
        tables.append(f"{kind}:\n\n{overload_tables(result.suite, results)}")
    return "\n".join(tables)
