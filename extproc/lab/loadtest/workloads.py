"""Workloads by name.

The generators are the laboratory's: the same name, rate and seed give the same requests in a real
and in a virtual run. A number of requests that is asked for is exact here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import (
    PlanError,
    make_trial_parts,
    read_suite,
    scenarios_of,
    with_workload,
)
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.traces import RANK, read_trace

NAMED = "workloads"
"""The suite whose scenarios need no other name than their own, and the fleet for all workloads."""


@cache
def _named() -> Suite:
    return read_suite(NAMED)


def names() -> Sequence[str]:
    """Return the names of workloads that need neither a file nor a suite's name."""
    return [scenario.name for scenario in _named().scenarios]


def make(
    name_or_path: str,
    *,
    rate_rps: float | None,
    num_requests: int | None,
    seed: int,
    num_adapters: int | None = None,
) -> Workload:
    """Return a workload by its name; None leaves a default unchanged.

    Args:
        name_or_path: One of `names()`, `SUITE/SCENARIO` (as in the laboratory, flash crowds
            included), `SUITE.yaml/SCENARIO`, or the file of a trace, as `read_trace` reads it.
        rate_rps: Requests per second.
        num_requests: Their number; the first of a trace, which may have fewer.
        seed: Of everything random; ignored for a trace.
        num_adapters: Number of adapters.

    Raises:
        PlanError: There is no such workload.
    """
    if rate_rps is not None and not rate_rps > 0:
        raise PlanError(f"a rate of {rate_rps:g} requests per second is not positive")
    if num_requests is not None and num_requests < 1:
        raise PlanError(f"{num_requests} requests are not a workload")
    if num_adapters is not None and num_adapters < 1:
        raise PlanError(f"{num_adapters} adapters are not enough")
    if (path := Path(name_or_path)).is_file():
        if num_adapters is not None:
            raise PlanError(f"{path}: a trace has the adapters that it has")
        return _recorded(path, rate_rps, num_requests)
    suite_name, slash, scenario_name = name_or_path.rpartition("/")
    if not slash and name_or_path not in names():
        raise PlanError(
            f"no workload {name_or_path!r}: neither a file, nor SUITE/SCENARIO, nor one of "
            f"{', '.join(names())}"
        )
    suite = read_suite(suite_name) if slash else _named()
    (scenario,) = scenarios_of(suite, [scenario_name])
    scenario = with_workload(scenario, num_adapters=num_adapters)
    rate_rps = suite.rates_of(scenario)[0] if rate_rps is None else rate_rps
    workload = _made(suite, scenario, rate_rps, num_requests, seed)
    if num_adapters is not None and len(workload.adapters) != num_adapters:
        raise PlanError(f"{name_or_path}: the number of adapters is part of what was recorded")
    name = f"{Path(suite_name).stem}/{scenario_name}" if slash else scenario_name
    return replace(workload, name=name)


def _made(
    suite: Suite, scenario: ScenarioSpec, rate_rps: float, num: int | None, seed: int
) -> Workload:
    """Return a scenario's requests, exactly `num` of them: a generator comes near it alone."""
    for times in (1, 2, 4, 8):
        wanted = with_workload(scenario, num_requests=num and num * times)
        _, workload, _ = make_trial_parts(suite, wanted, rate_rps=rate_rps, seed=seed)
        if num is None or len(workload.arrivals) >= num:
            break
    cut = replace(workload, arrivals=workload.arrivals[:num])
    return cut.scaled(rate_rps / cut.rate_rps) if num and cut.rate_rps else cut


def renamed(workload: Workload, listed: Sequence[str]) -> Workload:
    """Return the same requests for the adapters that an endpoint lists.

    A workload with listed adapters only is returned unchanged. Otherwise the most popular adapter
    gets the first listed name and so on; with fewer names than adapters, popular adapters share
    names with rare ones.

    Raises:
        PlanError: Nothing is listed, and the workload has adapters.
    """
    asked = [name for name in workload.shares if name is not None]
    if set(asked) <= set(listed):
        return workload
    if not listed:
        raise PlanError("the endpoint lists nothing that could stand for the adapters")
    by_popularity = [*asked, *sorted(set(workload.adapters) - set(asked))]
    name_of: dict[str | None, str | None] = {None: None}
    name_of.update(zip(by_popularity, cycle(listed), strict=False))
    ranks: dict[str, int] = {}
    for adapter in by_popularity:
        ranks.setdefault(name_of[adapter] or "", workload.adapters[adapter])
    return replace(
        workload,
        arrivals=tuple(replace(a, adapter=name_of[a.adapter]) for a in workload.arrivals),
        adapters=ranks,
    )


def _recorded(path: Path, rate_rps: float | None, num: int | None) -> Workload:
    try:
        workload = read_trace(path, ranks=(RANK,))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    workload = replace(workload, arrivals=workload.arrivals[:num])
    if rate_rps is None:
        return workload
    if not workload.rate_rps:
        raise PlanError(f"{path}: everything comes at once, which has no rate to change")
    return workload.scaled(rate_rps / workload.rate_rps)
