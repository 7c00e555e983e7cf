"""The virtual fleet agrees with fake pods behind a real Envoy. `pytest -s` prints both.

The pods run the same engine in real time; Envoy, the router's process, HTTP, scrapes and the access
log are real. So this checks the virtual fleet in all but the engine: when routers learn what,
and in which order things happen. By default round robin's counts are judged: its loads, and how
its requests spread over the pods. Times, and what follows from times under other policies, are
spoilt by a busy machine: EXTPROC_FLEET_TIMES=1 judges them, too. EXTPROC_FLEET_S has the length of
a run in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from extproc.lab.fleet.settings import FleetSettings
from tests.e2e.realfleet import (
    COUNTS,
    POLICIES,
    PROFILE,
    SETTINGS,
    Line,
    RealRun,
    compare,
    run_undisturbed,
    small_workload,
    table,
)

SECONDS = float(os.environ.get("EXTPROC_FLEET_S", "25"))
WITH_TIMES = "EXTPROC_FLEET_TIMES" in os.environ

pytestmark = [pytest.mark.long, pytest.mark.timeout(100 + 8 * SECONDS)]


_runs: dict[str, RealRun] = {}


async def real_run(policy: str) -> RealRun:
    """Return the run that all tests share; skip if the machine is too busy to measure."""
    if policy not in _runs:
        _runs[policy] = await run_undisturbed(small_workload(SECONDS), policy)
    if _runs[policy].disturbance:
        pytest.skip(f"the machine is too busy: {_runs[policy].disturbance}")
    return _runs[policy]


def differing(lines: Sequence[Line]) -> list[str]:
    """Return the names of the judged figures in which the two differ.

    p99 is that of ten requests, which one pause of the machine delays: shown, never judged.
    """
    judged = [
        line for line in lines if line.name in COUNTS or (WITH_TIMES and "p99" not in line.name)
    ]
    return [line.name for line in judged if not line.is_met]


@pytest.mark.parametrize("policy", POLICIES if WITH_TIMES else ["round_robin"])
async def test_the_virtual_fleet_agrees_with_pods_behind_envoy(policy: str) -> None:
    real = await real_run(policy)
    lines = compare(real, policy)
    print("\n" + table(real, policy, lines))

    assert differing(lines) == []


def slower_loads(settings: FleetSettings) -> FleetSettings:
    return replace(settings, profile=replace(PROFILE, disk_load_per_rank_s=0.005))


def one_more_slot(settings: FleetSettings) -> FleetSettings:
    return replace(settings, max_loras=settings.max_loras + 1)


def a_smaller_cache(settings: FleetSettings) -> FleetSettings:
    return replace(settings, max_cpu_loras=settings.max_loras)


def slower_steps(settings: FleetSettings) -> FleetSettings:
    return replace(settings, profile=replace(PROFILE, step_s=PROFILE.step_s * 1.15))


CHANGED_COUNTS = [one_more_slot, a_smaller_cache]
CHANGED_TIMES = [slower_loads, slower_steps]


@pytest.mark.parametrize("change", CHANGED_COUNTS + CHANGED_TIMES * WITH_TIMES)
async def test_a_virtual_fleet_with_another_setting_does_not_agree(
    change: Callable[[FleetSettings], FleetSettings],
) -> None:
    """The comparison detects wrong constants."""
    real = await real_run("round_robin")
    lines = compare(real, "round_robin", change(SETTINGS), num_seeds=3)
    print("\n" + table(real, change.__name__, lines))

    assert differing(lines)
