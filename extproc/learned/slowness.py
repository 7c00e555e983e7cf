"""Which pods take longer for an output token than the other pods of their group.

1. A pod's slowness is its decode seconds a token (`Decode.token_s`) over the median of the other
   pods of its group. 1 is equal. The median of an even number is the slower of the two in the
   middle: so of three pods or more, one whose counters are false makes no other look slow.
2. A larger batch is no slowness. Where the pod runs more requests than the pod that it is compared
   with, that pod's time is extrapolated to as many requests, on the line through its time alone.
   The extrapolation ends at `MAX_DRAWN_OUT` times its own number. From fewer than `MIN_BATCH` no
   line can be drawn.
3. A pod becomes slow after `for_s` of work at `ratio` or above, and recovers after as long below
   `RECOVERY` of it. Work alone counts: an idle pod's figure is that of its last second of work.
4. Discovery decides which pods there are: one that is removed is forgotten in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from extproc.costs import Decode
from extproc.learned.losses import LogLine
from extproc.phrases import duration, pod_title
from extproc.types import EndpointView, Snapshot

RECOVERY = 0.75
"""Of `SlownessSettings.ratio`: a pod that is just at the limit is said once, not each minute."""
MIN_BATCH = 2.0
"""Requests. With hardly more than one, the time is that of one alone, and any difference chance."""
MAX_DRAWN_OUT = 2.0
"""The least time of one alone is low by chance: further out, that would excuse any slowness."""
MAX_UPDATE_S = 5.0
"""Time that one update counts for at most: a router that was suspended has seen no work."""


class SlownessSettings(Struct, frozen=True):
    """When a pod is called slow.

    Attributes:
        ratio: Its time per output token over that of its group's other pods.
        for_s: Seconds of work for which that must last.
    """

    ratio: float = 2.0
    for_s: float = 30.0


class Slowness(Struct, frozen=True):
    """One pod's time per output token, and that of the other pods of its group."""

    token_s: float
    group_token_s: float
    num_compared: int

    @property
    def ratio(self) -> float:
        """1 where they are alike."""
        return self.token_s / self.group_token_s


class _State(Struct):
    """One pod's standing, and for how long its work has contradicted that."""

    is_slow: bool = False
    contrary_s: float = 0.0
    since_s: float = 0.0  # when it became slow


class SlowPods:
    """Follows which pods are slow. `update` about once a second; its cost is that of the pods.

    Args:
        group_of: Returns a pod's group by its address.

    Attributes:
        settings: See the class.
    """

    def __init__(
        self, group_of: Callable[[str], str], settings: SlownessSettings | None = None
    ) -> None:
        self.settings = settings or SlownessSettings()
        self._group_of = group_of
        self._states: dict[str, _State] = {}
        self._updated_s: float | None = None

    def is_slow(self, address: str) -> bool:
        """Return whether a pod was slow at the last update."""
        state = self._states.get(address)
        return state is not None and state.is_slow

    def compare(self, snapshot: Snapshot) -> Mapping[str, Slowness]:
        """Return the slowness of each pod that has decoded and has other pods to be compared
        with.
        """
        groups: defaultdict[str, list[tuple[str, Decode]]] = defaultdict(list)
        for view in snapshot.endpoints:
            if view.is_known and view.costs.decode is not None:
                groups[self._group_of(view.address)].append((view.address, view.costs.decode))
        found = {}
        for group in groups.values():
            group.sort(key=lambda each: each[1].token_s)
            decodes = [decode for _, decode in group]
            for place, (address, decode) in enumerate(group if len(group) > 1 else ()):
                found[address] = _compared(decode, place, decodes)
        return found

    def update(self, snapshot: Snapshot) -> list[LogLine]:
        """Return what has changed since the last update: a line for each pod."""
        now, before_s = snapshot.now, self._updated_s
        passed_s = 0.0 if before_s is None else min(now - before_s, MAX_UPDATE_S)
        self._updated_s = now
        found, known = self.compare(snapshot), self._states
        self._states = {
            view.address: known.get(view.address) or _State() for view in snapshot.endpoints
        }
        lines = []
        for view in snapshot.endpoints:
            slowness = found.get(view.address) if view.num_running else None
            if slowness is not None and self._is_to_flip(view.address, slowness, passed_s):
                lines.append(self._flip(view, slowness, now))
        return lines

    def _is_to_flip(self, address: str, slowness: Slowness, passed_s: float) -> bool:
        """Count work; return whether the pod is slow from now on, or has recovered."""
        settings, state = self.settings, self._states[address]
        limit = settings.ratio * (RECOVERY if state.is_slow else 1.0)
        if (slowness.ratio >= limit) is state.is_slow:
            state.contrary_s = 0.0
            return False
        state.contrary_s += passed_s
        return state.contrary_s >= settings.for_s

    def _flip(self, view: EndpointView, slowness: Slowness, now: float) -> LogLine:
        state = self._states[view.address]
        state.is_slow, state.contrary_s = not state.is_slow, 0.0
        figures = (
            pod_title(view),
            duration(slowness.token_s),
            slowness.ratio,
            duration(slowness.group_token_s),
            slowness.num_compared,
        )
        compared = "%s per output token, %.1f times the %s of the other pods of its group (%d)"
        if state.is_slow:
            state.since_s = now
            template = f"pod %s is slower than its peers: {compared}, for %.0f s of work"
            return LogLine(template, (*figures, self.settings.for_s), is_loss=True)
        template = f"pod %s is as fast as its peers again: {compared}; it was slow for %.0f s"
        return LogLine(template, (*figures, now - state.since_s), is_loss=False)


def _compared(own: Decode, place: int, decodes: Sequence[Decode]) -> Slowness:
    """Compare the one at `place` of a group, which is in order of the time per token."""
    num_compared = len(decodes) - 1
    low, high = (num_compared - 1) // 2, num_compared // 2
    middle = [decodes[each + (each >= place)] for each in (low, high)]
    group_token_s = max(_drawn_out(other, own.num_running) for other in middle)
    return Slowness(own.token_s, group_token_s, num_compared)


def _drawn_out(decode: Decode, num_running: float) -> float:
    """Return the seconds a token that a pod would take with more requests than it has."""
    batch = decode.num_running
    if num_running <= batch or batch < MIN_BATCH or not decode.alone_s:
        return decode.token_s
    slope_s = max(0.0, decode.token_s - decode.alone_s) / (batch - 1)
    return decode.token_s + slope_s * (min(num_running, MAX_DRAWN_OUT * batch) - batch)
