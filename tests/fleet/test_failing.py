"""Whoever fails alone is out after six failures, and nobody for what fails everywhere.

`tests.fleet.failing` tries the same on thousands of fleets, by hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import address
from tests.fleet.failing import Fleet, How, Traffic, healthy, one_bad

EXAMPLES = settings(max_examples=6)


@pytest.mark.parametrize("how", [*How])
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_a_pod_that_alone_fails_is_out_after_six_failures(how: How, seed: int) -> None:
    fleet = one_bad(seed, how)
    fleet.run(fleet.since_s + (150.0 if how is How.SILENT else 20.0))

    failed = fleet.failed_when_ejected.get(address(1), 0)
    if how in (How.CUT, How.SILENT):  # what was sent before is served in between
        assert failed <= 20
    elif how is How.ERROR_STREAM:  # with a model that others gave few answers for it hides
        assert failed <= 6 + fleet.traffic.num_models
    else:
        assert 0 < failed <= 6
    others = [each for each in fleet.failures if each != address(1)]
    assert not others


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_what_fails_everywhere_ejects_nobody(seed: int) -> None:
    """One client's requests, or many clients' from a moment on, in whatever way."""
    fleet = healthy(seed)
    fleet.run(25.0)

    assert fleet.num_ejections == 0


@pytest.mark.parametrize("how", [*How])
@pytest.mark.parametrize("policy", ["founding", "least_harm", "least_pending"])
def test_a_pod_that_fails_at_once_attracts_no_requests_before_it_is_out(
    how: How, policy: str
) -> None:
    """It fails half of its requests, so that what it serves hides the rest for a while."""
    traffic = Traffic(per_s=30.0, num_models=1, failing_ratio=0.3, failing_how=how)
    fleet = Fleet(4, traffic, policy, seed=3, since_s=5.0)
    fleet.run(25.0)
    most, least = max(fleet.sent.values()), min(fleet.sent.values())

    assert most <= 2 * least
