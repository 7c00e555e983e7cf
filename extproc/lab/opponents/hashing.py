"""Policies that hash the adapter's name: the same adapter to the same endpoint, without state.

`Rendezvous` is highest-random-weight hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998).
`BoundedLoads` is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv
1608.01350), over the rendezvous order instead of a ring. Vimeo used c = 1.25 in HAProxy, and
KubeAI's policy for adapters is the same with the mean over all endpoints. `DedicatedPods` is the
naive partition to which S-LoRA and later work compare.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from extproc.lab.opponents.ties import least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot


def rendezvous_order(endpoints: Sequence[EndpointView], key: str) -> list[EndpointView]:
    """Sort the endpoints by the key: the same for every router, and stable when one leaves."""
    return sorted(endpoints, key=lambda view: _weight(key, view.address), reverse=True)


def least_pending(endpoints: Sequence[EndpointView], rng: random.Random) -> Choice:
    """Choose for a request without an adapter, which gains nothing from affinity."""
    return Choice((least(endpoints, lambda view: view.num_pending, rng),), "base")


def _weight(key: str, address: str) -> bytes:
    return blake2b(f"{key}|{address}".encode(), digest_size=8).digest()


class Rendezvous:
    """Each adapter on the endpoint that its name hashes to, whatever the load."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by hash."""
        if request.adapter is None:
            return least_pending(snapshot.endpoints, rng)
        first = max(snapshot.endpoints, key=lambda v: _weight(request.model, v.address))
        return Choice((first,), "hash")


class BoundedLoads:
    """The first endpoint in the adapter's order that is not above `c` times the mean load.

    Args:
        c: Bound, as a multiple of the mean number of unfinished requests; above 1.
    """

    def __init__(self, c: float = 1.25) -> None:
        if c <= 1:
            raise ValueError(f"c is {c}; allowed: above 1")
        self.c = c

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by hash and bound."""
        endpoints = snapshot.endpoints
        if request.adapter is None:
            return least_pending(endpoints, rng)
        total = sum(view.num_pending for view in endpoints) + 1
        capacity = ceil(self.c * total / len(endpoints))
        order = rendezvous_order(endpoints, request.adapter)
        for view in order:
            if view.num_pending < capacity:
                return Choice((view,), "hash" if view is order[0] else "spill")
        return least_pending(endpoints, rng)  # unreachable while loads are exact


class DedicatedPods:
    """Adapters dealt to the endpoints in turn, in the order of their names."""

    def __init__(self) -> None:
        self._registered: frozenset[str] = frozenset()
        self._places: dict[str, int] = {}

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by place."""
        endpoints = snapshot.endpoints
        if request.adapter is None:
            return least_pending(endpoints, rng)
        registered = endpoints[0].registered or frozenset({request.adapter})
        if registered != self._registered:
            self._registered = registered
            self._places = {name: place for place, name in enumerate(sorted(registered))}
        place = self._places.get(request.adapter, 0)
        return Choice((endpoints[place % len(endpoints)],), "dedicated")
