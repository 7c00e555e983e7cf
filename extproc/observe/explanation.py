"""A decision for those who read it: its reason in a sentence or two, and plain values.

The first sentence explains the policy's slug, the state of the chosen pod, and the alternatives. A
policy of this package explains itself; of any other only the slug is given. The second is about the
prices of a policy that has them. No sentence quotes a prompt, and each is bounded in length, though
names of models and messages come from clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from extproc.bounds import MAX_DURATION_S, between, plain, whole
from extproc.errors import FOREIGN_ERRORS
from extproc.observe.outcomes import candidate, text_field
from extproc.phrases import SHOWN_S, held, pending, pod_name, score, short, shortened, whereabouts
from extproc.pods.completion import DecisionRecord
from extproc.routing.policies import BUILT_IN
from extproc.routing.policies.ranking import at_random
from extproc.types import EndpointView, Pick, Rejection, Snapshot

MAX_MESSAGE_CHARS = 300
"""Of a rejection's message in a sentence."""
MAX_SENTENCE_CHARS = 2000
"""Of both sentences."""


def explain(decision: Pick | Rejection) -> str:
    """Say which pod was chosen, why and over which other pods, or the rejection.

    A look at each candidate: for those who read it, not for each request.
    """
    sentence = _rejection(decision) if isinstance(decision, Rejection) else _pick(decision)
    return plain(sentence, MAX_SENTENCE_CHARS)


def _pick(pick: Pick) -> str:
    chosen = next((view for view in pick.candidates if view.address == pick.address), None)
    before = "" if pick.held_s is None else f" It was {held(pick.held_s, pick.held_for)}."
    if pick.request.written:
        before += f" Its client asked for {short(pick.request.written)}."
    if chosen is None:
        return f"{pick.address}: chosen by {pick.policy} ({pick.reason}).{before}"
    others = [view for view in pick.candidates if view is not chosen]
    why = f"{pod_name(chosen)}: {_why(pick, chosen, others)}{_state(chosen)}{_fallbacks(pick)}."
    prices = _prices(pick, chosen, others)
    return f"{why}{before} {prices}." if prices else f"{why}{before}"


def _rejection(rejection: Rejection) -> str:
    about = f" for {short(rejection.model)}" if rejection.model else ""
    later = "" if rejection.retry_after_s is None else f", retry after {rejection.retry_after_s} s"
    message = shortened(rejection.message, MAX_MESSAGE_CHARS)
    why = f" {rejection.why}" if rejection.why else ""
    return f"Rejected with {rejection.status} {rejection.reason}{about}{later}: {message}{why}"


def _why(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    if pick.reason == "session":
        source = pick.request.session_source
        return f"its session{f' ({source})' if source else ''} was sent there before"
    if not others:
        return "the only pod that could take it"
    adapter, policy = pick.request.adapter, BUILT_IN.get(pick.policy)
    why = None if policy is None else policy._explain(pick.reason, adapter, chosen, others)
    if why is not None:
        return why
    there = "" if adapter is None else f"{short(adapter)} is {whereabouts(chosen, adapter)} there; "
    return f"chosen by {pick.policy} ({pick.reason}); {there}{pending(chosen, others)}"


def _prices(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    try:
        return priced(pick, chosen, others)
    except FOREIGN_ERRORS as error:  # a user's policy: what it says must not end the page
        return f"Its score is unknown: {type(error).__name__} in the policy's terms"


def _state(chosen: EndpointView) -> str:
    """Say why a flawed one was chosen: no other was better."""
    if chosen.is_unreachable:
        return "; no pod that could take it can be reached"
    if chosen.is_ejected:
        return "; every pod that could take it is ejected"
    if chosen.is_silent:
        return "; it had not answered the router's scrapes, nor had any other that could take it"
    return (
        ""
        if chosen.is_known
        else "; it sends no load report, so only the requests that routers sent there count"
    )


def _fallbacks(pick: Pick) -> str:
    if len(pick.endpoints) == 1:
        return ""
    names = {view.address: pod_name(view) for view in pick.candidates}
    return "; then " + ", ".join(names.get(each, each) for each in pick.endpoints[1:])


_MAX_UINT32, _MAX_UINT64 = 2**32 - 1, 2**64 - 1


def describe_result(record: DecisionRecord, *, all_candidates: bool = True) -> dict[str, Any]:
    """Return `{"pick": {...}}` or `{"rejection": {...}}`, with the field names of the .proto.
    Without `all_candidates` a pick has the chosen one alone.

    The values fit the fields of `extproc.v1.Decision`: numbers are within their range, texts have a
    UTF-8 form and a limited length.
    """
    if isinstance(record.decision, Rejection):
        return {"rejection": _describe_rejection(record, record.decision)}
    return {"pick": _describe_pick(record.decision, all_candidates)}


def _describe_pick(pick: Pick, all_candidates: bool) -> dict[str, Any]:
    request, views = pick.request, pick.candidates
    if not all_candidates:
        chosen = candidate(pick, pick.address)
        views = () if chosen is None else (chosen,)
    return {
        "id": text_field(pick.id),
        "request_id": text_field(request.request_id),
        "model": text_field(request.client_model),
        "adapter": None if request.adapter is None else text_field(request.adapter),
        "path": text_field(request.path),
        "body_bytes": whole(request.body_bytes, _MAX_UINT64),
        "endpoints": [text_field(each) for each in pick.endpoints],
        "policy": text_field(pick.policy),
        "reason": text_field(pick.reason),
        "held_seconds": None if pick.held_s is None else between(pick.held_s, MAX_DURATION_S),
        "held_for": text_field(pick.held_for),
        "served_model": text_field(request.model) if request.written else "",
        "tenant": text_field(request.claim.tenant),
        "route": text_field(request.claim.route),
        "objective": text_field(request.hints.objective),
        "candidates": [_describe_candidate(each, request.adapter) for each in views],
    }


def _describe_candidate(view: EndpointView, adapter: str | None) -> dict[str, Any]:
    return {
        "address": text_field(view.address),
        "name": text_field(view.name),
        "num_pending": whole(view.num_pending, _MAX_UINT32),
        "num_adapter_pending": (
            0 if adapter is None else whole(view.pending(adapter), _MAX_UINT32)
        ),
        "num_active_adapters": whole(view.num_active_adapters, _MAX_UINT32),
        "loaded": adapter is not None and view.has_loaded(adapter),
        "on_gpu": adapter is not None and adapter in view.gpu_adapters,
        "known": view.is_known,
        "kv_usage_ratio": between(view.kv_usage_ratio, 1.0),
        "max_loras": whole(view.max_loras or 0, _MAX_UINT32),
    }


def _describe_rejection(record: DecisionRecord, rejection: Rejection) -> dict[str, Any]:
    retry_after_s = rejection.retry_after_s
    return {
        "status": whole(rejection.status, _MAX_UINT32),
        "reason": text_field(rejection.reason),
        "message": text_field(rejection.message),
        "model": text_field(rejection.model),
        "retry_after_seconds": (
            None if retry_after_s is None else whole(retry_after_s, _MAX_UINT32)
        ),
        "request_id": text_field(record.request_id),
        "path": text_field(record.path),
        "why": text_field(rejection.why),
    }


# The score of a choice in words, and the terms that made the difference.
#
# It has no unit: the seconds of a price are harm to all, and nobody waits that long.

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
    chosen = [view for view in pick.candidates if view.address == pick.address]
    (terms,) = pick.terms(Snapshot(tuple(pick.candidates), pick.picked_at_s), pick.request, chosen)
    return {name: seconds for name, seconds in terms.items() if 0 < seconds < inf}


def priced(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Say the score of the choice, and the least that it would have on a pod of `others`.

    Return "" where the policy has no prices.
    """
    if pick.terms is None:
        return ""
    snapshot = Snapshot(tuple(pick.candidates), pick.picked_at_s)
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
