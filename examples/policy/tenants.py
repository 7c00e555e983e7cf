"""A policy of one's own: the adapters of a tenant stay on a few pods (shuffle sharding).

A tenant that floods its pods then slows only those who share them, and its adapters crowd out
others only there. Among the tenant's pods the founding rule decides. The tenant is the part of the
adapter's name before the separator: `acme` of `acme/sql`. Fallbacks may be other pods.

    PYTHONPATH=examples/policy extproc serve --config extproc.yaml

with, in extproc.yaml,

    policy: {name: "tenants:Tenants", args: {num_pods: 3}}

Try it in the laboratory, from this folder: `extproc lab run quick --policy tenants:Tenants`. There
no name has a separator, so each adapter is a tenant of its own.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from heapq import nlargest
from random import Random

from extproc import Choice, Founding, RequestInfo, Snapshot


class Tenants:
    """The founding rule on the pods of a tenant; requests for a base model may go anywhere."""

    def __init__(self, num_pods: int = 2, separator: str = "/", threshold: int = 16) -> None:
        if num_pods < 1:
            raise ValueError(f"num_pods is {num_pods}; allowed: 1 or more")
        self.num_pods = num_pods
        self.separator = separator
        self.rule = Founding(threshold)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Random) -> Choice:
        """Choose among the tenant's pods; while one of them is away, another stands in."""
        pods = snapshot.endpoints
        if request.adapter is not None:
            tenant = request.adapter.partition(self.separator)[0]
            own = nlargest(self.num_pods, pods, key=lambda pod: rank(tenant, pod.address))
            pods = tuple(own)
        narrowed = Snapshot(pods, snapshot.now, snapshot.num_routers)
        return self.rule.choose(narrowed, request, rng=rng)


@lru_cache(maxsize=100_000)
def rank(tenant: str, address: str) -> bytes:
    """Rank a pod for a tenant.

    Every router ranks alike, and a pod that comes or goes moves no tenant between two others.
    """
    return blake2b(f"{tenant} {address}".encode(), digest_size=8).digest()
