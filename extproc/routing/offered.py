"""Declared adapters as requests see them, and what requests want of them."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.routing.conflicts import Offer
from extproc.routing.rewrites import Rewrites
from extproc.routing.router import Router
from extproc.types import ModelCard


class OfferedAdapters:
    """Shows requests what is declared, and says what they want.

    Args:
        router: Its catalog and its pool have what is shown, its queue has who waits.
        rewrites: Learn which names they concern.
    """

    def __init__(self, router: Router, rewrites: Rewrites) -> None:
        self._router, self._catalog, self._pool = router, router.catalog, router.pool
        self._rewrites = rewrites
        self._offers: Mapping[str, Offer] = {}
        self._pools: set[frozenset[str]] = set()
        self._own = frozenset[str]()
        self._seen: tuple[int, object] = (-1, None)
        self._shown: tuple[object, ...] = ({}, self._own, {})

    @property
    def num_declared(self) -> int:
        """How many adapters requests may ask for."""
        return self._catalog.num_declared

    def declare(self, offers: Mapping[str, Offer]) -> None:
        """Replace what is declared, by the name that clients write; `show` shows it."""
        self._offers = offers
        self._pools = {offer.declaration.pools for offer in offers.values()}

    def show(self, *, now: float) -> None:
        """Show requests what is declared, once it or what most pods list has changed."""
        # A declaration with a base model's name takes no requests from it. That most pods list it
        # as such decides, and holds while any does: a pod that starts has listed nothing yet.
        pool = self._pool
        seen = pool.num_listings, self._offers
        if seen == self._seen:
            return
        self._seen = seen
        own = pool.base_names() | {name for name in self._own if pool.with_base(name)}
        bases = {pools: pool.base_of(pools) for pools in self._pools}
        if (self._offers, own, bases) == self._shown:
            return
        self._shown, self._own = (self._offers, own, bases), own
        self._catalog.declare(self._offers, bases, own=own)
        self._rewrites.declare(self._offers.keys() - own)
        declared = [offer.declaration for offer in self._offers.values()]
        served = {each.served_name: each for each in declared}
        cards = {name: ModelCard(name, e.base or bases[e.pools]) for name, e in served.items()}
        pool.declare(cards, now=now)

    def held(self, *, now: float) -> list[str]:
        """Return the adapters that requests wait for, the next first."""
        queue = self._router.queue
        return queue.adapters(now) if queue else []

    def rates(self, *, now: float) -> Mapping[str, float]:
        """Return the demand for each."""
        return self._catalog.demand.rates(now)

    def offer(self, *, now: float) -> None:
        """Have those that wait asked again: pods may have what they wait for."""
        self._router.queue.freed(now)
