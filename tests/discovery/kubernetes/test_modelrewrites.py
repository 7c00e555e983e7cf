"""InferenceModelRewrites as an API server sends them, and the rules that they give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from extproc.discovery.kubernetes.declarers import DeclaredObject
from extproc.discovery.kubernetes.modelrewrites import rewrites_of
from extproc.discovery.kubernetes.objects import rewrites_query
from extproc.routing.conflicts import RuleSet
from extproc.routing.rewrites import Rule
from tests.discovery.kubernetes.declared import POOL, POOLS, item, listed
from tests.discovery.kubernetes.hostile import JSON, changed


def rewrite(*rules: Any, pool: Any = POOL) -> dict[str, Any]:
    return {"poolRef": pool, "rules": list(rules)}


def rule(*models: str, **weights: int | None) -> dict[str, Any]:
    """A rule with these matches, and targets with these weights."""
    return {
        "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
        "targets": [
            {"modelRewrite": name} | ({} if weight is None else {"weight": weight})
            for name, weight in weights.items()
        ],
    }


def read(spec: Any) -> list[DeclaredObject[RuleSet]]:
    declared = rewrites_of(POOLS)
    return declared.read(listed(rewrites_query(keeper=declared), item(spec)))


def found(spec: Any) -> tuple[RuleSet, str] | None:
    """The rules of an object, and what of it has no effect; None if it is not ours."""
    for each in read(spec):
        if each.declared is None:
            raise ValueError(each.problem)
        return each.declared, each.ignored
    return None


def rules_of(spec: Any) -> tuple[Rule, ...]:
    rules = found(spec)
    assert rules is not None
    assert rules[0].origin == "inferencemodelrewrite n/it"
    assert rules[1] == ""
    return rules[0].rules


def test_matches_are_alternatives_and_weights_stay_as_they_are() -> None:
    spec = rewrite(rule("a", "b", "a", v1=90, v2=10), rule("c", v1=None, v2=None))

    assert rules_of(spec) == (
        Rule("inferencemodelrewrite n/it", ("a", "b"), (("v1", 90), ("v2", 10))),
        Rule("inferencemodelrewrite n/it", ("c",), (("v1", None), ("v2", None))),
    )


@pytest.mark.parametrize("matches", [{"matches": []}, {"matches": None}, {}])
def test_a_rule_without_matches_is_generic(matches: dict[str, Any]) -> None:
    spec = rewrite(matches | {"targets": [{"modelRewrite": "x"}]})

    assert rules_of(spec) == (Rule("inferencemodelrewrite n/it", (), (("x", None),)),)


def test_the_type_of_a_match_may_be_left_out() -> None:
    spec = rewrite({"matches": [{"model": {"value": "a"}}], "targets": [{"modelRewrite": "x"}]})

    assert rules_of(spec)[0].models == ("a",)


@pytest.mark.parametrize("rules", [[], None])
def test_an_object_without_rules_gives_none(rules: Any) -> None:
    assert rules_of({"poolRef": POOL, "rules": rules}) == ()


def test_the_group_and_the_kind_of_a_pool_may_be_left_out() -> None:
    assert found(rewrite(rule("a", x=1), pool={"name": "pool"})) is not None


@pytest.mark.parametrize(
    "pool",
    [
        POOL | {"name": "another"},
        POOL | {"group": "inference.networking.x-k8s.io"},
        POOL | {"kind": "Service"},
        *({}, None, "pool", {"name": 7}),
    ],
)
def test_an_object_of_anything_else_is_not_ours(pool: Any) -> None:
    assert found(rewrite(rule("a", x=1), pool=pool)) is None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (rule("a"), "length"),
        (rule("", x=1), "length"),
        (rule("a", x=0), r">= 1"),
        (rule("a", x=1_000_001), r"<= 1000000"),
        (rule("a", **{"x\n": 1}), r"spec.rules\[1\]: 'x\\n' is no model's name"),
        (rule("a", **{"x" * 257: 1}), "is no model's name"),
        (rule("a") | {"targets": None}, "Expected `array`"),
        (rule(x=1) | {"matches": [{"model": {"type": "Prefix", "value": "a"}}]}, "Prefix"),
        ({"matches": [{}], "targets": [{"modelRewrite": "x"}]}, "missing required field `model`"),
        *((number, "Expected `object`") for number in (7, -1.5)),
        *(("x", "Expected `object`"), ([], "Expected `object`"), (None, "Expected `object`")),
    ],
)
def test_an_object_with_one_bad_rule_gives_none(bad: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        found(rewrite(rule("good", x=1), bad))


@given(spec=JSON | changed(rewrite(rule("a", "b", v1=90, v2=10), rule("c", v1=None))))
def test_whatever_an_object_says_it_gives_rules_or_a_reason(spec: Any) -> None:
    for each in read(spec):
        if each.declared is None:
            assert each.problem
        else:
            assert all(rule.shares() for rule in each.declared.rules)
