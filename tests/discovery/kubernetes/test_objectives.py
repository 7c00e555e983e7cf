"""InferenceObjectives as an API server sends them, and the priorities that they give."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.discovery.kubernetes.endpoints import priorities, without_pool
from extproc.discovery.kubernetes.objects import objectives_query
from extproc.discovery.kubernetes.objectstore import ObjectStore

POOL = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "pool"}


def found(
    pool_ref: dict[str, Any], more: dict[str, Any], *pools: str, **metadata: Any
) -> dict[str, int]:
    """The priorities of a list with one objective."""
    store = ObjectStore(objectives_query())
    item = {"metadata": {"name": "o", **metadata}, "spec": {"poolRef": pool_ref, **more}}
    store.read_page(json.dumps({"metadata": {}, "items": [item]}).encode(), is_first=True)
    return priorities(store.objects, pools or ["pool"])


@pytest.mark.parametrize(
    ("given", "priority"),
    [
        *(({"priority": 7}, 7), ({"priority": -1}, -1), ({}, 0), ({"priority": None}, 0)),
        *(({"priority": 2**70}, 2**31 - 1), ({"priority": -1e300}, -(2**31))),
    ],
)
def test_an_objective_of_the_pool_has_its_priority_and_unset_is_0(
    given: dict[str, Any], priority: int
) -> None:
    assert found(POOL, given) == {"o": priority}


def test_the_group_and_the_kind_of_a_pool_may_be_left_out() -> None:
    assert found({"name": "pool"}, {"priority": 2}) == {"o": 2}


@pytest.mark.parametrize(
    "other", [{"name": "another"}, {"group": "inference.networking.x-k8s.io"}, {"kind": "Service"}]
)
def test_an_objective_of_anything_else_does_not_count(other: dict[str, str]) -> None:
    assert found(POOL | other, {"priority": 2}) == {}


def test_an_objective_that_is_being_deleted_does_not_count() -> None:
    assert found(POOL, {"priority": 2}, deletionTimestamp="2026-01-01T00:00:00Z") == {}


def test_objectives_of_each_of_several_pools_count() -> None:
    for name, expected in (("a", {"o": 2}), ("b", {"o": 2}), ("c", {})):
        assert found({"name": name}, {"priority": 2}, "a", "b") == expected


def test_an_objective_may_refer_to_several_pools() -> None:
    refs = {"poolRefs": [{"name": "another"}, {"name": "pool"}], "priority": 2}

    assert found({}, refs) == {"o": 2}
    assert found({}, refs, "third") == {}


def test_one_that_refers_to_no_pool_is_named() -> None:
    def named(spec: dict[str, Any]) -> list[str]:
        store = ObjectStore(objectives_query())
        page = {"metadata": {}, "items": [{"metadata": {"name": "o"}, "spec": spec}]}
        store.read_page(json.dumps(page).encode(), is_first=True)
        return without_pool(store.objects)

    assert named({"poolRef": POOL}) == named({"poolRefs": [POOL]}) == []
    assert named({"priority": 1}) == named({"poolRefs": []}) == named({"pools": [POOL]}) == ["o"]
