"""Which tenants' requests run on endpoints, and how many places they leave to others.

A response that takes long has its place for as long, and a tenant with many of them has all places
for that time. Others, with a request now and then, would wait for the next end each time. So who
runs many, and more than its share, leaves as many places to others as they had in the mean of late,
and one. Where responses are short, the next end comes soon, and empty places would be lost.

Priority and flow (`Claim.flow`) say who it is. Only requests of this router count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, inf
from typing import NamedTuple

from extproc.learned.concurrency import LONG_S, MANY
from extproc.tenancy import Claim

LATELY_S = 10.0
"""So long after a request of it began or ended, places are left to a tenant; and the time constant
of how many it has."""
MAX_SEEN = 10_000
"""Tenants that are remembered, beside those that run any: 2.6 MB, and 3 ms to forget them all."""
_Who = tuple[int, str]


@dataclass(slots=True)
class _Load:
    """The sequences that run of one tenant, or of all: now, and in the mean of late.

    Written often: CPython takes ten times as long to set a field of a Struct.
    """

    at_s: float  # for which the mean is
    num: int = 0
    mean: float = 0.0
    num_ended: float = 0.0  # of late, until then
    seen_s: float = 0.0  # a request began or ended

    def mean_at(self, now: float) -> float:
        return self.num + (self.mean - self.num) * _kept(self.at_s, now)


class Tenants:
    """The sequences that run of each tenant, of those that run any or were seen lately."""

    def __init__(self) -> None:
        self._all = _Load(0.0)  # the only one's own, as long as there has been no other
        self._loads: dict[_Who, _Load] = {}  # in order of `at_s`

    def count(self, claim: Claim, num: int, *, now: float) -> None:
        """Count a request of so many sequences, or its end by as many less."""
        who, every, loads = (claim.priority, claim.flow), self._all, self._loads
        load = loads.pop(who, None) if len(loads) > 1 else loads.get(who)
        if load is None:
            load = _Load(now)
            if not loads and not every.seen_s:
                self._all = every = load
            elif every is next(iter(loads.values()), None):
                self._all = every = replace(every)
        loads[who] = load
        if load is not every:
            every.mean, every.at_s = every.mean_at(now), now
            every.num += num
        # `mean_at`, written out: every request comes here twice.
        kept = exp((load.at_s - now) / LATELY_S) if load.at_s < now else 1.0
        load.mean = load.num + (load.mean - load.num) * kept
        load.num_ended *= kept
        if num < 0:
            load.num_ended -= num
        load.at_s = load.seen_s = now
        load.num += num
        if len(loads) > 1:
            self._forget(now)

    def is_alone(self, claim: Claim, now: float) -> bool:
        """Return whether no request of anybody else has begun or ended lately."""
        who, from_s = (claim.priority, claim.flow), now - LATELY_S
        return not any(x.seen_s >= from_s for each, x in self._loads.items() if each != who)

    def num_left(self, claim: Claim, now: float) -> int:
        """Return how many places a request leaves to others, at least.

        It leaves none if it must not wait, nor unless many run of its tenant, for long, and more
        than its share, and there are others of its priority or a higher one. Until some have ended,
        all are taken for long.
        One is left at any rate: ends of others' requests may be told late.
        """
        loads, everything = self._loads, self._all
        if len(loads) < 2 or not claim.waits:
            return 0
        who = claim.priority, claim.flow
        own = loads.get(who)
        if own is None or own.num < MANY:
            return 0
        self._forget(now)
        if own.num * len(loads) <= everything.num:
            return 0
        if LATELY_S * own.mean_at(now) < LONG_S * own.num_ended * _kept(own.at_s, now):
            return 0
        if not any(each[0] >= claim.priority for each in loads if each != who):
            return 0
        mean = everything.mean_at(now) - own.mean_at(now)
        return max(1, 1 + round(mean - (everything.num - own.num)))

    def _forget(self, now: float) -> None:
        """Forget those that were not seen lately, and one more if there are too many."""
        loads = self._loads
        while loads and next(iter(loads.values())).at_s < now - LATELY_S:
            self._forget_first(now)
        if len(loads) > MAX_SEEN:
            self._forget_first(now)

    def _forget_first(self, now: float) -> None:
        """Forget the first one if it runs nothing; else it goes on as the last."""
        who, load = next(iter(self._loads.items()))
        del self._loads[who]
        if load.num:
            load.num_ended *= _kept(load.at_s, now)
            load.mean, load.at_s = load.mean_at(now), now
            self._loads[who] = load


class EndpointPlaces(NamedTuple):
    """The places of one endpoint.

    Attributes:
        group: Endpoints of one group are taken to be alike.
        most: Sequences that it runs at a time; infinite for not known.
        num_there: Sequences.
    """

    group: str
    most: float
    num_there: int


def left(places: Mapping[str, EndpointPlaces], num_left: int) -> list[str]:
    """Return the endpoints where one more request would take a place that is left to others.

    One of which nothing is known has as many places as any of its group has, or runs. While nothing
    is known of the whole group, the one that runs most tries whether there are more: else nobody
    would find out.
    """
    known = {group for group, most, _ in places.values() if most < inf}
    sizes = defaultdict[str, float](float)
    for group, most, num_there in places.values():
        sizes[group] = max(sizes[group], num_there if most == inf else most)
    free = {name: min(most, sizes[group]) - num for name, (group, most, num) in places.items()}
    if sum(max(0, num) for num in free.values()) > num_left:
        return []
    return [name for name, num in free.items() if num > 0 or places[name].group in known]


def _kept(from_s: float, to_s: float) -> float:
    """Return the part of a mean that is left."""
    return exp((from_s - to_s) / LATELY_S) if from_s < to_s else 1.0
