"""What a choice costs by the policy's own terms."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

from extproc.observe.explanation import chosen_terms
from extproc.types import EndpointView, RequestInfo, Snapshot
from tests.builders import endpoint_view, pick, request

CANDIDATES = endpoint_view(1), endpoint_view(2)


def test_a_choice_has_the_terms_of_its_own_pod_when_it_was_made() -> None:
    asked = []

    def terms(
        snapshot: Snapshot, info: RequestInfo, views: Sequence[EndpointView]
    ) -> list[dict[str, float]]:
        asked.append((snapshot.endpoints, snapshot.now, info))
        return [{"load": 0.1 * int(view.name == "pod-2"), "batch": 0.2} for view in views]

    info = request("a")
    named = tuple(endpoint_view(number, name=f"pod-{number}") for number in (1, 2))
    chosen = pick(
        info=info,
        candidates=named,
        endpoints=(named[1].address, named[0].address),
        picked_at_s=7.0,
        terms=terms,
    )

    assert chosen_terms(chosen) == {"load": 0.1, "batch": 0.2}
    assert asked == [(named, 7.0, info)]


def test_terms_that_are_no_positive_seconds_are_left_out() -> None:
    odd = {"none": 0.0, "credit": -1.0, "endless": inf, "unknown": nan, "load": 0.1}

    decision = pick(candidates=CANDIDATES, terms=lambda *_: [odd])

    assert chosen_terms(decision) == {"load": 0.1}


def test_a_policy_without_prices_has_no_terms() -> None:
    assert chosen_terms(pick(candidates=CANDIDATES)) == {}
