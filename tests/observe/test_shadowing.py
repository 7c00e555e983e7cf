"""What answers of a policy in shadow say beside the choices in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest

from extproc.observe.shadowing import Agreement, ShadowAnswer, compared
from extproc.pods.completion import Shadowed
from extproc.types import EndpointView, Pick, RequestInfo, Snapshot
from tests.builders import address, endpoint_view, request

VIEWS = (endpoint_view(1, name="one"), endpoint_view(2, name="two"))
PRICES_S: dict[str, dict[str, float]] = {
    address(1): {"slot": 1.0, "load": 0.5},
    address(2): {"slot": 2.0, "load": 0.0},
}


def priced(
    snapshot: Snapshot, asked: RequestInfo, views: Sequence[EndpointView]
) -> list[Mapping[str, float]]:
    assert snapshot.endpoints == VIEWS
    return [PRICES_S[view.address] for view in views]


def unpriced(*_: object) -> list[Mapping[str, float]]:
    raise KeyError("slot")


def endless(*_: object) -> list[Mapping[str, float]]:
    return [{"slot": 0.0}, {"slot": inf}]


def said(answer: ShadowAnswer, terms: Any = priced) -> Shadowed:
    pick = Pick("r-1", request("a"), (address(1),), "p", "base", VIEWS, terms=terms)
    return compared(pick, VIEWS, answer, "mine:Policy")


def test_the_same_pod_does_no_harm() -> None:
    found = said(ShadowAnswer(address(1), seconds=0.25))
    assert found == Shadowed("mine:Policy", "agreed", address(1), "one", "", 0.0, 0.25)
    assert said(ShadowAnswer(address(1)), None).harm_s is None


def test_the_harm_of_another_pod_is_the_difference_of_the_prices_in_force() -> None:
    found = said(ShadowAnswer(address(2)))
    assert (found.result, found.name, found.harm_s) == ("differed", "two", 0.5)


@pytest.mark.parametrize("terms", [None, unpriced, endless])
def test_without_prices_there_is_no_harm_to_tell(terms: Any) -> None:
    found = said(ShadowAnswer(address(2)), terms)
    assert (found.result, found.harm_s) == ("differed", None)


def test_waits_and_failures_have_no_pod() -> None:
    assert said(ShadowAnswer()).result == "waited"
    failed = said(ShadowAnswer(error="x" * 1000, seconds=-1.0))
    assert (failed.result, failed.error, failed.seconds) == ("failed", "x" * 300, 0.0)


def test_counts_are_by_model_and_of_few_models_alone() -> None:
    agreement = Agreement(2)
    agreed, differed = Shadowed("p", "agreed", harm_s=0.0), Shadowed("p", "differed", harm_s=0.5)
    for model, found in [
        *(("a", agreed), ("a", differed), ("a", Shadowed("p", "differed", harm_s=-0.25))),
        *(("b", Shadowed("p", "waited")), ("b", Shadowed("p", "failed"))),
        *(("c", agreed), ("d", agreed)),
    ]:
        last = agreement.add(model, found)
    assert (last.num_asked, last.num_agreed) == (2, 2)  # of `other`
    assert agreement.results["b", "failed"] == 1
    assert agreement.harm_s == {("a", "more"): 0.5, ("a", "less"): 0.25, ("other", "more"): 0.0}
    assert agreement.describe() == {
        "num": 6,
        "num_agreed": 3,
        "num_failed": 1,
        "harm_s": 0.05,
        "models": [("a", 3, 1, pytest.approx(0.25 / 3)), ("other", 2, 2, 0.0), ("b", 1, 0, None)],
    }
