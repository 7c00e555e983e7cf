"""The reason for a decision, in a sentence or two for people.

The first explains the policy's slug, the state of the chosen pod, and the alternatives. A policy of
this package explains itself; of any other only the slug is given. The second is about the prices of
a policy that has them. No sentence quotes a prompt, and each is bounded in length, though names of
models and messages come from clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.bounds import plain
from extproc.phrases import held, pending, pod_name, short, shortened, whereabouts
from extproc.routing.policies import BUILT_IN
from extproc.routing.prices import priced
from extproc.types import EndpointView, Pick, Rejection

MAX_MESSAGE_CHARS = 300
"""Of a rejection's message in a sentence."""
MAX_SENTENCE_CHARS = 2000
"""Of both sentences."""


def explain(decision: Pick | Rejection) -> str:
    """Say which pod was chosen, why and over which others, or the rejection.

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
        return "its session was sent there before"
    if not others:
        return "the only pod that could take it"
    adapter, policy = pick.request.adapter, BUILT_IN.get(pick.policy)
    why = None if policy is None else policy.explain(pick.reason, adapter, chosen, others)
    if why is not None:
        return why
    there = "" if adapter is None else f"{short(adapter)} is {whereabouts(chosen, adapter)} there; "
    return f"chosen by {pick.policy} ({pick.reason}); {there}{pending(chosen, others)}"


def _prices(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    try:
        return priced(pick, chosen, others)
    except Exception as error:  # a user's policy: what it says must not end the page
        return f"Its prices are unknown: {type(error).__name__} in its terms"


def _state(chosen: EndpointView) -> str:
    """Say why a flawed one was chosen: no other was better."""
    if chosen.is_unreachable:
        return "; no pod that could take it can be reached"
    if chosen.is_ejected:
        return "; every pod that could take it is ejected"
    if chosen.is_silent:
        return "; no pod that could take it answers"
    return (
        "" if chosen.is_known else "; it gives no load report, so by what routers have sent there"
    )


def _fallbacks(pick: Pick) -> str:
    if len(pick.endpoints) == 1:
        return ""
    names = {view.address: pod_name(view) for view in pick.candidates}
    return "; then " + ", ".join(names.get(each, each) for each in pick.endpoints[1:])
