"""Which calls to make now.

1. One call to a pod at once, and as many loads in the fleet as the settings say.
2. Adapters that requests wait for come first, then those with the most work. Calm pods come before
   busy ones.
3. A load takes a GPU slot at once, and may push out a running adapter's. So it goes to pods where a
   slot is free or idle; to one where all run, only when that has been so for long. To a pod whose
   engine is known to mix weights, only while it has no requests.
4. Whether an adapter has an effect is checked first where requests wait for it. No other pod waits
   for a check, and checks are no loads: a pod that hangs costs itself alone.
5. Where a pod's memory has no place left, the adapter that is wanted least goes first. None with
   requests goes, and none that nobody declared. Where none may go, adapters that requests wait for
   are loaded all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from msgspec import Struct

from extproc.adapters.adapterstates import Action, CallKind
from extproc.adapters.book import Book
from extproc.adapters.judging import NUM_SPARES
from extproc.adapters.podhistory import PodHistory
from extproc.adapters.versions import Kept
from extproc.adapters.wanted import can_take

STAY_S = 5.0
"""Time for which an adapter is not unloaded for another: the requests that waited for it are on
their way."""
CROWDED_RATIO = 2
"""Adapters that a pod may list, over the places in its memory, before requests wait for one to go.
An engine lists every adapter that it was asked to load, and reads those again that its memory
lacks.
"""
UNKNOWN_S = 5.0
"""An adapter that was deleted and stays for so much longer is not known to the router that leads:
that router has started since then.
"""
SLOW_S = 2.0
"""A load that takes longer is not waited for: another pod gets what requests wait for."""


class _Load(Struct, frozen=True):
    """A load that could start now, or the unload that makes room for it."""

    action: Action
    is_urgent: bool
    num_pending: int


def calls(book: Book, *, now: float, is_leading: bool = True, is_led: bool = False) -> list[Action]:
    """Return the calls that start now.

    A router that does not lead makes only calls that no other router may know of. They are unloads
    of adapters that were deleted and stay for long. If it does not hear the leader, they are also
    loads that its own requests wait for.
    """
    free = {a: pod for a, pod in book.fleet.pods.items() if _is_free(book, pod)}
    unloads = list(_unloads(book, free, is_leading=is_leading, now=now))
    for check in _checks(book, unloads, now=now):
        free.pop(check.address, None)
        unloads.append(check)
    num_loads = book.settings.max_loads - book.fleet.num_loading
    if num_loads <= 0 or not book.open or is_led:
        return unloads
    free = {a: pod for a, pod in free.items() if _may_load_s(book, pod, now=now) <= now}
    found = [load for load in _loads(book, free, now=now) if is_leading or load.is_urgent]
    found.sort(key=lambda load: (not load.is_urgent, load.num_pending))
    for load in found:
        is_load = load.action.kind is CallKind.LOAD
        if num_loads > 0 or not is_load:
            unloads.append(load.action)
            num_loads -= is_load
    return unloads


def next_s(book: Book, *, now: float) -> float:
    """Return when more may be due than changes tell; inf for never."""
    settings = book.settings
    times = [book.fleet.due_s(), *[deleted.until_s for deleted in book.deleted.values()]]
    if book.later or not book.wanted.is_settled:
        return now
    waits = settings.grace_s, settings.drain_s
    times += [since_s + wait_s for since_s in book.old.values() for wait_s in waits]
    if book.unproven:
        most = settings.max_loads_per_minute
        times += [pod.checks.free_s(most, now=now) for pod in book.fleet.pods.values()]
    if book.open:
        times += [_may_load_s(book, pod, now=now) for pod in book.fleet.pods.values()]
    return min([each for each in times if each > now], default=inf)


def _is_free(book: Book, pod: PodHistory) -> bool:
    return pod.is_usable and pod.refusal is None and book.fleet.call_at(pod.state.address) is None


def _may_load_s(book: Book, pod: PodHistory, *, now: float) -> float:
    """Return when a load may start on a pod; inf for never."""
    state, settings = pod.state, book.settings
    if not can_take(pod) or state.is_resolver or state.why_no_load:
        return inf
    slot_s = -inf if pod.full_since_s == inf else pod.full_since_s + settings.patience_s
    if not state.num_pending:
        return slot_s
    return max(slot_s, pod.starts.free_s(settings.max_loads_per_minute, now=now))


# --- unloading ----------------------------------------------------------------------------------


def _unloads(
    book: Book, free: dict[str, PodHistory], *, is_leading: bool, now: float
) -> Iterator[Action]:
    """Yield the unloads of old versions; one on a pod, which is then not free any more."""
    wait_s = book.settings.grace_s if is_leading else book.settings.grace_s + UNKNOWN_S
    for served, since_s in book.old.items():
        if now < since_s + wait_s or not (is_leading or book.owner(served) is None):
            continue
        is_over = now >= since_s + book.settings.drain_s
        for address in book.fleet.pods_of.get(served, ()):
            pod = free.get(address)
            if pod is None or not book.is_ours(address, served):
                continue
            if (is_over or served not in pod.state.pending_by_adapter) and _may_unload(
                book, address, served, now=now
            ):
                del free[address]
                yield _unload(book, address, served)
    if is_leading:
        yield from _without_effect(book, free, now=now)
        yield from _surplus(book, free, now=now)


def _without_effect(book: Book, free: dict[str, PodHistory], *, now: float) -> Iterator[Action]:
    """Yield the unloads of adapters that have shown to have no effect, where one is needed."""
    for name in sorted(book.refused):
        kept = book.kept[name]
        served = kept.served
        for address in sorted(kept.unproven & free.keys()):
            pod = free[address]
            is_refused = pod.effect(served) is False and not pod.state.is_resolver
            is_idle = served not in pod.state.pending_by_adapter
            if is_refused and is_idle and _may_unload(book, address, served, now=now):
                del free[address]
                yield _unload(book, address, served)


def _surplus(book: Book, free: dict[str, PodHistory], *, now: float) -> Iterator[Action]:
    """Yield the unloads of adapters that other pods have than may, or more."""
    for name in book.surplus:
        kept = book.kept[name]
        pods = [book.fleet.pods[address] for address in sorted(kept.holders | kept.strays)]
        pods.sort(
            key=lambda pod: (pod.state.address in kept.holders, pod.state.address in kept.targets)
        )
        num = len(kept.strays) + kept.num_surplus - sum(pod.leaving == kept.served for pod in pods)
        pods = [pod for pod in pods if pod.state.address in free]
        idle = [pod for pod in pods if _is_idle(book, pod, kept.served, now=now)]
        for pod in idle[: max(0, num)]:
            del free[pod.state.address]
            yield _unload(book, pod.state.address, kept.served)


def _may_unload(book: Book, address: str, served: str, *, now: float) -> bool:
    return book.fleet.attempts.next_s(address, served, CallKind.UNLOAD) <= now


def _unload(book: Book, address: str, served: str) -> Action:
    return Action(CallKind.UNLOAD, address, served, timeout_s=book.settings.unload_s)


def _is_idle(book: Book, pod: PodHistory, served: str, *, now: float) -> bool:
    """Return whether a pod can do without an adapter for now."""
    is_old = now - pod.since.get(served, now) >= STAY_S
    is_used = served in pod.state.pending_by_adapter
    return is_old and not is_used and _may_unload(book, pod.state.address, served, now=now)


# --- checking -----------------------------------------------------------------------------------


def _checks(book: Book, begun: Iterable[Action], *, now: float) -> Iterator[Action]:
    """Yield the checks that start now, beside the calls that have begun: one on a pod."""
    busy = {action.address for action in begun}
    pods, most = book.fleet.pods, book.settings.max_loads_per_minute
    waiting = [name for name in book.held if name in book.unproven]
    others = sorted(book.unproven.difference(waiting))
    others.sort(key=lambda name: -book.rates.get(name, 0.0))
    for name in (*waiting, *others):
        kept = book.kept[name]
        num_urgent = kept.num_desired + NUM_SPARES if name in book.held else 0
        for number, address in enumerate(kept.to_check):
            pod = pods[address]
            if address in busy or not pod.is_usable or book.fleet.call_at(address) is not None:
                continue
            is_calm = not pod.state.num_pending or pod.checks.free_s(most, now=now) <= now
            if is_calm or number < num_urgent:
                busy.add(address)
                yield Action(CallKind.CHECK, address, kept.served, timeout_s=book.settings.check_s)


# --- loading ------------------------------------------------------------------------------------


def _loads(book: Book, free: dict[str, PodHistory], *, now: float) -> Iterator[_Load]:
    """Yield the loads that may start; one on a pod, which is then not free any more."""
    kept_of, rates = book.kept, book.rates
    waiting = [name for name in book.held if name in book.open and not kept_of[name].holders]
    others = sorted(book.open.difference(waiting))
    others.sort(key=lambda name: -rates.get(name, 0.0))
    for name in waiting:
        if not free:
            return
        kept = kept_of[name]
        load = _first(book, kept, free, now=now)
        if load is not None:
            yield load
    has_place = any(pod.has_place() for pod in free.values())
    for name in others:
        if not free:
            return
        kept = kept_of[name]
        if not has_place and not kept.is_eager and not kept.ready:
            continue
        for address in kept.missing:
            pod = free.get(address)
            if pod is None:
                continue
            action = _load(book, kept, pod, is_urgent=False, now=now)
            if action is not None:
                del free[address]
                yield _Load(action, False, pod.state.num_pending)


def _first(book: Book, kept: Kept, free: dict[str, PodHistory], *, now: float) -> _Load | None:
    """Return the load of an adapter that requests wait for: where it should be, if that is soon."""
    spares = [address for address in kept.spares if address not in kept.unproven]
    for address in (*kept.missing, *spares):
        pod = free.get(address)
        if pod is None:
            if book.fleet.is_called(address, since_s=now - SLOW_S):
                return None
            continue
        action = _load(book, kept, pod, is_urgent=True, now=now)
        if action is not None:
            del free[address]
            return _Load(action, True, pod.state.num_pending)
    return None


def _load(book: Book, kept: Kept, pod: PodHistory, *, is_urgent: bool, now: float) -> Action | None:
    """Return the call that brings an adapter to a pod, or makes room there; None for not now."""
    address = pod.state.address
    is_next_version = any(name in pod.listed for name in kept.ready if name != kept.served)
    if pod.has_place() or is_next_version:
        return Action(CallKind.LOAD, address, kept.served, kept.path, book.settings.load_s)
    if not is_urgent and not kept.is_eager:
        return None
    victim = _victim(book, pod, is_urgent=is_urgent, now=now)
    if victim is not None:
        return _unload(book, address, victim)
    if is_urgent and pod.has_place(CROWDED_RATIO) and not _goes_soon(book, pod, now=now):
        return Action(CallKind.LOAD, address, kept.served, kept.path, book.settings.load_s)
    return None


def _goes_soon(book: Book, pod: PodHistory, *, now: float) -> bool:
    """Return whether an adapter on a pod may go as soon as it has been there for long enough."""
    return any(
        now - pod.since[served] < STAY_S
        for served in pod.listed
        if served in book.by_served and served not in pod.state.pending_by_adapter
    )


def _victim(book: Book, pod: PodHistory, *, is_urgent: bool, now: float) -> str | None:
    """Return the adapter that is wanted least on a pod, of those that may go."""
    least = None
    names = book.by_served
    # Most of what a hostile pod lists is nobody's.
    for served in [served for served in pod.listed if served in names]:
        name = names[served]
        if name in book.held or not _is_idle(book, pod, served, now=now):
            continue
        kept = book.kept[name]
        address = pod.state.address
        is_needed = kept.is_eager and address in kept.targets
        if address not in kept.holders or not kept.path or (is_needed and not is_urgent):
            continue
        found = is_needed, book.rates.get(name, 0.0), pod.since[served], served
        if least is None or found < least:
            least = found
    return None if least is None else least[-1]
