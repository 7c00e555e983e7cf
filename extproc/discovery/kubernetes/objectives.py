"""From InferenceObjectives to the priorities of the objectives that requests name.

Source: the definition v1alpha2 of both API groups: an unset priority is 0, and the pool that is
referred to is in the same namespace. One of the pools' own group, in v1, may refer to several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from extproc.discovery.kubernetes.objects import InferenceObjective, PoolRef

_INT32 = 2**31


def priorities(objectives: Iterable[InferenceObjective], pools: Collection[str]) -> dict[str, int]:
    """Return the priority of each objective of some pools, by name.

    All are of the pools' namespace. The older definition allows any number; one beyond 32 bits
    counts as the nearest within.
    """
    ours = {PoolRef(each) for each in pools}
    return {
        each.metadata.name: int(max(-_INT32, min(each.spec.priority or 0, _INT32 - 1)))
        for each in objectives
        if not ours.isdisjoint(_pools_of(each)) and each.metadata.deletion_timestamp is None
    }


def without_pool(objectives: Iterable[InferenceObjective]) -> list[str]:
    """Return the names of objectives that refer to no pool, as far as they can be read."""
    return [
        each.metadata.name for each in objectives if not any(ref.name for ref in _pools_of(each))
    ]


def _pools_of(objective: InferenceObjective) -> tuple[PoolRef, ...]:
    return objective.spec.pool_ref, *(objective.spec.pool_refs or ())
