"""The ranks that the operator states: by name first, then by the first pattern."""

from __future__ import annotations

import pytest

from extproc.core.ranks import Ranks

RANKS = Ranks.of_rules({"*-r64": 64, "sql": 8, "big-*": 32, "big-r64": 16, "[x]": 4})


@pytest.mark.parametrize(
    ("adapter", "rank"),
    [("sql", 8), ("a-r64", 64), ("big-r64", 16), ("big-a-r64", 64), ("big-a", 32), ("[x]", 4)],
)
def test_a_name_counts_before_the_patterns_and_these_in_their_order(
    adapter: str, rank: int
) -> None:
    assert RANKS.of(adapter) == rank


@pytest.mark.parametrize("adapter", ["other", "", "SQL", "x"])
def test_an_adapter_that_nothing_names_has_no_known_rank(adapter: str) -> None:
    assert RANKS.of(adapter) is None
