"""Precedence while room is short, between requests that may go to one endpoint.

A request that was asked for in vain holds up later ones of a lower priority, for `slot_hold_s`.
Where it waits for other room than a slot, it also holds up those that come after it in order, for
`HOLD_UP_S`. Requests below 0 wait as long as any of 0 or above does (`Sweep`). A flow that got
nothing by that holds up no other flow again before twice that time has passed since it began to.

The time is limited: the wanted room may never come, and free room may be enough for other requests
and never for this one. A request that came before one of a higher priority overtakes nobody, so it
goes on. For slots there are reservations (`reservations`). If a flow could begin again at once,
each of its requests would hold up other flows, one after the other, for as long as they keep
coming.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.tenancy import SlotUse
from extproc.types import EndpointView, RequestInfo

HOLD_UP_S = 0.25
AGAIN_RATIO = 2
"""From the begin of one hold-up in vain to that of the flow's next, over its length."""

MAX_FIRST = 16
"""Flows that hold up other flows at a time: the first in order hold up the most."""
MAX_KNOWN = 4096
"""Models, each with the addresses that the data plane allows, whose endpoints are remembered."""


Flow = tuple[int, int, str]
"""Its level, its priority and its name."""


class First(Struct):
    """A flow that goes first.

    Attributes:
        since_s: When the first of its requests that wait arrived.
        later_until_s: For so long those of a lower priority that came later let it go first.
        next_until_s: For so long those that come after it in order do.
        reach: Of its requests, as `Reach` has it.
    """

    since_s: float = inf
    later_until_s: float = -inf
    next_until_s: float = -inf
    reach: int = 0

    def lasts(self, now: float) -> bool:
        """Return whether anybody has to let it go first."""
        return now < max(self.later_until_s, self.next_until_s)

    def shifted(self, by_s: float) -> First:
        """Return the same with all times later by so much."""
        return First(
            self.since_s + by_s, self.later_until_s + by_s, self.next_until_s + by_s, self.reach
        )


class Precedence:
    """The requests that were asked for in vain lately.

    Args:
        served: Returns the service of a flow of a priority.

    Attributes:
        elsewhere: The requests that wait at other routers.
    """

    def __init__(self, served: Callable[[int, str], float]) -> None:
        self._served = served
        self._first: dict[Flow, First] = {}
        self.elsewhere: Sequence[tuple[Flow, First]] = ()

    def __len__(self) -> int:
        return len(self._first) + len(self.elsewhere)

    def firsts(self) -> tuple[tuple[Flow, First], ...]:
        """Return those that wait here, as they are now."""
        return tuple((flow, replace(first)) for flow, first in self._first.items())

    def begin(self) -> None:
        """Forget all, before they are asked for anew."""
        self._first.clear()

    def add(self, level: int, priority: int, flow: str, first: First) -> None:
        """Have a flow of a priority go first. The first in order come first here."""
        key = level, priority, flow
        if key in self._first or len(self._first) < MAX_FIRST:
            known = self._first.setdefault(key, First())
            known.since_s = min(known.since_s, first.since_s)
            known.later_until_s = max(known.later_until_s, first.later_until_s)
            known.next_until_s = max(known.next_until_s, first.next_until_s)
            known.reach |= first.reach

    def behind_until_s(
        self, level: int, priority: int, flow: str, arrived_s: float, reach: int, *, now: float
    ) -> float:
        """Return until when a request has to let other requests go first; `now` if it has not."""
        until_s = now
        for (other, of, name), first in chain(self._first.items(), self.elsewhere):
            if other < level or not first.reach & reach:
                continue
            if other > level and of > priority and arrived_s > first.since_s:
                until_s = max(until_s, first.later_until_s)
            if first.next_until_s > until_s and (
                (of, name) != (priority, flow)
                if other > level
                else self._served(priority, name) < self._served(priority, flow)
            ):
                until_s = first.next_until_s
        return until_s


class Reach:
    """Where requests may go, of some endpoints: a bit for each.

    Attributes:
        endpoints: As they are now, in the order of the bits.
        served: As given.
        slots_of: Likewise.

    Args:
        holders: Returns the addresses of those that have a model; None leaves that to their lists.
        served: Returns the name that they know an adapter by.
        slots: Returns the adapters that routers know to run on one.
    """

    def __init__(
        self,
        endpoints: Sequence[EndpointView] = (),
        holders: Callable[[str], Container[str] | None] = lambda _model: None,
        served: Callable[[str], str] = str,
        slots: Callable[[str], Mapping[str, SlotUse]] = lambda _address: {},
    ) -> None:
        self.endpoints, self._holders = endpoints, holders
        self.served, self.slots_of = served, slots
        self._known: dict[tuple[str, frozenset[str] | None], int] = {}
        self._listing: dict[frozenset[str], int] = {}  # the bits of those that list these names
        self._idle: int | None = None  # the bits of those without a request, once they are known

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the endpoints, in the order of the bits."""
        return tuple([view.address for view in self.endpoints])

    def has_idle(self, request: RequestInfo) -> bool:
        """Return whether an endpoint that may serve a request has none."""
        if self._idle is None:
            self._idle = self._bits(lambda view: not view.num_pending + view._num_foreign)
        return bool(self._idle & self.of(request))

    def of(self, request: RequestInfo) -> int:
        """Return the endpoints that may serve a request; all bits where none is known to.

        No bit where none can be: it waits for its adapter, and not for room.
        """
        model, subset = key = request.model, request.subset
        found = self._known.get(key)
        if found is None:
            holders = self._holders(model)
            if holders is None:
                found = sum(bits for names, bits in self._by_names().items() if model in names)
            else:
                found = self._bits(lambda view: view.address in holders)
            if subset is not None:
                found &= self._bits(lambda view: is_in_subset(view.address, subset))
            if holders is None:
                found = found or -1
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _bits(self, is_one: Callable[[EndpointView], bool]) -> int:
        return sum(1 << place for place, view in enumerate(self.endpoints) if is_one(view))

    def _by_names(self) -> Mapping[frozenset[str], int]:
        """Return the endpoints by the names that they list: there are few lists, and many models
        are asked for."""
        if not self._listing:
            for place, view in enumerate(self.endpoints):
                names = view.registered or frozenset()
                self._listing[names] = self._listing.get(names, 0) | 1 << place
        return self._listing

    def slots(self, bits: int) -> list[tuple[EndpointView, Mapping[str, SlotUse]]]:
        """Return the endpoints of some bits, each with the adapters that run there."""
        views = (view for place, view in enumerate(self.endpoints) if bits >> place & 1)
        return [(view, self.slots_of(view.address)) for view in views]


NOWHERE = Reach()
"""Where no endpoint is known, a request may go anywhere."""
