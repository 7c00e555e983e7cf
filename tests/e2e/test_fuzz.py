"""The short fuzz of the whole service: each kind of attacker, and no harm to other clients.

The long one, with times compared, is `make fuzz-service`.
"""

from __future__ import annotations

import pytest

from extproc.envoy.bootstrap import BootstrapOptions, Mode
from tests.e2e.fuzz.attack import Plan, choices
from tests.e2e.fuzz.outcome import render
from tests.e2e.fuzz.scenario import Scenario, run
from tests.e2e.fuzz.service import blocks

MODES = [
    Mode.ORIGINAL_DST,
    *(pytest.param(mode, marks=pytest.mark.long) for mode in Mode if mode is not Mode.ORIGINAL_DST),
]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_honest_clients_are_served_whatever_hostile_clients_pods_and_watchers_do(
    mode: Mode,
) -> None:
    """The router lives within its memory, and its counts add up afterwards."""
    # Not only on idle processors: on a busy machine each kind must have its turn, too.
    plan = Plan(seed=20, rate_per_s=8.0, hold_s=4.0, yields=False)
    result = run(
        Scenario(
            blocks(1, quiet_s=1.0, attack_s=20.0, plan=plan),
            BootstrapOptions(mode=mode, message_timeout_s=60.0),
            honest_per_s=10.0,
            seed=20,
        )
    )

    tallies = [phase.attack for phase in result.phases if phase.attack is not None]
    begun = {name for tally in tallies for name in tally.begun}
    assert result.faults == [], render(result)
    assert result.most("requests") > 0
    assert {name for name, _ in choices(())} <= begun
    outcomes = {outcome for tally in tallies for outcome in tally.outcomes}
    assert not {each for each in outcomes if each.endswith(": broke")}, "an attacker's own fault"
