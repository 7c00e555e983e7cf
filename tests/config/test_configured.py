"""What the file leaves open: the budget for bodies, and when old versions may go."""

from __future__ import annotations

import pytest

from extproc.config import configured
from extproc.config.file import parse_config

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("request_section", "memory_bytes", "budget_bytes"),
    [
        ("{}", 512 * MIB, 96 * MIB),
        ("{}", 64 * 1024 * MIB, 512 * MIB),
        ("{}", 32 * MIB, 27 * MIB),
        ("{max_body_bytes: 67108864}", 128 * MIB, 65 * MIB),
        ("{max_bytes_in_memory: 104857600}", 512 * MIB, 100 * MIB),
    ],
)
def test_a_quarter_of_the_memory_beside_the_program_s_and_never_less_than_one_body(
    request_section: str, memory_bytes: int, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "memory_limit_bytes", lambda: memory_bytes)
    text = f"{{discovery: {{static: []}}, request: {request_section}}}"

    assert configured.budget(parse_config(text, source="test")).max_bytes == budget_bytes


def test_a_budget_that_no_body_fits_in_is_refused() -> None:
    text = "{discovery: {static: []}, request: {max_bytes_in_memory: 1000000}}"
    with pytest.raises(Exception, match="max_bytes_in_memory"):
        parse_config(text, source="test")


def test_an_old_version_stays_until_every_router_has_listed_its_pods_models_again() -> None:
    text = "{{discovery: {{static: []}}, scrape: {{models_interval_s: {}}}}}"
    made = [configured.adapter_settings(parse_config(text.format(each))) for each in (1, 60)]
    assert [each.grace_s for each in made] == [3.0, 62.0]
