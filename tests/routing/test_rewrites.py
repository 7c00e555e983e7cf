"""What pods read in place of what clients write: precedence, shares and versions."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.openai import Spelling
from extproc.routing.rewrites import Rewrites, Rule
from extproc.types import ModelCard

NAMES = st.sampled_from(["a", "b", "c", "d"])


def rewrites(*rules: Rule, seed: int = 1) -> Rewrites:
    return Rewrites(rules, rng=Random(seed))


def alias(target: str, *models: str) -> Rule:
    return Rule("r", models, ((target, None),))


def test_without_rules_a_model_stays_what_it_is() -> None:
    plain = rewrites()

    assert not plain.is_active
    assert (plain.draw("a").model, plain.draw("").model) == ("a", "")


def test_a_rule_that_names_the_model_counts_before_a_generic_one() -> None:
    both = rewrites(alias("x"), alias("y", "a", "b"))

    assert both.is_active
    assert [both.draw(model).model for model in ("a", "b", "c")] == ["y", "y", "x"]


def test_aliases_are_what_rules_name() -> None:
    rules = [Rule("one", ("a", "b"), (("x", 1.0), ("y", 0.0))), Rule("all", (), (("z", None),))]

    assert Rewrites(rules, rng=Random(1)).aliases == {"a": ("x",), "b": ("x",)}


def test_among_equal_rules_the_first_counts() -> None:
    many = rewrites(alias("x", "a"), alias("y", "a"), alias("v"), alias("w"))

    assert (many.draw("a").model, many.draw("b").model) == ("x", "v")


def test_rules_are_not_chained() -> None:
    chain = rewrites(alias("b", "a"), alias("c", "b"), alias("d"))

    assert (chain.draw("a").model, chain.draw("b").model) == ("b", "c")


def test_what_is_declared_last_may_have_another_name_at_pods() -> None:
    made = rewrites()
    for names in (["a"], ["b"]):
        made.declare(names)

    assert [made.is_declared(model) for model in ("a", "b")] == [False, True]


def test_a_generic_rule_serves_bodies_without_a_model_and_one_that_names_it_does_not() -> None:
    assert rewrites(alias("x")).draw("").model == "x"
    assert rewrites(alias("x", "a")).draw("").model == ""


@pytest.mark.parametrize("model", ["a", ""])
def test_a_header_counts_where_no_rule_matches(model: str) -> None:
    assert rewrites(alias("x", "b")).draw(model, "h").model == "h"
    assert rewrites(alias("x")).draw(model, "h").model == "x"
    assert not rewrites().is_active


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((None, None, None), (1 / 3, 1 / 3, 1 / 3)),
        ((90, 10, None), (0.9, 0.1, 0)),
        ((0, 0.5, 1.5), (0, 0.25, 0.75)),
        ((None, 3, 0), (0, 1, 0)),
    ],
)
def test_each_target_gets_its_share_and_one_without_a_weight_beside_others_none(
    weights: tuple[float | None, ...], shares: tuple[float, ...]
) -> None:
    rule = Rule("r", ("m",), tuple(zip("abc", weights, strict=True)))
    drawn = rewrites(rule)
    counts = Counter(drawn.draw("m").model for _ in range(2000))

    for target, share in zip("abc", shares, strict=True):
        assert counts[target] / 2000 == pytest.approx(share, abs=0.03 if share < 1 else 0)
        assert (counts[target] == 0) == (share == 0)


def test_a_rule_whose_targets_all_have_weight_zero_is_none() -> None:
    rules = rewrites(Rule("r", ("m",), (("a", 0),)), alias("b", "m"))

    assert rules.draw("m").model == "b"
    assert not rewrites(Rule("r", ("m",), (("a", 0),))).is_active


def test_declared_adapters_alone_make_it_active() -> None:
    plain = rewrites()
    plain.declare({"a"})

    assert plain.is_active


def test_what_it_concerns_is_known_without_drawing() -> None:
    named, every, served = rewrites(alias("x", "a")), rewrites(alias("x")), rewrites()
    served.declare({"a"})
    models = ("a", "b", "")

    assert [named.concerns(model) for model in models] == [True, False, False]
    assert [every.concerns(model) for model in models] == [True, True, True]
    assert [served.concerns(model) for model in models] == [True, False, False]


def test_new_rules_replace_the_old_ones() -> None:
    rules = rewrites(alias("x", "a"), alias("y"))
    rules.configure([alias("z", "b")])

    assert [rules.draw(model).model for model in ("a", "b")] == ["a", "z"]


@given(
    st.lists(
        st.builds(
            Rule,
            st.just("r"),
            st.lists(NAMES, max_size=2).map(tuple),
            st.lists(st.tuples(NAMES, st.none() | st.integers(0, 3)), min_size=1, max_size=3).map(
                tuple
            ),
        ),
        max_size=4,
    ),
    NAMES,
    st.integers(0, 100),
)
def test_the_target_is_one_of_the_first_fitting_rule(
    rules: list[Rule], model: str, seed: int
) -> None:
    fitting = [rule for rule in rules if rule.shares()]
    exact = [rule for rule in fitting if model in rule.models]
    generic = [rule for rule in fitting if not rule.models]
    first = (exact or generic or [alias(model, model)])[0]

    made = rewrites(*rules, seed=seed)
    assert made.draw(model).model in dict(first.shares())
    assert made.concerns(model) == bool(exact or generic)


def test_a_model_concerns_us_where_pods_read_its_name_after_its_base_model_s() -> None:
    cards = {"sql": ModelCard("sql", "qwen"), "qwen": ModelCard("qwen")}
    made = Rewrites([Rule("r", ("alias",), (("qwen", None),))], rng=Random(1))
    spelled = Rewrites((), rng=Random(1), spelling=Spelling(cards.get, joins=True))
    spelled.declare({"qwen"})

    assert (spelled.is_active, Rewrites((), rng=Random(1)).is_active) == (True, False)
    assert [spelled.concerns(name) for name in ("sql", "qwen:sql", "qwen", "x")] == [
        True,
        False,
        True,
        False,
    ]
    assert [made.concerns(name) for name in ("sql", "alias")] == [False, True]
