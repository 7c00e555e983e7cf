"""Whose word counts, where several declare."""

from __future__ import annotations

from random import Random

import pytest

from extproc.adapters.declared import Declaration
from extproc.routing.conflicts import MAX_LOSSES, Loss, Merged, Offer, RuleSet, merge, with_parts
from extproc.routing.modelroutes import ModelRoute
from extproc.routing.rewrites import Rewrites, Rule


def offer(name: str, origin: str, *, route: str = "", source: str = "") -> Offer:
    claims = ModelRoute(route, (name,), priority=1) if route else None
    return Offer(Declaration(name, source=source, origin=origin), route=claims)


def rules(origin: str, *each: tuple[tuple[str, ...], str]) -> RuleSet:
    """Rules of one object: what they match, and the one target."""
    made = (Rule(origin, models, ((target, None),)) for models, target in each)
    return RuleSet(origin, tuple(made))


def rewritten(merged: Merged, *models: str) -> list[str]:
    rewrites = Rewrites(merged.rules, rng=Random(1))
    return [rewrites.draw(model).model for model in models]


def owners(merged: Merged) -> dict[str, str]:
    return {name: each.declaration.origin for name, each in merged.offers.items()}


# --- adapters -----------------------------------------------------------------------------------


def test_the_configuration_counts_before_an_llmroute() -> None:
    merged = merge(configured=[offer("a", "config")], routes=[offer("a", "r/1"), offer("b", "r/2")])

    assert owners(merged) == {"a": "config", "b": "r/2"}
    assert merged.lost == {"r/1": Loss(is_whole=True, why="a is declared by config already")}


def test_of_two_llmroutes_the_older_one_counts() -> None:
    merged = merge(routes=[offer("a", "r/old"), offer("a", "r/new", route="n/new")])

    assert owners(merged) == {"a": "r/old"}
    assert merged.lost == {"r/new": Loss(is_whole=True, why="a is declared by r/old already")}
    assert merged.routes == ()


@pytest.mark.parametrize(("first", "second"), [("sql", "sql@2"), ("sql@2", "sql")])
def test_of_two_names_that_pods_could_mistake_for_each_other_the_first_counts(
    first: str, second: str
) -> None:
    merged = merge(configured=[offer(first, "config")], routes=[offer(second, "r/1")])

    assert owners(merged) == {first: "config"}
    assert merged.lost["r/1"].is_whole
    assert f"{first}, which is declared" in merged.lost["r/1"].why


def test_a_configured_route_says_the_priority_and_the_llmroute_the_adapter() -> None:
    merged = merge(
        routes=[offer("a", "r/1", route="n/1"), offer("b", "r/2", route="n/2")], routed={"a"}
    )

    assert owners(merged) == {"a": "r/1", "b": "r/2"}
    assert [each.name for each in merged.routes] == ["n/2"]
    why = "priority and objectives of a: those of the configured route count"
    assert merged.lost == {"r/1": Loss(is_whole=False, why=why)}


def test_a_configured_route_takes_nothing_from_an_llmroute_that_asks_for_no_priority() -> None:
    assert merge(routes=[offer("a", "r/1")], routed={"a"}).lost == {}


# --- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_configured", [True, False])
def test_a_declared_name_is_no_alias(is_configured: bool) -> None:
    declared, aliases = [offer("a", "its origin")], [rules("w", (("a", "b"), "target"))]
    if is_configured:
        merged = merge(configured=declared, rewrites=aliases)
    else:
        merged = merge(routes=declared, rewrites=aliases)

    assert rewritten(merged, "a", "b") == ["a", "target"]
    assert merged.lost == {"w": Loss(is_whole=False, why="other objects decide for a (its origin)")}


def test_an_object_all_of_whose_rules_are_for_declared_names_loses_wholly() -> None:
    merged = merge(routes=[offer("a", "r/1")], rewrites=[rules("w", (("a",), "target"))])

    assert merged.rules == ()
    assert merged.lost["w"].is_whole


def test_a_generic_rule_leaves_declared_names_alone() -> None:
    merged = merge(
        routes=[offer("a", "r/1")], rewrites=[rules("w", ((), "any"), (("b",), "exact"))]
    )

    assert rewritten(merged, "a", "b", "c", "") == ["a", "exact", "any", "any"]
    assert merged.lost == {}


def test_of_two_objects_with_a_rule_for_one_name_the_first_counts() -> None:
    old, new = rules("old", (("a",), "from-old")), rules("new", (("a", "b"), "from-new"))
    merged = merge(rewrites=[old, new])

    assert rewritten(merged, "a", "b", "c") == ["from-old", "from-new", "c"]
    assert merged.lost == {"new": Loss(is_whole=False, why="other objects decide for a (old)")}


def test_exact_rules_count_before_generic_ones_whosever_they_are() -> None:
    merged = merge(rewrites=[rules("old", ((), "any")), rules("new", (("a",), "exact"))])

    assert rewritten(merged, "a", "b") == ["exact", "any"]
    assert merged.lost == {}


def test_of_generic_rules_the_first_counts() -> None:
    merged = merge(rewrites=[rules("old", ((), "first")), rules("new", ((), "second"))])

    assert rewritten(merged, "a") == ["first"]
    why = "other objects decide for every other model (old)"
    assert merged.lost == {"new": Loss(is_whole=True, why=why)}


def test_of_one_object_s_rules_for_one_name_the_first_counts() -> None:
    merged = merge(rewrites=[rules("w", (("a",), "first"), (("a",), "second"))])

    assert rewritten(merged, "a") == ["first"]
    assert not merged.lost["w"].is_whole


def test_of_very_many_losses_a_few_are_told() -> None:
    names = tuple(f"n{number}" for number in range(1000))
    merged = merge(rewrites=[rules("old", (names, "x")), rules("new", (names, "y"))])

    told = merged.lost["new"].why
    assert told.count("(old)") == MAX_LOSSES
    assert told.endswith("and 995 more")


def test_what_the_configuration_rewrites_is_left_to_it() -> None:
    """An adapter of that name is declared nonetheless: it may be one of the targets."""
    merged = merge(
        routes=[offer("a", "r/1")],
        rewrites=[rules("w/1", (("a",), "x")), rules("w/2", (("c", "b"), "x"))],
        aliased={"a", "c"},
    )

    assert owners(merged) == {"a": "r/1"}
    assert rewritten(merged, "a", "b", "c") == ["a", "x", "c"]
    told = "other objects decide for"
    assert merged.lost == {
        "w/1": Loss(is_whole=True, why=f"{told} a (config)"),
        "w/2": Loss(is_whole=False, why=f"{told} c (config)"),
    }


def test_parts_that_do_not_count_for_another_reason_are_said_after_what_is_lost() -> None:
    lost = {"a": Loss(is_whole=False, why="x"), "b": Loss(is_whole=True, why="y")}

    assert with_parts(lost, {"a": "v2", "c": "v3"}) == {
        "a": Loss(is_whole=False, why="x; v2"),
        "b": Loss(is_whole=True, why="y"),
        "c": Loss(is_whole=False, why="v3"),
    }
