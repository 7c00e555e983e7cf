"""Where requests may go, as a bit for each endpoint: those of two requests are quickly compared."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from extproc.address import is_in_subset
from extproc.tenancy import SlotUse
from extproc.types import EndpointView, RequestInfo

MAX_KNOWN = 4096
"""Models, each with the addresses that the data plane allows, whose endpoints are remembered."""
ALL = -1
"""All bits: no endpoint is known to have what a request wants, so it may be any."""


class Destinations:
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

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the endpoints, in the order of the bits."""
        return tuple([view.address for view in self.endpoints])

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
                found = found or ALL
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


NOWHERE = Destinations()
"""Where no endpoint is known, a request may go anywhere."""
