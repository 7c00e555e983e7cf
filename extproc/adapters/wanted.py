"""Where adapters should be: the answers of `adapters.placement`, by base model and pools.

Pods that some adapters may go to are placed over together. Where all that are declared fit into
their memory they are loaded at once, else when a request asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from math import inf

from extproc.adapters.declared import Declaration, LoadMode
from extproc.adapters.placement.homes import Capacity, Placement
from extproc.adapters.placement.levels import NAMES_A_PASS
from extproc.adapters.podhistory import PodHistory

_Key = tuple[str, frozenset[str]]
"""A base model, "" for any, and pools, none for all."""


class _Group:
    """The adapters of one base model and some pools, and the pods of these that have it.

    Attributes:
        fits: All of them fit into the pods' memory, but for those that are only loaded on request.
    """

    def __init__(self, before: _Group | None = None) -> None:
        self.placement: Placement = before.placement if before else Placement()
        self.adapters: list[str] = []
        self.capacities: list[Capacity] = []
        self.fits = True


class Wanted:
    """Where each adapter should be."""

    def __init__(self) -> None:
        self._groups: dict[_Key, _Group] = {}
        self._group_of: dict[str, _Group] = {}

    @property
    def is_settled(self) -> bool:
        """All adapters are placed; many that are new at once take several updates."""
        return all(group.placement.is_settled for group in self._groups.values())

    def regroup(
        self,
        declarations: Iterable[Declaration],
        pods: Collection[PodHistory],
        foreign: Mapping[str, int],
    ) -> Iterator[None]:
        """Take other adapters or pods, in passes; until the last one the answers are as before.

        Args:
            foreign: How many adapters each pod has that nobody declared, by address.
        """
        usable = [pod for pod in pods if can_take(pod)]
        groups: dict[_Key, _Group] = {}
        group_of: dict[str, _Group] = {}
        num_wanted: dict[_Key, int] = {}
        keys: dict[_Key, _Key] = {}
        for number, each in enumerate(declarations, start=1):
            if number % NAMES_A_PASS == 0:
                yield
            own = each.base, each.pools
            key = keys.get(own)
            if key is None:
                key = keys[own] = _key(own, usable)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(self._groups.get(key))
                group.capacities = [_capacity(pod, foreign) for pod in usable if _has(pod, key)]
                num_wanted[key] = 0
            group.adapters.append(each.name)
            group_of[each.name] = group
            if each.load is not LoadMode.LAZY:
                num_wanted[key] += max(1, min(each.min_replicas, len(group.capacities)))
        for key, group in groups.items():
            places = [each.max_cpu_loras for each in group.capacities]
            num_places = sum([inf if each is None else each for each in places])
            group.fits = not places or num_wanted[key] <= num_places
        self._groups, self._group_of = groups, group_of

    def update(
        self, rates: Mapping[str, float], *, now: float
    ) -> Generator[None, None, dict[str, None]]:
        """Place by this demand, in seconds of work per second, in passes; return whose homes have
        changed."""
        changed: dict[str, None] = {}
        for group in self._groups.values():
            placement = group.placement
            before = placement.homes
            of_group = {name: rates.get(name, 0.0) for name in group.adapters}
            yield from placement.update(of_group, group.capacities, now=now)
            homes = placement.homes
            if homes is not before:
                changed |= {name: None for name, own in homes.items() if before.get(name) != own}
        return changed

    def num_homes(self, name: str) -> int:
        """Return on how many pods an adapter should be by its demand; 0 where none has room."""
        return len(self._group_of[name].placement.homes.get(name, ()))

    def walk(self, name: str) -> Iterator[str]:
        """Yield the pods that may hold an adapter, those that should first."""
        return self._group_of[name].placement.walk(name)

    def fits(self, name: str) -> bool:
        """Return whether an adapter's pods have places for all that are declared."""
        return self._group_of[name].fits


def can_take(pod: PodHistory) -> bool:
    """Return whether adapters can be loaded there."""
    if not pod.is_usable or pod.state.max_loras == 0:
        return False
    return pod.refusal is None or pod.state.is_resolver


def is_of(pod: PodHistory, pools: frozenset[str]) -> bool:
    """Return whether a pod is in one of some pools; none are named where it may be in any."""
    return not pools or not pools.isdisjoint(pod.state.pools)


def _has(pod: PodHistory, key: _Key) -> bool:
    base, pools = key
    return (not base or base in pod.bases) and is_of(pod, pools)


def _key(own: _Key, pods: Iterable[PodHistory]) -> _Key:
    """Return the group for a base model and pools: that of all pods where they all are in it."""
    return ("", frozenset()) if all(_has(pod, own) for pod in pods) else own


def _capacity(pod: PodHistory, foreign: Mapping[str, int]) -> Capacity:
    state, places = pod.state, pod.state.max_cpu_loras
    if places is not None:
        places = max(0, places - foreign.get(state.address, 0))
    return Capacity(state.address, state.max_loras, places)
