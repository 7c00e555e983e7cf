"""Why a decision fell as it did, in one sentence for people.

Says what the rule's slug means, what it saw at the pod that it chose, and what the alternatives
were. Only the rules of this package are explained by their meaning: another rule may use the same
slug for something else. No sentence quotes a prompt, and each is bounded in length, though names of
models and messages come from clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.core.bounds import plain
from extproc.core.types import EndpointView, Pick, Rejection

MAX_NAME_CHARS = 80
"""Of a model's or a pod's name in a sentence."""
MAX_MESSAGE_CHARS = 300
"""Of a rejection's message in a sentence."""
MAX_SENTENCE_CHARS = 2000
"""Of the whole sentence."""
_MAX_NAMED = 3
"""Alternatives that are named; the rest are a number."""


def explain(decision: Pick | Rejection) -> str:
    """Say in one sentence which pod was chosen, why and over what, or what the client was told."""
    sentence = _rejection(decision) if isinstance(decision, Rejection) else _pick(decision)
    return plain(sentence, MAX_SENTENCE_CHARS)


def _pick(decision: Pick) -> str:
    chosen = next((v for v in decision.candidates if v.address == decision.address), None)
    if chosen is None:
        return f"{decision.address}: chosen by {decision.policy} ({decision.reason})."
    others = [view for view in decision.candidates if view is not chosen]
    return f"{_name(chosen)}: {_why(decision, chosen, others)}{_further(decision, chosen)}."


def shortened(text: str, max_chars: int) -> str:
    """`text` as `plain`, its end replaced by an ellipsis where it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return plain(text, max_chars)
    return f"{plain(text, max_chars - 1)}…"


def _rejection(rejection: Rejection) -> str:
    about = f" for {_short(rejection.model)}" if rejection.model else ""
    later = "" if rejection.retry_after_s is None else f", retry after {rejection.retry_after_s} s"
    message = shortened(rejection.message, MAX_MESSAGE_CHARS)
    return f"Rejected with {rejection.status} {rejection.reason}{about}{later}: {message}"


def _why(pick: Pick, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    if pick.reason == "session":
        return "its session was sent there before"
    if not others:
        return "the only pod that could take it"
    adapter = pick.request.adapter
    match pick.policy, pick.reason:
        case "founding", "affinity" if adapter is not None:
            return _affinity(adapter, chosen, others)
        case "founding", "cold" if adapter is not None:
            none = f"none of the {1 + len(others)} pods has {_short(adapter)} loaded"
            return f"{none}, and {_emptiest(chosen, others)}"
        case "founding", "spill" if adapter is not None:
            return _spill(adapter, chosen, others)
        case ("founding", "base") | ("least_pending", "least-pending"):
            return _least_pending(chosen, others)
        case "round_robin", "turn":
            return f"it was its turn among {1 + len(others)} pods ({_pending(chosen, others)})"
        case "random", "random":
            return f"drawn at random among {1 + len(others)} pods ({_pending(chosen, others)})"
    there = "" if adapter is None else f"{_short(adapter)} is {_where(chosen, adapter)} there; "
    return f"chosen by {pick.policy} ({pick.reason}); {there}{_pending(chosen, others)}"


def _affinity(adapter: str, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    here = f"{_short(adapter)} is {_where(chosen, adapter)} there with {_its(chosen, adapter)}"
    also = [view for view in others if view.has_loaded(adapter)]
    if not also:
        return f"{here}, and none of the other {len(others)} pods has it loaded"
    as_many = [view for view in also if view.pending(adapter) == chosen.pending(adapter)]
    most = "and no other pod below the rule's threshold has more"
    if as_many:
        most = f"{most}; of the {1 + len(as_many)} with as many {_emptiest(chosen, as_many)}"
    return f"{here}, {most}; also loaded on {_listed(also, adapter)}"


def _least_pending(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    fewest = f"it has the fewest requests pending ({_pending(chosen, others)})"
    equal = [view for view in others if view.num_pending == chosen.num_pending]
    return f"{fewest}, {_lot(equal)}" if equal else fewest


def _spill(adapter: str, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    loaded = [view for view in (chosen, *others) if view.has_loaded(adapter)]
    full = f"where {_short(adapter)} is loaded, the rule's threshold is reached"
    return f"{full} ({_listed(loaded, adapter)}), and {_emptiest(chosen, others)}"


def _emptiest(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """What sets it apart from `others` in the rule's second order, and what is left to chance."""
    as_few = [v for v in others if v.num_active_adapters == chosen.num_active_adapters]
    equal = [view for view in as_few if view.num_pending == chosen.num_pending]
    if len(equal) == len(others):
        of_each = f"{chosen.num_active_adapters} active, {chosen.num_pending} pending"
        return f"this pod was {_lot(equal)} ({of_each})"
    fewest = f"this pod has the fewest active adapters ({_active(chosen, others)})"
    if len(equal) < len(as_few):
        least = f"of {1 + len(as_few)} with as few the least pending"
        fewest = f"{fewest}, {least} ({_pending(chosen, as_few)})"
    return f"{fewest}, {_lot(equal)}" if equal else fewest


def _lot(equal: Sequence[EndpointView]) -> str:
    return f"drawn by lot from {1 + len(equal)} equals"


def _further(pick: Pick, chosen: EndpointView) -> str:
    state = _state(chosen)
    if len(pick.endpoints) == 1:
        return state
    names = {view.address: _name(view) for view in pick.candidates}
    rest = ", ".join(names.get(address, address) for address in pick.endpoints[1:])
    return f"{state}; then {rest}"


def _state(chosen: EndpointView) -> str:
    """Why one with a flaw was chosen: no other was better."""
    if chosen.is_unreachable:
        return "; no pod that could take it can be reached"
    if chosen.is_ejected:
        return "; every pod that could take it is ejected"
    return "" if chosen.is_known else "; no pod that could take it has a fresh load report"


def _where(view: EndpointView, adapter: str) -> str:
    if adapter in view.gpu_adapters:
        return "in a GPU slot"
    if adapter in view.cpu_adapters:
        return "in the CPU cache"
    return "coming in" if view.pending(adapter) else "not loaded"


def _its(view: EndpointView, adapter: str) -> str:
    count = view.pending(adapter)
    return f"{count or 'none'} of its requests pending"


def _listed(views: Sequence[EndpointView], adapter: str) -> str:
    ranked = sorted(views, key=lambda view: (-view.pending(adapter), _name(view)))
    named = [f"{_name(view)} with {view.pending(adapter)}" for view in ranked[:_MAX_NAMED]]
    more = len(ranked) - _MAX_NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _active(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    counts = [view.num_active_adapters for view in others]
    return f"{chosen.num_active_adapters} active, {_range(counts)} elsewhere"


def _pending(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    return f"{chosen.num_pending} pending, {_range([v.num_pending for v in others])} elsewhere"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _name(view: EndpointView) -> str:
    return _short(view.name or view.address)


def _short(name: str) -> str:
    return shortened(name, MAX_NAME_CHARS)
