"""Adapters as a service: which calls bring the pods to what is declared.

Nobody has to trust what a call says: how an adapter is follows from what pods list, whoever loaded
it. So several of these may work on the same pods, and one that starts anew knows what it has to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from math import inf

from extproc.adapters.adapterstates import (
    Action,
    AdapterSettings,
    AdapterState,
    AdapterStatus,
    CallKind,
    Failure,
    Result,
    VersionState,
    VersionStatus,
)
from extproc.adapters.book import Book
from extproc.adapters.calls import calls, next_s
from extproc.adapters.judging import judge, state_of
from extproc.adapters.versions import Kept
from extproc.passes import at_once
from extproc.pods.podstate import PodState


class Planner(Book):
    """All adapters that are declared, and what is to be done about them."""

    def __init__(self, settings: AdapterSettings | None = None) -> None:
        super().__init__(settings)
        self._now = -inf

    def passes(
        self,
        pods: Iterable[PodState],
        demand: Mapping[str, float],
        held: Iterable[str] = (),
        *,
        now: float,
        is_leading: bool = True,
        is_led: bool = False,
    ) -> Iterator[list[Action]]:
        """Take what is known now, in passes. The last one yields the calls to make at once.

        Between two passes calls may end and requests be answered, but nothing is to be declared.

        To be called every second, and when something is new: a call has ended, `declare` was
        called, an adapter is asked for that no pod has. `finished` is to be called for each call.

        Args:
            pods: All that there are.
            demand: Seconds of work per second, by an adapter's name or served name.
            held: Names or served names that requests wait for, the next in order first.
            now: Monotonic seconds.
            is_leading: Calls are to be made by this router; else only those that `held` needs.
            is_led: Another router makes those, too, and all that it knows of.
        """
        try:
            for found in self._passes(pods, demand, held, now, is_leading, is_led):
                self.forget_holders()
                yield found
        finally:
            self.forget_holders()

    def _passes(
        self,
        pods: Iterable[PodState],
        demand: Mapping[str, float],
        held: Iterable[str],
        now: float,
        is_leading: bool,
        is_led: bool,
    ) -> Iterator[list[Action]]:
        self._now = now
        self.fleet.see(pods, settings=self.settings, now=now)
        yield []
        self.hear(demand, held)
        for _ in judge(self, now=now):
            yield []
        found = calls(self, now=now, is_leading=is_leading and not is_led, is_led=is_led)
        for action in found:
            self.fleet.begin(action, now=now)
            kept = self.kept.get(self.by_served.get(action.name, ""))
            if (
                kept is not None
                and kept.state is AdapterState.COLD
                and action.kind is not CallKind.UNLOAD
            ):
                self.count(kept, AdapterState.LOADING)
        self.next_s = next_s(self, now=now)
        yield found

    tick = at_once(passes)

    def finished(self, action: Action, result: Result, *, now: float) -> None:
        """Take what came of a call; `tick` says what follows."""
        self.forget_holders()
        self.fleet.finished(action, result, settings=self.settings, now=now)
        if action.kind is CallKind.LOAD:
            self.ended(action.name, now=now)
        self.next_s = now

    # --- answers ----------------------------------------------------------------------------

    def serving(self, name: str) -> str | None:
        """Return the served name that requests for an adapter are to have, None for none yet."""
        kept = self.kept.get(name)
        return kept.serving if kept is not None and kept.is_ready else None

    def last_holders(self, name: str, among: Iterable[str]) -> frozenset[str]:
        """Return the pods that have what is declared, of some that are not up and still serve."""
        kept, pods = self.kept.get(name), self.fleet.pods
        if kept is None:
            return frozenset()
        served = kept.served
        found = {a for a in among if a in pods and served in pods[a].listed}
        found = {a for a in found if kept.has(pods[a].listed[served])}
        if self.settings.needs_effect:
            found = {a for a in found if pods[a].effect(served)}
        return frozenset(a for a in found if not pods[a].has_left(served))

    def proven(self, served: str) -> frozenset[str] | None:
        """Return the addresses of the pods that may get requests for a version by its served name:
        that have shown its effect; kept as `holders` are. None for all that list it, where none is
        needed.
        """
        if not self.settings.needs_effect:
            return None
        found = self._proven.get(served)
        if found is None:
            pods, listing = self.fleet.pods, self.fleet.pods_of.get(served)
            if listing is None:  # a name of a client's: of those nothing is kept
                return frozenset()
            found = frozenset(address for address in listing if pods[address].effect(served))
            self._proven[served] = found
        return found

    def state(self, name: str) -> AdapterState:
        """Return how an adapter is, as of the last `tick`."""
        kept = self.kept.get(name)
        if kept is None:
            return AdapterState.UNKNOWN
        return state_of(self, kept, self.fleet.coming(), now=self._now)

    def status(self, name: str) -> AdapterStatus | None:
        """Return all about an adapter; None where it is not declared."""
        kept = self.kept.get(name)
        return None if kept is None else status_of(self, kept, self.fleet.coming(), now=self._now)

    def statuses(self) -> list[AdapterStatus]:
        """Return all about all adapters, in the order of their declarations."""
        coming = self.fleet.coming()
        return [status_of(self, each, coming, now=self._now) for each in self.kept.values()]

    def unloading(self) -> list[tuple[str, str]]:
        """Return what is being unloaded now: address and served name."""
        pods = self.fleet.pods.items()
        return [(address, pod.leaving) for address, pod in pods if pod.leaving]

    def failures(self) -> Mapping[tuple[str, Failure], int]:
        """Return how many adapters failed, by address and reason."""
        failures, pods = self.fleet.attempts.counts(), self.fleet.pods
        if any(pod.state.why_no_load for pod in pods.values()):
            for name in self.open:
                away = unsafe(self, self.kept[name])
                failures.update((address, Failure.UNSAFE_VERSION) for address in away)
        for address, pod in pods.items():
            owners = [self.by_served.get(served) for served in pod.without_effect()]
            num = sum(name is not None and address in self.kept[name].holders for name in owners)
            failures += Counter({(address, Failure.NO_EFFECT): num})
        return failures


def status_of(book: Book, kept: Kept, coming: Container[str], *, now: float) -> AdapterStatus:
    """Return all about an adapter."""
    reason, message = None, ""
    if kept.trouble is not None:
        reason, address, text = kept.trouble
        message = f"{address}: {text}" if address else text
    for address in without_effect(book, kept):
        reason = Failure.NO_EFFECT
        message = f"{address}: it answers as its base model does"
    for address in unsafe(book, kept):
        reason = Failure.UNSAFE_VERSION
        message = f"{address}: {book.fleet.pods[address].state.why_no_load}"
    return AdapterStatus(
        kept.declaration.name,
        state_of(book, kept, coming, now=now),
        reason,
        message,
        tuple(_versions(book, kept)),
    )


def unsafe(book: Book, kept: Kept) -> list[str]:
    """Return the pods that are to load an adapter, and whose version keeps them from it now."""
    pods = book.fleet.pods
    return [each for each in kept.missing if each in pods and pods[each].state.why_no_load]


def without_effect(book: Book, kept: Kept) -> list[str]:
    """Return the pods on which an adapter answers as its base model does."""
    pods = book.fleet.pods
    found = [each for each in kept.holders if each in pods]
    return [each for each in found if pods[each].effect(kept.served) is False]


def _versions(book: Book, kept: Kept) -> Iterator[VersionStatus]:
    is_serving = kept.is_ready and kept.serving == kept.served
    state = VersionState.SERVING if is_serving else VersionState.WAITING
    yield VersionStatus(kept.served, state, kept.num_desired, len(kept.holders))
    others = book.versions(kept)
    for served in others:
        if served != kept.served:
            is_serving = served == kept.serving
            state = VersionState.SERVING if is_serving else VersionState.DRAINING
            yield VersionStatus(served, state, 0, kept.ready.get(served, 0))
    for served in kept.removed:
        if served not in others:
            yield VersionStatus(served, VersionState.REMOVED, 0, 0, removable=True)
