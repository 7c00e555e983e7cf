"""What is declared, what was, and how each adapter is: judged anew where something has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct

from extproc.core.adapters.declared import Declaration, LoadMode
from extproc.core.adapters.fleet import Fleet
from extproc.core.adapters.pods import Pod
from extproc.core.adapters.states import PASSING, AdapterSettings, Failure, Kind
from extproc.core.adapters.versions import Kept, owner_of
from extproc.core.adapters.wanted import Wanted
from extproc.core.placement import PlacementSettings

NUM_SPARES = 3
"""Pods beside those that should have an adapter that it is tried on where it fails. More would
only show the same of most adapters that fail."""


class Deleted(Struct):
    """An adapter that is declared no longer."""

    kept: Kept
    until_s: float  # remembered at least; a load that was given up may still arrive


class Book:
    """The state of all adapters.

    Attributes:
        kept: Declared adapters by name.
        deleted: Those that are declared no longer, and that a pod may have.
        old: Served names that are to be unloaded, and since when.
        open: Names of adapters that are to be loaded somewhere.
        rates: Seconds of work per second by name, where there is any.
        held: Names of adapters that requests wait for, in order.
        surplus: Names of adapters that more pods have than may.
    """

    def __init__(self, settings: AdapterSettings, placement: PlacementSettings | None) -> None:
        self.settings = settings
        self.fleet = Fleet()
        self.wanted = Wanted(placement)
        self.kept: dict[str, Kept] = {}
        self.deleted: dict[str, Deleted] = {}
        self.old: dict[str, float] = {}
        self.open: set[str] = set()
        self.rates: Mapping[str, float] = {}
        self.held: dict[str, None] = {}
        self.surplus: set[str] = set()
        self.by_served: dict[str, str] = {}
        self._families: dict[str, list[str]] = {}
        self._foreign: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._is_regrouped = False
        self._demand: Mapping[str, float] = {}
        self._place_at_s = -inf

    # --- what is told -----------------------------------------------------------------------

    def declare(
        self, declarations: Iterable[Declaration], deleted: Iterable[Declaration], *, now: float
    ) -> None:
        """Take all that is declared, and what else pods may have of ours."""
        before, self.kept, self.by_served = self.kept, {}, {}
        for each in declarations:
            if each.name in self.kept:
                continue
            kept = before.get(each.name)
            if kept is None:
                kept = Kept(each)
            elif kept.declaration != each:
                self.fleet.attempts.forget_name(kept.served)
                kept.edit(each)
                self.fleet.attempts.forget_name(kept.served)
            self.kept[each.name] = kept
            owner = self.by_served.setdefault(kept.served, each.name)
            kept.taken_by = "" if owner == each.name else owner
        until_s = now + self.settings.load_s + self.settings.verify_s
        for name in before.keys() - self.kept.keys():
            self.deleted[name] = Deleted(before[name], until_s)
            self.fleet.attempts.forget_name(before[name].served)
        for each in deleted:
            if each.name not in self.deleted:
                self.deleted[each.name] = Deleted(Kept(each), until_s)
        for name in self.deleted.keys() & self.kept.keys():
            del self.deleted[name]
        self.open &= self.kept.keys()
        self.surplus &= self.kept.keys()
        self._is_regrouped = True

    def hear(self, demand: Mapping[str, float], held: Iterable[str]) -> None:
        """Take who wants what: served names or plain ones."""
        before = self.held
        owners = [owner_of(name, self.kept) for name in held]
        self.held = {name: None for name in owners if name is not None}
        self._dirty |= self.held.keys() ^ before.keys()
        if demand == self._demand and not self._is_regrouped:
            return
        self._demand = demand
        rates: dict[str, float] = {}
        for name, rate in demand.items():
            owner = name if name in self.kept else owner_of(name, self.kept)
            if owner is not None and rate > 0:
                rates[owner] = rates.get(owner, 0.0) + rate
        self._dirty |= rates.keys() ^ self.rates.keys()
        self.rates = rates

    def files_changed(self, name: str) -> None:
        """Try an adapter again at once."""
        kept = self.kept.get(name)
        if kept is not None:
            self.fleet.attempts.forget_name(kept.served)
            self._dirty.add(name)

    # --- what follows -----------------------------------------------------------------------

    def judge(self, *, now: float) -> None:
        """Judge anew all that has changed."""
        fleet = self.fleet
        changed = fleet.changed | fleet.attempts.due(now)
        fleet.changed = set()
        if changed or self._is_regrouped:
            self._sort_listed()
            owners = [owner_of(served, self.kept) for served in changed]
            self._dirty.update([name for name in owners if name is not None])
        self._place(now=now)
        for name in self._dirty:
            kept = self.kept.get(name)
            if kept is not None:
                self._judge(name, kept, now=now)
        self._dirty = set()
        self._retire(now=now)

    def _sort_listed(self) -> None:
        """Find whose versions the names are that pods list."""
        families: dict[str, list[str]] = {}
        foreign: dict[str, int] = {}
        pods_of = self.fleet.pods_of
        for served in dict.fromkeys([*pods_of, *self.old]):
            name = owner_of(served, self.kept) or owner_of(served, self.deleted)
            if name is not None:
                families.setdefault(name, []).append(served)
                continue
            for address in pods_of.get(served, ()):
                foreign[address] = foreign.get(address, 0) + 1
        self._families = families
        if foreign != self._foreign:
            self._foreign, self._is_regrouped = foreign, True

    def _place(self, *, now: float) -> None:
        if self.fleet.is_reshaped or self._is_regrouped:
            declarations = [kept.declaration for kept in self.kept.values()]
            self.wanted.regroup(declarations, self.fleet.pods.values(), self._foreign)
            self.fleet.is_reshaped = self._is_regrouped = False
            self._place_at_s = now
            self._dirty.update(self.kept)
        if now >= self._place_at_s or not self.wanted.is_settled:
            self._dirty |= self.wanted.update(self.rates, now=now)
            self._place_at_s = now + self.settings.place_s

    def _judge(self, name: str, kept: Kept, *, now: float) -> None:
        """Find who has an adapter, which version serves, and where it is to be loaded."""
        self.open.discard(name)
        self.surplus.discard(name)
        if kept.taken_by:
            message = f"pods know it as {kept.served}, which is {kept.taken_by}"
            kept.trouble, kept.retry_s = (Failure.CONFLICT, "", message), inf
            return
        self._count(name, kept)
        num = self._num_wanted(name, kept)
        self._aim(name, kept, num or 1, now=now)
        kept.num_desired = num and kept.num_desired
        kept.serve(min(kept.declaration.min_replicas, len(kept.targets)))
        kept.missing = self._missing(kept, num)
        if kept.missing:
            self.open.add(name)
        if kept.num_surplus:
            self.surplus.add(name)
        for served in self._families.get(name, ()):
            if served in (kept.served, kept.serving):
                self.old.pop(served, None)
            else:
                self.old.setdefault(served, now)

    def _count(self, name: str, kept: Kept) -> None:
        """Count who has each version."""
        ready: dict[str, int] = {}
        holders: set[str] = set()
        earlier: set[str] = set()
        for served in self._families.get(name, ()):
            pods = [self.fleet.pods[address] for address in self.fleet.pods_of.get(served, ())]
            usable = [pod for pod in pods if pod.is_usable]
            if served == kept.served:
                own = [pod for pod in usable if _has(kept, pod)]
                holders.update([pod.state.address for pod in own])
                usable = own + [pod for pod in usable if kept.had(pod.listed[served])]
                earlier = {pod.state.address for pod in usable[len(own) :]}
            if usable:
                ready[served] = len(usable)
        for address in holders:
            self._arrived(address, kept.served)
        kept.ready, kept.holders, kept.earlier_holders = ready, holders, earlier

    def _arrived(self, address: str, served: str) -> None:
        """Forget what failed: a pod has it all the same."""
        attempt = self.fleet.attempts.of(address, served)
        if attempt is not None and attempt.kind is Kind.LOAD:
            self.fleet.attempts.succeed(address, served)

    def _num_wanted(self, name: str, kept: Kept) -> int:
        """Return how many pods should have an adapter now; 0 for none before a request asks."""
        declared = kept.declaration
        kept.is_eager = declared.load is LoadMode.EAGER or (
            declared.load is LoadMode.AUTO and declared.min_replicas > 0 and self.wanted.fits(name)
        )
        num = declared.min_replicas
        if kept.is_eager or name in self.rates:
            num = max(num, self.wanted.num_homes(name), 1)
        elif name in self.held or kept.ready.keys() - {kept.served}:
            num = max(num, 1)
        else:
            return 0
        return num if declared.max_replicas is None else min(num, declared.max_replicas)

    def _aim(self, name: str, kept: Kept, num: int, *, now: float) -> None:
        """Find the pods that should have an adapter."""
        good: list[str] = []
        failed_s: list[float] = []
        num_bad = 0
        kept.trouble, kept.spares = None, ()
        is_urgent = name in self.held and not kept.holders
        limit = num + NUM_SPARES if is_urgent else num
        for address in self.wanted.walk(name):
            pod = self.fleet.pods[address]
            if not _fits(kept, pod):
                continue
            if not pod.state.is_resolver:
                problem = self._problem(kept, pod)
                if problem is not None:
                    failure, message, next_s = problem
                    kept.trouble = kept.trouble or (failure, address, message)
                    if next_s > now:
                        failed_s.append(next_s)
                        num_bad += failure not in PASSING
                        if num_bad > NUM_SPARES and not kept.holders:
                            break
                        continue
            good.append(address)
            if len(good) >= limit:
                break
        kept.targets, kept.spares = tuple(good[:num]), tuple(good[num:])
        resolvers = {each for each in kept.targets if self.fleet.pods[each].state.is_resolver}
        if resolvers - kept.holders:
            kept.holders |= resolvers
            kept.ready[kept.served] = len(kept.holders)
        kept.num_desired = min(num, len(good) + len(failed_s)) or num
        kept.retry_s = min(failed_s, default=-inf) if not good else -inf
        if not good and not failed_s:
            kept.trouble = self._why_nowhere(kept)
            kept.retry_s = -inf if kept.trouble is None else inf

    def _problem(self, kept: Kept, pod: Pod) -> tuple[Failure, str, float] | None:
        """Return why an adapter is not on a pod, and when that may be otherwise."""
        address, root = pod.state.address, pod.listed.get(kept.served)
        if root is not None and not kept.has(root):
            if kept.had(root):
                return Failure.CONFLICT, f"pods have {root}: a new source needs a version", inf
            return Failure.CONFLICT, f"the pod has {root} under that name", inf
        attempt = self.fleet.attempts.of(address, kept.served)
        if attempt is None or attempt.kind is not Kind.LOAD:
            return None
        return attempt.failure, attempt.message, attempt.next_s

    def _why_nowhere(self, kept: Kept) -> tuple[Failure, str, str] | None:
        """Return why no pod can take an adapter; None where no pod is up."""
        usable = [pod for pod in self.fleet.pods.values() if pod.is_usable]
        for pod in usable:
            if pod.refusal is not None:
                failure, message, _ = pod.refusal
                return failure, pod.state.address, message
        if not usable:
            return None
        return Failure.UNFIT, "", _misfit(kept)

    def _missing(self, kept: Kept, num: int) -> tuple[str, ...]:
        """Return the pods on which an adapter is to be loaded, those that should have it first."""
        most, coming = kept.declaration.max_replicas, self.fleet.coming_to(kept.served)
        coming = coming - kept.holders
        has_enough = not kept.is_eager and len(kept.holders) + len(coming) >= num
        if not num or has_enough:
            return ()
        lacking = [a for a in kept.targets if a not in kept.holders and a not in coming]
        if most is not None:
            lacking = lacking[: max(0, most - len(kept.holders) - len(coming))]
        return tuple(lacking)

    def versions(self, kept: Kept) -> Sequence[str]:
        """Return the served names of an adapter that any pod lists, or has requests for."""
        return self._families.get(kept.declaration.name, ())

    def holders(self, kept: Kept) -> frozenset[str]:
        """Return the addresses of the pods that may get requests for the version that serves."""
        if kept.serving == kept.served:
            found = kept.holders | kept.earlier_holders
        else:
            listing = self.fleet.pods_of.get(kept.serving or "", ())
            found = {address for address in listing if self.fleet.pods[address].is_usable}
        leaving = {a for a in found if self.fleet.pods[a].leaving == kept.serving}
        return frozenset(found - leaving)

    # --- what goes --------------------------------------------------------------------------

    def _retire(self, *, now: float) -> None:
        """See which deleted adapters are to go, and which versions no pod has any more."""
        for name in self.deleted:
            for served, _ in self._left_of(name):
                self.old.setdefault(served, now)
        for served in [each for each in self.old if each not in self.fleet.pods_of]:
            if not self._is_in_use(served):
                del self.old[served]
                owner = owner_of(served, self.kept)
                if owner is not None:
                    self.kept[owner].forget(served)
                    self._families[owner].remove(served)

    def _left_of(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what pods have of a deleted adapter: served name and address."""
        for served in self._families.get(name, ()):
            for address in self.fleet.pods_of.get(served, ()):
                if self.is_ours(address, served):
                    yield served, address

    def is_ours(self, address: str, served: str) -> bool:
        """Return whether what a pod has under an old name may be unloaded.

        Not what was never loaded by anyone, and has the name of an adapter that was deleted.
        """
        name = owner_of(served, self.deleted)
        if name is None or name in self.kept:
            return True
        kept, root = self.deleted[name].kept, self.fleet.pods[address].listed[served]
        if served != kept.served:
            return True
        return bool(kept.path) and (kept.has(root) or kept.had(root))

    def _is_in_use(self, served: str) -> bool:
        return any(served in pod.state.pending_by_adapter for pod in self.fleet.pods.values())

    def forgotten(self, *, now: float) -> list[str]:
        """Forget deleted adapters that no pod has any more; return their names."""
        done = [
            name
            for name, deleted in self.deleted.items()
            if now >= deleted.until_s and not any(self._left_of(name))
        ]
        for name in done:
            del self.deleted[name]
        return done


def _has(kept: Kept, pod: Pod) -> bool:
    """Return whether what a pod lists is what is declared; a resolver looks by the name."""
    return pod.state.is_resolver or kept.has(pod.listed[kept.served])


def _fits(kept: Kept, pod: Pod) -> bool:
    rank, most = kept.declaration.rank, pod.state.max_rank
    if rank is not None and most is not None and rank > most:
        return False
    return bool(kept.path) or pod.state.is_resolver or kept.served in pod.listed


def _misfit(kept: Kept) -> str:
    declared = kept.declaration
    if not kept.path:
        return "no pod has it, and it has no source to load it from"
    rank = "" if declared.rank is None else f" and loads adapters of rank {declared.rank}"
    return f"no pod has the base model {declared.base or '(any)'}{rank}"
