"""What a token may declare."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.declared import AliasTarget, Declaration, Terms
from extproc.adapters.scope import TokenFacts, TokenScope, Users, plain

A = ("a-*",)
SOURCES = {
    "b-private": "/adapters/b-private",
    "b-step": "/adapters/b/checkpoint-5",
    "b-hub": "hf:Team-B/Private",
    "b-found": "",
    "a-1": "/adapters/a-1",
}
PRIORITIES = {"base": 5, "batch": -5, "a-routed": 10, "a-low": -2}


def known(sources: Mapping[str, str] = SOURCES) -> TokenFacts:
    users = Users(sources)
    return TokenFacts(
        users.is_used_outside, lambda name: name in ("base", "batch", "a-base"), PRIORITIES.get
    )


def code(declared: Declaration, scope: TokenScope | None = None) -> str:
    excess = (scope or TokenScope(A)).excess(declared, known())
    return "" if excess is None else excess.code


def alias(*targets: str, name: str = "a-x", priority: int | None = None) -> Declaration:
    return Declaration(
        name, terms=Terms(priority=priority, targets=tuple(map(AliasTarget, targets)))
    )


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "may"),
    [
        *(("a-", True), ("a-x/y", True), ("a-x..y", True), ("a-x@2", True)),
        *(("b", False), ("A-x", False), ("xa-", False), ("a", False)),
        *(("a-x/../b", False), ("../a-x", False)),
    ],
)
def test_names_are_those_of_its_patterns(name: str, may: bool) -> None:
    assert TokenScope(A).may(name) is may
    assert TokenScope().may(name)


def test_a_name_that_could_be_a_version_of_anothers_is_not_its_own() -> None:
    assert not TokenScope(("*-sql",)).may("b@x-sql")
    assert TokenScope(("*-sql", "b")).may("b@x-sql")


def test_nothing_in_a_pattern_but_the_star_is_special() -> None:
    scope = TokenScope(("a[b]?", "x.y"))

    assert scope.may("a[b]?")
    assert not any(map(scope.may, ("ab?", "ab1", "xzy")))


def test_a_limited_token_declares_nothing_with_a_base_models_name() -> None:
    assert code(Declaration("a-base")) == "name_not_allowed"
    assert code(Declaration("b")) == "name_not_allowed"
    assert code(Declaration("a-base"), TokenScope()) == ""


# --- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        *("/adapters/b-private", "/adapters//b-private/", "/./adapters/./b-private", "/adapters"),
        *("/adapters/b-private/checkpoint-5", "/adapters/b", "/adapters/b/checkpoint-5/x/y"),
        *("hf:Team-B/Private", "hf:team-b/private"),
        *("hf:adapters/b-private", "hf:b/checkpoint-5", "hf:adapters/b"),
    ],
)
def test_without_sources_a_limited_token_declares_nothing_of_names_that_are_not_its_own(
    source: str,
) -> None:
    assert code(Declaration("a-x", source)) == "source_not_allowed"
    assert code(Declaration("x", source), TokenScope()) == ""


@pytest.mark.parametrize(
    "source",
    [
        "",
        "/adapters/a-1",
        "/adapters/a-1/x",
        "/adapters/b-privat",
        "/adapters/b-private2",
        "hf:a/b",
    ],
)
def test_without_sources_it_declares_what_nobody_else_does(source: str) -> None:
    assert code(Declaration("a-x", source)) == ""


@pytest.mark.parametrize(
    ("source", "may"),
    [
        *(("/adapters/a-x", True), ("/adapters//a-x/./y", True), ("hf:Team-A/x", True)),
        *(("hf:TEAM-A/x", True), ("/adapters/a", False), ("/adapters/b-x", False)),
        *(("hf:team-b/x", False), ("/Adapters/a-x", False), ("/x/adapters/a-x", False), ("", True)),
    ],
)
def test_with_sources_it_declares_those_alone(source: str, may: bool) -> None:
    for names in (A, ()):
        scope = TokenScope(names, ("/adapters/a-*", "hf:Team-A/*"))
        assert code(Declaration("a-x", source), scope) == ("" if may else "source_not_allowed")


PARTS = st.sampled_from(["", ".", "a", "b", "d"])
PATHS = st.lists(PARTS, max_size=3).map(lambda parts: "/" + "/".join([*parts, "d"]))


@given(st.dictionaries(st.sampled_from(["p", "q", "a-1", "a-2"]), PATHS, max_size=4), PATHS)
def test_others_use_a_source_if_theirs_is_the_same_or_above_or_below_it(
    sources: dict[str, str], path: str
) -> None:
    def parts(path: str) -> list[str]:
        return [part for part in path.split("/") if part not in ("", ".")]

    def is_above(one: str, other: str) -> bool:
        return parts(other)[: len(parts(one))] == parts(one)

    users = Users(sources)

    scopes = ((TokenScope(A), "pq"), (TokenScope(("p",)), ["q", "a-1", "a-2"]), (TokenScope(), ()))
    for scope, others in (*scopes, *scopes):
        assert users.is_used_outside(path, scope) is any(
            is_above(sources[name], path) or is_above(path, sources[name])
            for name in others
            if name in sources
        )


def test_a_plain_source_is_one_for_all_its_spellings() -> None:
    assert plain("//a/./b/") == plain("/a/b") == "/a/b"
    assert plain("hf:A/b") == plain("hf:a/B")
    assert plain("/A") != plain("/a")


# --- targets and priorities ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "may"),
    [
        *((("a-1",), True), (("base",), True), (("a-1", "base"), True)),
        *((("b-private",), False), (("a-1", "b-private"), False), (("unknown",), False)),
    ],
)
def test_a_limited_tokens_aliases_are_for_its_own_names_and_base_models(
    targets: tuple[str, ...], may: bool
) -> None:
    assert code(alias(*targets)) == ("" if may else "target_not_allowed")
    assert code(alias(*targets), TokenScope()) == ""
    assert code(alias(*targets), TokenScope(A, targets=("b-*", "unknown"))) == ""


def test_targets_of_a_token_for_all_names_may_be_limited_alone() -> None:
    scope = TokenScope(targets=("b-*",))

    assert code(alias("b-private"), scope) == code(alias("base"), scope) == ""
    assert code(alias("a-1"), scope) == "target_not_allowed"


@pytest.mark.parametrize(
    ("declared", "most"),
    [
        (Declaration("a-x"), 0),
        (Declaration("a-routed"), 10),
        (Declaration("a-low"), -2),
        (alias("base"), 0),
        (alias("base", "batch", name="a-routed"), -5),
        (alias("base", name="a-routed"), 10),
    ],
)
def test_a_limited_tokens_priority_is_at_most_that_of_configured_routes_or_0(
    declared: Declaration, most: int
) -> None:
    def code_of(priority: int) -> str:
        terms = Terms(priority=priority, targets=declared.terms.targets)
        return code(Declaration(declared.name, terms=terms))

    assert code_of(most) == code_of(most - 1) == ""
    assert code_of(most + 1) == code_of(2**31 - 1) == "priority_not_allowed"


def test_where_nothing_is_said_the_routes_priority_counts() -> None:
    assert code(alias("batch")) == "priority_not_allowed", "0, and its target's is -5"
    assert code(alias("batch", name="a-low")) == "priority_not_allowed"
    assert code(alias("base", name="a-low")) == ""


def test_a_named_priority_counts_before_routes() -> None:
    for names in (A, ()):
        scope = TokenScope(names, max_priority=3)
        assert code(alias("batch", priority=3), scope) == ""
        assert code(alias("base", priority=4), scope) == "priority_not_allowed"
        assert code(Declaration("a-routed"), scope) == "priority_not_allowed"
    assert code(alias("base", priority=2**31 - 1), TokenScope()) == ""
