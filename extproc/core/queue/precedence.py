"""Who lets whom go first, while room is short.

Where an adapter runs, one more request for it needs no slot of its own. Tenants whose adapters run
would keep theirs for ever, and others would find none free, whatever their turn. So whoever is
asked for in vain holds up all who come after it, but for its own flow: those of a lower level, and
on its level the flows that were served more, as far as both may go to one endpoint. Slots become
free by that. It holds them up for `HOLD_UP_S` at most, as what it waits for may never come; and its
flow, if it got nothing by that, not again before `AGAIN_S`. Otherwise each of its requests would,
one after the other, and others would get nothing for as long as they keep coming.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from extproc.core.address import is_in_subset
from extproc.core.types import EndpointView, RequestInfo

HOLD_UP_S = 0.25
AGAIN_S = 2 * HOLD_UP_S
"""From the begin of one hold-up in vain to that of the flow's next."""

MAX_FIRST = 16
"""Flows that hold up others at a time: the first in order hold up the most."""
MAX_KNOWN = 4096
"""Models, each with the addresses that the data plane allows, whose endpoints are remembered."""


class Precedence:
    """Those that were asked for in vain lately.

    Args:
        served: Returns what a flow of a priority has got.
    """

    def __init__(self, served: Callable[[int, str], float]) -> None:
        self._served = served
        # By level, priority and flow: until when, and where its requests may go.
        self._first: dict[tuple[int, int, str], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._first)

    def begin(self) -> None:
        """Forget all, before they are asked for anew."""
        self._first.clear()

    def add(self, level: int, priority: int, flow: str, until_s: float, reach: int) -> None:
        """Have a flow of a priority go first until then. The first in order come first here.

        Args:
            reach: Of its request, as `Reach` has it.
        """
        key = level, priority, flow
        if key in self._first or len(self._first) < MAX_FIRST:
            over_s, others = self._first.get(key, (until_s, 0))
            self._first[key] = max(until_s, over_s), others | reach

    def behind_until_s(
        self, level: int, priority: int, flow: str, reach: int, *, now: float
    ) -> float:
        """Return until when a request has to let others go first; `now` if it has not."""
        until_s = now
        for (other, of, first), (over_s, where) in self._first.items():
            if over_s <= until_s or other < level or not where & reach:
                continue
            if other > level:
                goes_first = (of, first) != (priority, flow)
            else:
                goes_first = self._served(priority, first) < self._served(priority, flow)
            if goes_first:
                until_s = over_s
        return until_s


class Reach:
    """Where requests may go, of some endpoints: a bit for each.

    Args:
        holders: Returns the addresses of those that have a model; None leaves that to their lists.
    """

    def __init__(
        self,
        endpoints: Sequence[EndpointView] = (),
        holders: Callable[[str], Container[str] | None] = lambda _model: None,
    ) -> None:
        self._endpoints = endpoints
        self._holders = holders
        self._known: dict[tuple[str, frozenset[str] | None], int] = {}
        self._idle: int | None = None  # the bits of those without a request, once they are known

    def has_idle(self, request: RequestInfo) -> bool:
        """Return whether an endpoint that may serve a request has none."""
        if self._idle is None:
            views = enumerate(self._endpoints)
            self._idle = sum(
                1 << place for place, view in views if not view.num_pending + view.num_foreign
            )
        return bool(self._idle) and bool(self._idle & self.of(request))

    def of(self, request: RequestInfo) -> int:
        """Return the endpoints that may serve a request; all bits where none is known to.

        No bit where none can be: it waits for its adapter, and not for room.
        """
        model, subset = key = request.model, request.subset
        found = self._known.get(key)
        if found is None:
            holders = self._holders(model)
            found = sum(
                1 << place
                for place, view in enumerate(self._endpoints)
                if (view.has_registered(model) if holders is None else view.address in holders)
                and (subset is None or is_in_subset(view.address, subset))
            )
            if holders is None:
                found = found or -1
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found
