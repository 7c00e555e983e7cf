"""Present and former declarations, and the state of each adapter: judged anew after changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct

from extproc.adapters.adapterstates import AdapterSettings, AdapterState
from extproc.adapters.declared import Declaration
from extproc.adapters.ledger import PodLedger
from extproc.adapters.podhistory import PodHistory
from extproc.adapters.versions import Kept, owner_of
from extproc.adapters.wanted import Wanted


class Deleted(Struct):
    """An adapter that is declared no longer."""

    kept: Kept
    until_s: float  # remembered at least; a load that was given up may still arrive


class Book:
    """The state of all adapters.

    Attributes:
        kept: Declared adapters by name.
        deleted: Adapters that are declared no longer, and that a pod may have.
        old: Served names that are to be unloaded, and since when.
        open: Names of adapters that are to be loaded somewhere.
        unproven: Names of adapters whose effect is to be checked somewhere.
        refused: Names of adapters that some pod has shown to have no effect there, where one is
            needed.
        rates: Seconds of work per second by name, where there is any.
        held: Names of adapters that requests wait for, in order.
        surplus: Names of adapters that other pods have than may, or more.
        by_served: The adapter that has a served name.
        families: Served names that pods list, by the adapter that they are versions of.
        num_by_state: Adapters, as they were judged last.
        dirty: Names of adapters to be judged anew, at once; `later` in turn.
        is_regrouped: Other adapters are to be placed, or other pods.
        leaving_elsewhere: Where other routers have adapters unloaded: address and served name.
        next_s: When there is something to do although nothing is new; inf for never.
    """

    def __init__(self, settings: AdapterSettings | None = None) -> None:
        self.settings = settings or AdapterSettings()
        self.next_s = inf
        self.fleet = PodLedger(self.declared_of)
        self.wanted = Wanted()
        self.kept: dict[str, Kept] = {}
        self.deleted: dict[str, Deleted] = {}
        self.old: dict[str, float] = {}
        self.open: set[str] = set()
        self.unproven: set[str] = set()
        self.refused: set[str] = set()
        self.rates: Mapping[str, float] = {}
        self.held: dict[str, None] = {}
        self.surplus: set[str] = set()
        self.by_served: dict[str, str] = {}
        self.families: dict[str, list[str]] = {}
        self.num_by_state: Counter[AdapterState] = Counter()
        self._foreign: dict[str, int] = {}
        self.dirty: set[str] = set()
        self.later: dict[str, None] = {}
        self.is_regrouped = False
        self._demand: Mapping[str, float] = {}
        self._place_at_s = -inf
        self.leaving_elsewhere: Collection[tuple[str, str]] = ()
        # Of pods, until something changes here: by names, and by served names.
        self._holders: dict[str, frozenset[str]] = {}
        self._proven: dict[str, frozenset[str]] = {}

    # --- inputs -----------------------------------------------------------------------------

    def configure(self, settings: AdapterSettings) -> None:
        """Apply other limits."""
        self.forget_holders()
        self.settings = settings
        self.later.update(dict.fromkeys(self.kept))

    def declare(
        self,
        declarations: Iterable[Declaration],
        *,
        now: float,
        deleted: Iterable[Declaration] = (),
    ) -> None:
        """Replace what is declared, at once; of two with one name the first counts.

        An adapter that is no longer declared is unloaded after its last request.

        Args:
            declarations: Checked ones.
            now: Monotonic seconds.
            deleted: Declared earlier, as far as this process does not know it by itself.
        """
        self.forget_holders()
        before, self.kept, self.by_served = self.kept, {}, {}
        for each in declarations:
            if each.name not in self.kept:
                self.kept[each.name] = self._take(each, before)
        until_s = now + self.settings.load_s + self.settings.verify_s
        for name in before.keys() - self.kept.keys():
            self.deleted[name] = Deleted(before[name], until_s)
            self.fleet.attempts.forget_name(before[name].served)
        self.delete(deleted, now=now)
        for names in (self.open, self.unproven, self.refused, self.surplus):
            names.intersection_update(self.kept)
        self.num_by_state = Counter([kept.state for kept in self.kept.values()])
        self.is_regrouped, self.next_s = True, now

    def delete(self, deleted: Iterable[Declaration], *, now: float) -> None:
        """Take what was declared earlier, and is not now."""
        until_s = now + self.settings.load_s + self.settings.verify_s
        for each in deleted:
            if each.name not in self.kept and each.name not in self.deleted:
                self.deleted[each.name] = Deleted(Kept(each), until_s)
                self.fleet.follow(each.name)
                self.is_regrouped, self.next_s = True, now

    def _take(self, declaration: Declaration, before: Mapping[str, Kept]) -> Kept:
        """Return what is known of an adapter, by its declaration of now."""
        name = declaration.name
        kept, deleted = before.get(name), self.deleted.pop(name, None)
        if kept is None and deleted is not None:
            kept = deleted.kept
            self.later[name] = None
        if kept is None:
            kept = Kept(declaration)
            self.fleet.follow(name)
        if kept.declaration is not declaration and kept.declaration != declaration:
            self.fleet.attempts.forget_name(kept.served)
            kept.edit(declaration)
            self.fleet.attempts.forget_name(kept.served)
            self.later[name] = None
        self.by_served[kept.served] = name
        self.old.pop(kept.served, None)
        return kept

    def count(self, kept: Kept, state: AdapterState) -> None:
        """Count an adapter that is in a state now."""
        self.num_by_state[kept.state] -= 1
        self.num_by_state[state] += 1
        kept.state = state

    def owner(self, served: str) -> str | None:
        """Return the declared adapter that a name is, or is a version of."""
        return self.by_served.get(served) or owner_of(served, self.kept)

    def declared_of(self, served: Iterable[str]) -> list[str]:
        """Return those of some names that may be of a declared adapter, or of one that was.

        Pods may list tens of thousands of others: this look takes a twentieth of that for an owner.
        """
        names, kept, deleted = self.by_served, self.kept, self.deleted
        return [
            each
            for each in served
            if "@" in each or each in names or each in kept or each in deleted
        ]

    def hear(self, demand: Mapping[str, float], held: Iterable[str]) -> None:
        """Take who wants what: served names or plain ones."""
        before = self.held
        owners = [self.owner(name) for name in held]
        self.held = {name: None for name in owners if name is not None}
        self.dirty |= self.held.keys() ^ before.keys()
        if demand == self._demand and not self.is_regrouped:
            return
        self._demand = demand
        rates: dict[str, float] = {}
        for name, rate in demand.items():
            owner = self.owner(name)
            if owner is not None and rate > 0:
                rates[owner] = rates.get(owner, 0.0) + rate
        self.later.update(dict.fromkeys(rates.keys() ^ self.rates.keys()))
        self.rates = rates

    def set_leaving(self, places: Collection[tuple[str, str]]) -> None:
        """Replace the places where other routers unload adapters now: address and served name."""
        self.forget_holders()
        self.leaving_elsewhere = places

    def files_changed(self, name: str, *, now: float) -> None:
        """Try an adapter again at once: its files are different."""
        self.next_s = now
        kept = self.kept.get(name)
        if kept is not None:
            self.fleet.attempts.forget_name(kept.served)
            self.dirty.add(name)

    # --- what follows ---------------------------------------------------------------------

    def sort_listed(self) -> None:
        """Find whose versions the names are that pods list."""
        families: dict[str, list[str]] = {}
        num_own: dict[str, int] = {}
        pods_of = self.fleet.pods_of
        for served in dict.fromkeys(self.declared_of((*pods_of, *self.old))):
            name = self.owner(served) or owner_of(served, self.deleted)
            if name is not None:
                families.setdefault(name, []).append(served)
                for address in pods_of.get(served, ()):
                    num_own[address] = num_own.get(address, 0) + 1
        self.families = families
        foreign = {
            address: _num_foreign(pod, num_own.get(address, 0))
            for address, pod in self.fleet.pods.items()
        }
        if foreign != self._foreign:
            self._foreign, self.is_regrouped = foreign, True

    def place(self, *, now: float) -> Iterator[None]:
        """Find anew where adapters should be, if that is due, in passes."""
        if self.fleet.is_reshaped or self.is_regrouped:
            self.fleet.is_reshaped = self.is_regrouped = False
            declarations = [kept.declaration for kept in self.kept.values()]
            try:
                yield from self.wanted.regroup(
                    declarations, self.fleet.pods.values(), self._foreign
                )
            except BaseException:
                self.is_regrouped = True  # it was left before its end
                raise
            self._place_at_s = now
            self.later.update(dict.fromkeys(self.kept))
        if now >= self._place_at_s or not self.wanted.is_settled:
            self.later.update((yield from self.wanted.update(self.rates, now=now)))
            self._place_at_s = now + self.settings.place_s

    def versions(self, kept: Kept) -> Sequence[str]:
        """Return the served names of an adapter that any pod lists, or has requests for."""
        return self.families.get(kept.declaration.name, ())

    def holders(self, name: str) -> frozenset[str]:
        """Return the addresses of the pods that may get requests under the name of the version that
        serves: the same object until something changes here.

        Pods that have something else under it are not among them, nor those that are unloading it;
        resolvers are that should have it, whether they list it or not.
        """
        found = self._holders.get(name)
        if found is None:
            kept = self.kept.get(name)
            if kept is None:
                return frozenset()
            found = self._holders[name] = self._find_holders(kept)
        return found

    def forget_holders(self) -> None:
        """Look for holders anew, as what they follow from has changed."""
        self._holders.clear()
        self._proven.clear()

    def _find_holders(self, kept: Kept) -> frozenset[str]:
        served, pods, elsewhere = kept.serving or "", self.fleet.pods, self.leaving_elsewhere
        if kept.serving == kept.served:  # a pod may have gone since that was looked at
            found = {a for a in (*kept.holders, *kept.earlier_holders) if a in pods}
        else:
            listing = self.fleet.pods_of.get(served, ())
            found = {address for address in listing if pods[address].is_usable}
        if self.settings.needs_effect:
            found = {a for a in found if pods[a].effect(served)}
        gone = {a for a in found if pods[a].has_left(served) or (a, served) in elsewhere}
        return frozenset(found - gone)

    # --- what goes --------------------------------------------------------------------------

    def retire(self, *, now: float) -> None:
        """See which deleted adapters are to go, and which versions no pod has any more."""
        for name in self.deleted:
            for served, _ in self._left_of(name):
                self.old.setdefault(served, now)
        gone = [each for each in self.old if each not in self.fleet.pods_of]
        states = [pod.state for pod in self.fleet.pods.values()] if gone else []
        unused = [
            served
            for served in gone
            if not any(served in state.pending_by_adapter for state in states)
        ]
        for served in unused:
            del self.old[served]
            owner = self.owner(served)
            if owner is not None:
                self.kept[owner].forget(served)
        if unused:
            self.sort_listed()

    def _left_of(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what pods have of a deleted adapter: served name and address."""
        for served in self.families.get(name, ()):
            for address in self.fleet.pods_of.get(served, ()):
                if self.is_ours(address, served):
                    yield served, address

    def is_ours(self, address: str, served: str) -> bool:
        """Return whether what a pod has under an old name may be unloaded.

        Not what was never loaded by anyone, and has the name of an adapter that was deleted.
        """
        name = owner_of(served, self.deleted)
        if name is None:
            return True
        kept, root = self.deleted[name].kept, self.fleet.pods[address].listed[served]
        if served != kept.served:
            return True
        return bool(kept.path) and (kept.has(root) or kept.had(root))

    def leaving(self) -> frozenset[str]:
        """Return the served names of which `is_leaving` is true."""
        if not self.deleted:
            return frozenset()
        return frozenset(served for served in self.fleet.pods_of if self.is_leaving(served))

    def is_leaving(self, served: str) -> bool:
        """Return whether what pods list under a name is to go, since it is declared no longer.

        Before a look at a pod that lists it, too: it is not known yet to be that pod's own.
        """
        if owner_of(served, self.deleted) is None or self.owner(served) is not None:
            return False
        pods = self.fleet.pods_of.get(served)
        return not pods or any(self.is_ours(address, served) for address in pods)

    def ended(self, served: str, *, now: float) -> None:
        """Remember a deleted adapter on: a load that was given up may arrive later."""
        name = owner_of(served, self.deleted)
        if name is not None:
            self.deleted[name].until_s = now + self.settings.load_s + self.settings.verify_s

    def forgotten(self, *, now: float) -> list[str]:
        """Forget deleted adapters that no pod has any more; return their names, once."""
        done = [
            name
            for name, deleted in self.deleted.items()
            if now >= deleted.until_s
            and not any(self._left_of(name))
            and not self.fleet.coming_to(deleted.kept.served)
        ]
        for name in done:
            del self.deleted[name]
        return done


def _num_foreign(pod: PodHistory, num_own: int) -> int:
    """Return how many places of a pod have adapters that nobody declared: what it lists beyond its
    places makes no difference."""
    places = pod.state.max_cpu_loras
    return 0 if places is None else min(places, len(pod.listed) - num_own)
