"""What the file leaves open: the budget for bodies, how long the default policy holds."""

from __future__ import annotations

import pytest

from extproc.app import settings
from extproc.app.routing import make_policy
from extproc.config.file import parse_config
from extproc.core.policies import LeastHarm

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("request_section", "memory_bytes", "budget_bytes"),
    [
        ("{}", 512 * MIB, 128 * MIB),
        ("{}", 64 * 1024 * MIB, 512 * MIB),
        ("{}", 32 * MIB, 17 * MIB),
        ("{max_body_bytes: 67108864}", 128 * MIB, 65 * MIB),
        ("{max_bytes_in_memory: 104857600}", 512 * MIB, 100 * MIB),
    ],
)
def test_a_quarter_of_the_memory_and_never_less_than_one_body(
    request_section: str, memory_bytes: int, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "memory_limit_bytes", lambda: memory_bytes)
    text = f"{{discovery: {{static: []}}, request: {request_section}}}"

    assert settings.budget(parse_config(text, source="test")).max_bytes == budget_bytes


def test_a_budget_that_no_body_fits_in_is_refused() -> None:
    text = "{discovery: {static: []}, request: {max_bytes_in_memory: 1000000}}"
    with pytest.raises(Exception, match="max_bytes_in_memory"):
        parse_config(text, source="test")


@pytest.mark.parametrize(("max_hold_s", "hold_s"), [(60, 4.0), (8, 4.0), (3, 1.5), (0, 0.0)])
def test_unless_told_the_default_policy_holds_for_half_of_the_limit_at_most(
    max_hold_s: float, hold_s: float
) -> None:
    text = f"{{discovery: {{static: []}}, request: {{max_hold_s: {max_hold_s}}}}}"
    policy = make_policy(parse_config(text, source="test"))

    assert isinstance(policy, LeastHarm)
    assert policy.hold_s == hold_s
