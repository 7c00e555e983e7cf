"""The price of a choice in words: a score, and which of its terms made the difference.

It is told without a unit: the seconds of a price are harm to all, and nobody waits that long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from extproc.phrases import SHOWN_S, pod_name, score, short
from extproc.routing.policies.ranking import at_random
from extproc.types import EndpointView, Pick, Snapshot

MAX_TERMS = 3
"""Terms that a sentence names."""
MIN_PART = 0.2
"""Of the largest difference; smaller ones are not named."""
_EQUAL_S = 1e-9


def chosen_terms(pick: Pick) -> Mapping[str, float]:
    """Return the terms of the chosen endpoint's price, but those that are no positive seconds.

    Empty where the policy has no prices.
    """
    if pick.terms is None:
        return {}
    address = pick.address
    chosen = [view for view in pick.candidates if view.address == address]
    snapshot = Snapshot(pick.candidates, pick.picked_at_s)
    (terms,) = pick.terms(snapshot, pick.request, chosen)
    return {name: seconds for name, seconds in terms.items() if 0 < seconds < inf}


def priced(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Say the score of the choice, and the least that it would have on a pod of `others`.

    Return "" where the policy has no prices.
    """
    if pick.terms is None:
        return ""
    snapshot = Snapshot(pick.candidates, pick.picked_at_s)
    own, *rest = pick.terms(snapshot, pick.request, (chosen, *others))
    price_s, prices_s = sum(own.values()), [sum(terms.values()) for terms in rest]
    said = f"Its score is {score(price_s)} there"
    if not others:
        return said
    equals = [
        view for view, s in zip(others, prices_s, strict=True) if abs(s - price_s) <= _EQUAL_S
    ]
    if equals:
        return f"{said}, {at_random(equals)}"
    nearest = prices_s.index(min(prices_s))
    there = f"{score(prices_s[nearest])} on {pod_name(others[nearest])}, the nearest other"
    return f"{said} and {there}: {_differences(own, rest[nearest])}"


def _differences(own: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Name the terms that differ most, the largest difference first, and what the rest makes: who
    adds up gets the difference of the prices."""
    names = dict.fromkeys((*own, *other))
    by_s = [(other.get(name, 0.0) - own.get(name, 0.0), name) for name in names]
    by_s.sort(key=lambda each: -abs(each[0]))
    least_s = MIN_PART * abs(by_s[0][0])
    named = [each for each in by_s[:MAX_TERMS] if abs(each[0]) >= least_s]
    rest_s = sum(s for s, _ in by_s[len(named) :])
    if abs(rest_s) >= SHOWN_S:
        named.append((rest_s, "the rest"))
    return ", ".join(
        f"{short(name.replace('_', ' '))} {score(abs(s))} {'more' if s > 0 else 'less'}"
        for s, name in named
    )
