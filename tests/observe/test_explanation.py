"""Decisions in words: which pod, why, over what, and what a client was told."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observe.explanation import MAX_MESSAGE_CHARS, explain
from extproc.phrases import shortened
from extproc.rejections import late, model_not_found, no_endpoints, saturated
from extproc.routing.policies import BUILT_IN, LeastHarm
from extproc.types import (
    Choice,
    EndpointView,
    Pick,
    Reason,
    Rejection,
    Snapshot,
    Terms,
)
from tests.builders import endpoint_view, pick, picker_of, request
from tests.fleets import pick_of
from tests.strategies import ADAPTERS, requests, snapshots

LONGEST = 1000


def view(number: int, pending: Mapping[str, int] | None = None, **fields: Any) -> EndpointView:
    return endpoint_view(number, name=f"pod-{number}", pending_by_adapter=pending or {}, **fields)


def said(
    policy: str, reason: str, *candidates: EndpointView, adapter: str | None = "a", **fields: Any
) -> str:
    """What is said of a pick of pod 1."""
    return explain(
        pick(info=request(adapter), policy=policy, reason=reason, candidates=candidates, **fields)
    )


def test_affinity_names_where_else_the_adapter_is_loaded_busiest_first() -> None:
    others = [view(number, {"a": number}, gpu_adapters=("a",)) for number in (2, 3, 4, 5)]

    assert said("founding", "affinity", view(1, {"a": 7}, gpu_adapters=("a",)), *others) == (
        "pod-1: a is in a GPU slot there with 7 of its requests pending, and no other pod below "
        "the policy's threshold has more; also loaded on pod-5 with 5, pod-4 with 4, pod-3 with 3 "
        "and 1 more."
    )


def test_a_pick_that_was_held_says_for_how_long_and_for_what() -> None:
    held: dict[str, Any] = {"held_s": 0.31, "held_for": "slot"}

    assert said("founding", "asked", view(2), **held) == (
        "10.0.0.1:8000: chosen by founding (asked). It was held 310 ms for a slot."
    )


def test_a_pick_of_a_rewritten_request_says_what_its_client_asked_for() -> None:
    rewritten = pick(info=request("a", written="alias"), candidates=(view(1),))

    assert explain(rewritten) == (
        "pod-1: the only pod that could take it. Its client asked for alias."
    )


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"gpu_adapters": ("a",)}, "in a GPU slot there with none of its requests pending"),
        ({"cpu_adapters": ("a",)}, "in the CPU cache there with none of its requests pending"),
        ({"pending": {"a": 1}}, "coming in there with 1 of its requests pending"),
    ],
)
def test_affinity_says_where_the_adapter_is(fields: dict[str, Any], where: str) -> None:
    sentence = said("founding", "affinity", view(1, **fields), view(2), view(3))

    assert sentence == f"pod-1: a is {where}, and none of the other 2 pods has it loaded."


IN_SLOT: Mapping[str, Any] = {"gpu_adapters": ("a",)}


@pytest.mark.parametrize(
    ("chosen", "others", "why"),
    [
        (
            view(1, {"b": 1}, **IN_SLOT),
            [view(2, {"b": 1, "c": 1}, **IN_SLOT), view(3, {"a": 16}, **IN_SLOT), view(4)],
            "of the 2 with as many this pod has the fewest active adapters "
            "(1 active, 2 elsewhere); also loaded on pod-3 with 16, pod-2 with 0.",
        ),
        (
            view(1, {"b": 1}, **IN_SLOT),
            [view(n, {"b": n}, **IN_SLOT) for n in (2, 3)] + [view(4, {"b": 1, "c": 1}, **IN_SLOT)],
            "of the 4 with as many this pod has the fewest active adapters "
            "(1 active, 1 to 2 elsewhere), of 3 with as few the least pending "
            "(1 pending, 2 to 3 elsewhere); also loaded on pod-2 with 0, pod-3 with 0, "
            "pod-4 with 0.",
        ),
        (
            view(1, {"b": 1}, **IN_SLOT),
            [view(2, {"b": 1}, **IN_SLOT), view(3, {"b": 2}, **IN_SLOT)],
            "of the 3 with as many this pod has the fewest active adapters "
            "(1 active, 1 elsewhere), of 3 with as few the least pending "
            "(1 pending, 1 to 2 elsewhere), chosen at random among 2 equals; also loaded on "
            "pod-2 with 0, pod-3 with 0.",
        ),
        (
            view(1, {"b": 1}, **IN_SLOT),
            [view(2, {"b": 1}, **IN_SLOT), view(3, {"b": 2, "c": 1}, **IN_SLOT)],
            "of the 3 with as many this pod has the fewest active adapters "
            "(1 active, 1 to 2 elsewhere), chosen at random among 2 equals; also loaded on "
            "pod-2 with 0, pod-3 with 0.",
        ),
        (
            view(1, **IN_SLOT),
            [view(2, **IN_SLOT), view(3, **IN_SLOT)],
            "of the 3 with as many this pod was chosen at random among 3 equals "
            "(0 active, 0 pending); also loaded on pod-2 with 0, pod-3 with 0.",
        ),
    ],
)
def test_affinity_says_what_decided_among_those_with_as_many_requests(
    chosen: EndpointView, others: list[EndpointView], why: str
) -> None:
    sentence = said("founding", "affinity", chosen, *others)

    assert sentence.endswith(f"and no other pod below the policy's threshold has more; {why}")


def test_cold_says_that_nobody_has_the_adapter_and_who_is_emptiest() -> None:
    busy = [view(2, {"b": 1, "c": 1}), view(3, {"b": 4})]

    assert said("founding", "cold", view(1), *busy) == (
        "pod-1: none of the 3 pods has a loaded, and this pod has the fewest active adapters "
        "(0 active, 1 to 2 elsewhere)."
    )


def test_spill_names_the_pods_that_are_full() -> None:
    full = view(2, {"a": 16, "b": 1}, gpu_adapters=("a",))

    assert said("founding", "spill", view(1), full) == (
        "pod-1: where a is loaded, the policy's threshold is reached (pod-2 with 16), and this pod "
        "has the fewest active adapters (0 active, 2 elsewhere)."
    )


@pytest.mark.parametrize(
    ("policy", "reason", "why"),
    [
        ("founding", "base", "it has the fewest requests pending (1 pending, 2 elsewhere)"),
        ("least_pending", "least-pending", "it has the fewest requests pending (1 pending, 2 else"),
        ("round_robin", "turn", "it was its turn among 2 pods (1 pending, 2 elsewhere)"),
        ("random", "random", "drawn at random among 2 pods (1 pending, 2 elsewhere)"),
        ("founding", "session", "its session was sent there before"),
        ("my:policy", "affinity", "chosen by my:policy (affinity); 1 pending, 2 elsewhere"),
    ],
)
def test_each_rule_of_ours_is_put_into_words(policy: str, reason: str, why: str) -> None:
    candidates = view(1, {"b": 1}), view(2, {"b": 2})

    assert said(policy, reason, *candidates, adapter=None).startswith(f"pod-1: {why}")


def test_what_named_a_session_that_is_followed_is_said() -> None:
    info = request("a", session_source="cookie:sid")
    followed = pick(info=info, reason="session", candidates=(view(1), view(2)))

    assert explain(followed).startswith("pod-1: its session (cookie:sid) was sent there before")


@pytest.mark.parametrize(
    ("policy", "reason"), [("founding", "base"), ("least_pending", "least-pending")]
)
def test_of_pods_with_as_little_pending_one_is_drawn(policy: str, reason: str) -> None:
    candidates = view(1, {"b": 1}), view(2, {"c": 1}), view(3, {"b": 2})

    assert said(policy, reason, *candidates, adapter=None) == (
        "pod-1: it has the fewest requests pending (1 pending, 1 to 2 elsewhere), "
        "chosen at random among 2 equals."
    )


def test_another_rules_slug_is_not_given_a_meaning() -> None:
    assert said("my:policy", "affinity", view(1), view(2)) == (
        "pod-1: chosen by my:policy (affinity); a is not loaded there; 0 pending, 0 elsewhere."
    )


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_slug_that_the_rule_does_not_have_is_not_given_a_meaning(adapter: str | None) -> None:
    sentence = said("founding", "affinity-of-old", view(1), view(2), adapter=adapter)

    assert sentence.startswith("pod-1: chosen by founding (affinity-of-old); ")


def test_a_pod_without_alternatives_needs_no_other_reason() -> None:
    assert said("founding", "cold", view(1)) == "pod-1: the only pod that could take it."


# --- prices ---------------------------------------------------------------------------------


def prices(*terms: Mapping[str, float]) -> Terms:
    """The prices of pod-1 and those after it, whatever is asked."""
    by_name = {f"pod-{number}": each for number, each in enumerate(terms, 1)}
    return lambda snapshot, request, views: [by_name[each.name] for each in views]


def second(*terms: Mapping[str, float]) -> str:
    """The second sentence about a choice of pod-1 at these prices."""
    views = [view(number) for number in range(1, len(terms) + 1)]
    text = said("my:policy", "r", *views, terms=prices(*terms))
    return text.partition("elsewhere. " if len(views) > 1 else "take it. ")[2]


def test_a_price_is_compared_with_the_lowest_elsewhere_by_the_terms_that_made_the_difference() -> (
    None
):
    here = {"prompts_ahead": 0.0, "batch": 0.024}
    there = {"prompts_ahead": 0.030, "batch": 0.0, "load": 0.1}

    assert second(here, {"load": 2.0}, there) == (
        "Its score is 0.024 there and 0.13 on pod-3, the nearest other: load 0.1 more, "
        "prompts ahead 0.03 more, batch 0.024 less."
    )


def test_terms_that_differ_little_are_not_named_and_of_the_others_three() -> None:
    there = {"a": 1.2345, "b": 0.24, "c": 1.0, "d": 0.9, "e": 0.8}

    assert second({"b": 0.001}, there) == (
        "Its score is 0.001 there and 4.17 on pod-2, the nearest other: a 1.23 more, c 1 more, "
        "d 0.9 more, the rest 1.04 more."
    )
    assert second({"c": 4e-5}, {"a": 1.0}).endswith("nearest other: a 1 more.")


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=1, max_size=9).filter(
        lambda each: sum(here for here, _ in each) != sum(there for _, there in each)
    )
)
def test_the_differences_add_up_to_the_difference_of_the_prices(
    prices_ms: list[tuple[int, int]],
) -> None:
    """Of whole milliseconds, so that nothing is lost in the words."""
    here = {str(place): ms / 1000 for place, (ms, _) in enumerate(prices_ms)}
    there = {str(place): ms / 1000 for place, (_, ms) in enumerate(prices_ms)}

    differences = second(here, there).partition("nearest other: ")[2]
    told = re.findall(r"([\d.]+) (more|less)", differences)
    told_ms = sum(1000 * float(number) * (1 if way == "more" else -1) for number, way in told)

    assert told_ms == pytest.approx(1000 * (sum(there.values()) - sum(here.values())), abs=20)


def test_a_credit_is_no_cost() -> None:
    """Of a policy of one's own: a price may be below zero."""
    assert second({"credit": -0.5}, {"load": 0.1}) == (
        "Its score is -0.5 there and 0.1 on pod-2, the nearest other: credit 0.5 more, load "
        "0.1 more."
    )


def test_a_policy_that_did_not_choose_the_lowest_price_is_not_covered_up() -> None:
    assert second({"load": 0.1}, {"load": 0.007}) == (
        "Its score is 0.1 there and 0.007 on pod-2, the nearest other: load 0.093 less."
    )


def test_equal_prices_were_left_to_chance() -> None:
    """Added up in another order, for instance."""
    assert second({"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.3, "b": 0.2, "c": 0.1}, {"a": 1.0}) == (
        "Its score is 0.6 there, chosen at random among 2 equals."
    )


def test_the_only_pod_has_a_price_too() -> None:
    assert second({"batch": 1e-5}) == "Its score is 0 there."
    assert second({"batch": 1234.5}) == "Its score is 1234 there."


def test_terms_of_a_policy_that_fail_do_not_hide_the_choice() -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("load")

    assert said("my:policy", "r", view(1), terms=fail) == (
        "pod-1: the only pod that could take it. Its score is unknown: KeyError in the policy's "
        "terms."
    )


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (
            {"pending": {"a": 9, "b": 3}},
            {"prompts_done_s": 100.03, "cpu_adapters": ("a",)},
            "a runs there: the least harm by estimate, 12 pending, 0 elsewhere. Its score is "
            "0.046 there and 0.109 on pod-2, the nearest other: slot 0.0619 more, prompts ahead "
            "0.03 more, batch 0.024 less, the rest 0.005 less.",
        ),
        (
            {"prompts_done_s": 100.1, "cpu_adapters": ("a",)},
            {"prompts_done_s": 100.4, "pending": {"a": 1}},
            "a is in the CPU cache there, where a slot is free; it also runs on pod-2 with 1: the "
            "least harm by estimate, 0 pending, 1 elsewhere. Its score is 0.165 there and 0.913 on "
            "pod-2, the nearest other: late first token 0.5 more, prompts ahead 0.3 more, the rest "
            "0.0522 less.",
        ),
    ],
)
def test_least_harm_says_what_decided(
    here: dict[str, Any], there: dict[str, Any], words: str
) -> None:
    views = view(1, max_loras=8, **here), view(2, max_loras=8, **there)
    asked = Snapshot(views, 100.0)
    info = request("a", body_bytes=960, arrived_at_s=100.0)
    choice = LeastHarm(home_s=0.0).choose(asked, info, rng=random.Random(0))
    assert isinstance(choice, Choice)
    assert choice.endpoints == (views[0],)

    decision = pick(
        info=info,
        policy="least_harm",
        reason=choice.reason,
        candidates=views,
        picked_at_s=100.0,
        terms=choice.terms,
    )
    assert explain(decision) == f"pod-1: {words}"


def test_fallbacks_and_unknown_load_are_told() -> None:
    candidates = view(1, is_known=False, is_silent=True), view(2, is_known=False, is_silent=True)
    endpoints = (candidates[0].address, candidates[1].address, "10.0.0.9:1")

    assert said("random", "random", *candidates, endpoints=endpoints).endswith(
        "; it had not answered the router's scrapes, nor had any other that could take it; then "
        "pod-2, 10.0.0.9:1."
    )


def test_a_pod_that_gives_no_report_is_chosen_by_what_was_sent_there() -> None:
    candidates = view(1, is_known=False), view(2)
    assert said("random", "random", *candidates).endswith(
        "; it sends no load report, so only the requests that routers sent there count."
    )


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("is_ejected", "every pod that could take it is ejected"),
        ("is_unreachable", "no pod that could take it can be reached"),
    ],
)
def test_that_no_better_pod_is_left_is_told(flaw: str, words: str) -> None:
    candidates = view(1, {}, **{flaw: True}), view(2, {}, **{flaw: True})

    assert said("random", "random", *candidates).endswith(f"; {words}.")


def test_a_pick_without_its_candidates_still_names_the_pod_and_the_rule() -> None:
    assert said("p", "r") == "10.0.0.1:8000: chosen by p (r)."


@pytest.mark.parametrize(
    ("rejection", "sentence"),
    [
        (
            saturated("a", 2),
            "Rejected with 429 saturated for a, retry after 2 s: Every pod that serves this "
            "model is saturated. Retry later.",
        ),
        (
            late("a", 2, "Its first token would come late: 7 held."),
            "Rejected with 429 late for a, retry after 2 s: The first token of the response would "
            "come too late. Retry later. Its first token would come late: 7 held.",
        ),
        (
            model_not_found("a"),
            "Rejected with 404 model_not_found for a: The model `a` does not exist.",
        ),
        (
            no_endpoints(),
            "Rejected with 503 no_endpoints, retry after 1 s: No pod is ready for this model. "
            "Retry later.",
        ),
    ],
)
def test_a_rejection_says_what_a_client_is_told_and_why(
    rejection: Rejection, sentence: str
) -> None:
    assert explain(rejection) == sentence


def test_names_and_messages_of_any_length_make_a_sentence_of_bounded_length() -> None:
    rejection = Rejection(404, Reason.MODEL_NOT_FOUND, "m" * 10_000, model="n" * 10_000)

    assert len(explain(rejection)) < LONGEST
    assert explain(rejection).endswith(f"{'m' * (MAX_MESSAGE_CHARS - 1)}…")


@given(snapshots(), requests(), st.sampled_from(sorted(BUILT_IN)), st.integers(0, 99))
def test_every_pick_of_every_policy_is_in_bounded_words_that_name_its_pod(
    pool: Any, info: Any, policy: str, seed: int
) -> None:
    decision = pick_of(picker_of(policy, seed=seed), pool, info)
    if not isinstance(decision, Pick):
        return
    chosen = next(each for each in decision.candidates if each.address == decision.address)
    sentence = explain(decision)

    assert sentence.startswith(shortened(chosen.name or chosen.address, 80))
    assert sentence.endswith(".")
    assert len(sentence) < LONGEST


@given(snapshots(), st.none() | st.sampled_from(ADAPTERS), st.integers(0, 99))
def test_the_founding_policys_random_choice_names_the_number_of_equals(
    pool: Snapshot, adapter: str | None, seed: int
) -> None:
    decision = pick_of(picker_of(seed=seed), pool, request(adapter))
    if not isinstance(decision, Pick):
        return

    def measures(view: EndpointView) -> tuple[Any, ...]:
        if adapter is None:
            return (view.num_pending,)
        its = (view.has_loaded(adapter), view.pending(adapter))
        own = its if decision.reason == "affinity" else ()
        return (*own, view.num_active_adapters, view.num_pending)

    chosen = next(each for each in decision.candidates if each.address == decision.address)
    num_equal = sum(measures(view) == measures(chosen) for view in decision.candidates)
    sentence = explain(decision)
    assert (f"chosen at random among {num_equal} equals" in sentence) == (num_equal > 1)
    assert ("chosen at random" in sentence) == (num_equal > 1)
