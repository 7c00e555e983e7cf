"""The founding rule: follow the adapter, without flapping.

First stage: the endpoint with the MOST pending requests for the adapter, among those where it is
loaded and has fewer pending requests than a threshold. Second stage, if there is none: the endpoint
with the fewest active adapters, then the least pending in total. The original leaves ties of the
first stage open. Here the order of the second stage breaks them: an adapter that is loaded but idle
in many places goes to the emptiest of them. Remaining ties are broken at random. Source: the first
proof of concept of the Gateway API inference extension
(kubernetes-sigs/gateway-api-inference-extension, commit 11a80776, 2024).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.phrases import busiest_first, pending, short, spread, whereabouts
from extproc.pods.columns import Columns
from extproc.routing.policies.ranking import at_random, fewest_pending, lowest, one_of
from extproc.routing.policies.rows import RowChoice, RowPolicy, by_rows
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot

DEFAULT_THRESHOLD = 16
"""Requests. A batch of 16 still decodes at nearly the speed of one on an 8B-class model (H100: 10.5
ms a step and 0.044 ms more per sequence). So packing up to here costs next to nothing.
"""


class Founding(RowPolicy):
    """The founding rule, to build upon.

    Attributes:
        threshold: Pending requests of an adapter, at least 1, from which it spills to another pod.
    """

    def __init__(self, threshold: int = DEFAULT_THRESHOLD) -> None:
        if type(threshold) is not int or threshold < 1:  # a bool is an int, too
            raise ValueError(f"threshold is {threshold!r}; allowed: 1 or more, a whole number")
        self.threshold = threshold

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by adapter; the base model goes to the pod with the fewest pending requests."""
        return self._choose_row(*by_rows(snapshot, request, rng)).of(snapshot)

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        _now: float,
        rng: random.Random,
    ) -> RowChoice:
        adapter, pending = request.adapter, columns.num_pending
        if adapter is None:
            return RowChoice(one_of(lowest(rows, pending), rng), "base")
        loaded = sorted(columns.holders(adapter))
        if len(rows) < len(pending):
            allowed = set(rows)
            loaded = [row for row in loaded if row in allowed]
        running = columns.running(adapter)
        below = [row for row in loaded if running.get(row, 0) < self.threshold]
        if not below:
            return RowChoice(_emptiest(columns, rows, rng), "spill" if loaded else "cold")
        most = max([running.get(row, 0) for row in below])
        busiest = [row for row in below if running.get(row, 0) == most]
        return RowChoice(_emptiest(columns, busiest, rng), "affinity")

    @staticmethod
    def _explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str | None:
        """Say why."""
        if reason == "base":
            return fewest_pending(chosen, others)
        if adapter is None:
            return None
        if reason == "affinity":
            return _why_affinity(adapter, chosen, others)
        if reason == "cold":
            none = f"none of the {1 + len(others)} pods has {short(adapter)} loaded"
            return f"{none}, and {_why_emptiest(chosen, others)}"
        return _why_spill(adapter, chosen, others) if reason == "spill" else None


def _emptiest(columns: Columns, rows: Sequence[int], rng: random.Random) -> int:
    """Return the row with the fewest active adapters, then the least pending.

    A random one of equals.
    """
    fewest = lowest(rows, columns.num_used)
    return one_of(lowest(fewest, columns.num_pending), rng)


# --- explanations --------------------------------------------------------------------------------


def _why_affinity(adapter: str, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    own = f"{chosen.pending(adapter) or 'none'} of its requests pending"
    here = f"{short(adapter)} is {whereabouts(chosen, adapter)} there with {own}"
    also = [view for view in others if view.has_loaded(adapter)]
    if not also:
        return f"{here}, and none of the other {len(others)} pods has it loaded"
    as_many = [view for view in also if view.pending(adapter) == chosen.pending(adapter)]
    most = "and no other pod below the policy's threshold has more"
    if as_many:
        most = f"{most}; of the {1 + len(as_many)} with as many {_why_emptiest(chosen, as_many)}"
    return f"{here}, {most}; also loaded on {busiest_first(also, adapter)}"


def _why_spill(adapter: str, chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    loaded = [view for view in (chosen, *others) if view.has_loaded(adapter)]
    full = f"where {short(adapter)} is loaded, the policy's threshold is reached"
    return f"{full} ({busiest_first(loaded, adapter)}), and {_why_emptiest(chosen, others)}"


def _why_emptiest(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Say why the second stage chose it over `others`, and what was left to chance."""
    as_few = [v for v in others if v.num_active_adapters == chosen.num_active_adapters]
    equals = [view for view in as_few if view.num_pending == chosen.num_pending]
    if len(equals) == len(others):
        of_each = f"{chosen.num_active_adapters} active, {chosen.num_pending} pending"
        return f"this pod was {at_random(equals)} ({of_each})"
    elsewhere = spread([view.num_active_adapters for view in others])
    counts = f"{chosen.num_active_adapters} active, {elsewhere} elsewhere"
    fewest = f"this pod has the fewest active adapters ({counts})"
    if len(equals) < len(as_few):
        least_of = f"of {1 + len(as_few)} with as few the least pending"
        fewest = f"{fewest}, {least_of} ({pending(chosen, as_few)})"
    return f"{fewest}, {at_random(equals)}" if equals else fewest
