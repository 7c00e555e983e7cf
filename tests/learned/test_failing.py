"""Whoever fails alone is out after six failures at most, and nobody for what fails everywhere.

`tests.learned.failing` tries the same on thousands of fleets, by hand.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.builders import address
from tests.conftest import some
from tests.learned.failing import POLICIES, Fleet, How, Traffic, healthy, one_bad

SEEN = [how for how in How if how not in (How.LONG_ERROR_STREAM, How.SILENT)]


def num_failed(how: How, seed: int, *, for_s: float = 20.0) -> int:
    """The failures of the only bad pod of a random fleet until it is out, all if it never is."""
    fleet = one_bad(seed, how)
    fleet.run(fleet.since_s + for_s, ends_when_all_bad_are_out=True)
    assert {*fleet.failures} <= {address(1)}
    return fleet.failed_when_ejected.get(address(1), fleet.failures[address(1)])


@pytest.mark.parametrize("how", SEEN)
@pytest.mark.parametrize("seed", some([0, 26, 1, 2, 72], 2))
def test_a_pod_that_alone_fails_is_out_after_six_failures(how: How, seed: int) -> None:
    """In the last fleets nothing that others were sent meanwhile has ended at the sixth."""
    assert num_failed(how, seed) <= 6


def test_a_pod_that_alone_answers_with_a_long_error_is_out_once_its_models_are_known() -> None:
    """Others must have given ten answers for a model before its short ones show as errors."""
    found = [num_failed(How.LONG_ERROR_STREAM, seed) for seed in some(range(12), 6)]

    assert sum(num <= 6 for num in found) >= 0.6 * len(found)
    assert max(found) <= 12


def test_a_pod_whose_answers_alone_never_come_is_out_soon() -> None:
    found = [num_failed(How.SILENT, seed, for_s=150.0) for seed in some(range(6), 2)]

    assert max(found) <= 20


@pytest.mark.parametrize("seed", some(range(12), 4))
def test_what_fails_everywhere_ejects_nobody(seed: int) -> None:
    """One client's requests, or many clients' from a moment on, in whatever way."""
    fleet = healthy(seed)
    fleet.run(25.0)

    assert fleet.num_ejections == 0


@pytest.mark.parametrize(("how", "policy"), [*zip(How, cycle(POLICIES), strict=False)])
def test_a_pod_that_fails_at_once_attracts_no_requests_before_it_is_out(
    how: How, policy: str
) -> None:
    """It fails half of its requests, so that what it serves hides the rest for a while."""
    traffic = Traffic(per_s=30.0, num_models=1, failing_ratio=0.3, failing_how=how)
    fleet = Fleet(4, traffic, policy, seed=3, since_s=5.0)
    fleet.run(25.0)
    most, least = max(fleet.sent.values()), min(fleet.sent.values())

    assert most <= 2 * least
