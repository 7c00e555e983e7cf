"""Phrases about endpoints for people, bounded in length though names come from clients."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.bounds import plain
from extproc.types import EndpointView

MAX_NAME_CHARS = 80
"""Of a model's or a pod's name in a sentence."""
MAX_NAMED = 3
"""Alternatives that a sentence names; the rest are a number."""
SHOWN_S = 5e-5
"""Shorter durations count as equal."""


def shortened(text: str, max_chars: int) -> str:
    """Return `text` as `plain` does, but with an ellipsis where it is shortened."""
    if len(text) <= max_chars:
        return plain(text, max_chars)
    return f"{plain(text, max_chars - 1)}…"


def short(name: str) -> str:
    """Shorten a model's or a pod's name."""
    return shortened(name, MAX_NAME_CHARS)


def pod_name(view: EndpointView) -> str:
    """Return the pod's name, or its address where it has none."""
    return short(view.name or view.address)


def pod_title(view: EndpointView) -> str:
    """Return the pod's name with its address, or the address alone."""
    name = pod_name(view)
    return name if name == view.address else f"{name} ({view.address})"


def whereabouts(view: EndpointView, adapter: str) -> str:
    """Say where the adapter is on that pod."""
    if adapter in view.gpu_adapters:
        return "in a GPU slot"
    if adapter in view.cpu_adapters:
        return "in the CPU cache"
    return "coming in" if view.pending(adapter) else "not loaded"


def pending(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Say how many requests are pending on the chosen pod and on the other pods."""
    return f"{chosen.num_pending} pending, {spread([v.num_pending for v in others])} elsewhere"


def duration(seconds: float) -> str:
    """Say a duration with two or three digits."""
    ms = 1000 * seconds
    if abs(ms) < 999.5:
        return f"{ms:.1f} ms" if abs(ms) < 9.95 else f"{ms:.0f} ms"
    return f"{seconds:.2f} s"


def score(price_s: float) -> str:
    """Say a price as a score, with up to three digits."""
    return (
        "0"
        if abs(price_s) < SHOWN_S
        else f"{price_s:.3g}"
        if abs(price_s) < 1000
        else f"{price_s:.0f}"
    )


def held(seconds: float, reason: str) -> str:
    """Say for how long and for what a request was held, by the policy's slug."""
    return f"held {duration(seconds)}{_HELD_FOR.get(reason) or f' ({short(reason)})'}"


FOR_ADAPTER = "load"
"""The reason of those that wait until a pod has their adapter."""
FOR_ROOM = "full"
"""The reason of those that wait as every pod is full: it has said so, or its engine has."""
FOR_POD = "pod"
"""Of those that wait as no pod is left that could take them."""
FOR_SLOT = "slot"
"""Of those that wait for an adapter slot."""
FOR_TURN = "turn"
"""Of those that let other requests go first."""
_HELD_FOR = {
    FOR_SLOT: " for a slot",
    "room": " for room",
    FOR_ROOM: " as every pod was full",
    FOR_TURN: " for its turn",
    FOR_ADAPTER: " for its adapter",
    FOR_POD: " as no pod was left",
}


def listed(names: Sequence[str], at_most: int = MAX_NAMED) -> str:
    """Return the first names, and how many more there are."""
    num_others = len(names) - at_most
    named = ", ".join(names[:at_most])
    return f"{named} and {num_others} more" if num_others > 0 else named


def spread(counts: Sequence[int]) -> str:
    """Say the least and the most of `counts`, which is not empty."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def busiest_first(views: Sequence[EndpointView], adapter: str) -> str:
    """Name the pods with the most requests for the adapter, each with how many."""
    ranked = sorted(views, key=lambda view: (-view.pending(adapter), pod_name(view)))
    return listed([f"{pod_name(view)} with {view.pending(adapter)}" for view in ranked])
