"""Objects that declare something, as an API server lists them."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from extproc.discovery.kubernetes.objects import POOL_GROUP, DeclaringObject, PoolRef, Query
from extproc.discovery.kubernetes.objectstore import ObjectStore

T = TypeVar("T", bound=DeclaringObject)

POOL = {"group": POOL_GROUP, "kind": "InferencePool", "name": "pool"}
POOLS = frozenset({PoolRef("pool")})


def item(
    spec: Any, name: str = "it", *, age: int = 0, status: Any = None, **metadata: Any
) -> dict[str, Any]:
    """An object; `age` counts down from the newest."""
    created = f"2026-01-01T00:{59 - age:02}:00Z"
    known = {"name": name, "namespace": "n", "creationTimestamp": created, "generation": 1}
    made: dict[str, Any] = {"metadata": known | metadata, "spec": spec}
    return made if status is None else made | {"status": status}


def listed(query: Query[T], *items: Any) -> list[T]:
    """The objects of a list."""
    store = ObjectStore(query)
    store.read_page(json.dumps({"metadata": {}, "items": items}).encode(), is_first=True)
    return list(store.objects)
