"""The ranks that the operator states: by name first, then by the first pattern."""

from __future__ import annotations

import pytest

from extproc.routing import admission
from extproc.routing.admission import MAX_REMEMBERED, Ranks

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


@pytest.mark.parametrize(
    ("pattern", "adapter"), [("org/[v2]-*", "org/[v2]-sql"), ("*?", "what?"), ("[!a]*]", "[!a]b]")]
)
def test_only_the_star_of_a_pattern_is_special(pattern: str, adapter: str) -> None:
    assert Ranks.of_rules({pattern: 8}).of(adapter) == 8


@pytest.mark.parametrize(("pattern", "adapter"), [("org/[v2]-*", "org/v-sql"), ("?*", "ab")])
def test_what_a_shell_would_match_besides_is_not_meant(pattern: str, adapter: str) -> None:
    assert Ranks.of_rules({pattern: 8}).of(adapter) is None


def test_patterns_are_compared_with_an_adapter_once_for_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission._first_match.cache_clear()
    compared: list[tuple[str, str]] = []
    monkeypatch.setattr(admission, "fnmatchcase", lambda *each: compared.append(each))
    for _ in range(3):
        assert Ranks.of_rules({"once-*": 8, "twice-*": 8}).of("requested often") is None

    assert len(compared) == 2


def test_no_more_adapters_are_remembered_than_that() -> None:
    for number in range(2 * MAX_REMEMBERED):
        RANKS.of(f"nobody-{number}")

    assert admission._first_match.cache_info().currsize == MAX_REMEMBERED
