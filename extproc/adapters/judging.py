"""How one adapter is: which version serves, where it should be, and where it is to be loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from itertools import islice
from math import inf

from extproc.adapters.adapterstates import PASSING, AdapterState, CallKind, Failure
from extproc.adapters.book import Book
from extproc.adapters.declared import LoadMode
from extproc.adapters.podhistory import PodHistory
from extproc.adapters.versions import NOBODY, Kept
from extproc.adapters.wanted import is_of

NUM_SPARES = 3
"""Pods beside those that should have an adapter that it is tried on where it fails. More would
only show the same of most adapters that fail."""
_OF_CHECKS = (Failure.NO_EFFECT, Failure.UNCHECKED)
MAX_JUDGED = 200
"""Adapters in one go that nobody waits for: some 5 ms."""
NUM_A_PASS = 40
"""Adapters that are judged in one pass: some 1 ms."""


def judge(book: Book, *, now: float) -> Iterator[None]:
    """Judge anew what has changed, in passes."""
    fleet = book.fleet
    changed = fleet.changed | fleet.attempts.due(now)
    fleet.changed = set()
    if changed or book.is_regrouped or fleet.is_reshaped:
        book.sort_listed()
        owners = [book.owner(served) for served in book.declared_of(changed)]
        book.dirty.update([name for name in owners if name is not None])
        yield
    yield from book.place(now=now)
    names = deque([*book.dirty, *islice(book.later, MAX_JUDGED)])
    coming = fleet.coming() if names else ()
    while names:
        for name in [names.popleft() for _ in range(min(NUM_A_PASS, len(names)))]:
            book.dirty.discard(name)
            book.later.pop(name, None)
            kept = book.kept.get(name)
            if kept is not None:
                _judge(book, name, kept, now=now)
                book.count(kept, state_of(book, kept, coming, now=now))
        yield
    book.retire(now=now)


def state_of(book: Book, kept: Kept, coming: Container[str], *, now: float) -> AdapterState:
    """Return how an adapter is, if these served names are being loaded."""
    name = kept.declaration.name
    if kept.is_ready:
        return AdapterState.READY
    if kept.retry_s > now:
        return AdapterState.FAILED
    if kept.is_eager or name in book.held or kept.served in coming:
        return AdapterState.LOADING
    return AdapterState.COLD


def _judge(book: Book, name: str, kept: Kept, *, now: float) -> None:
    """Find who has an adapter, which version serves, and where it is to be loaded."""
    for names in (book.open, book.unproven, book.refused, book.surplus):
        names.discard(name)
    _count(book, name, kept)
    num = _num_wanted(book, name, kept)
    num_able = _aim(book, name, kept, num or 1, now=now)
    kept.serve(min(kept.declaration.min_replicas, num_able or num))
    kept.num_desired = num
    kept.to_check = _to_check(book, kept, now=now) if num else ()
    kept.missing = _missing(book, kept, num)
    if kept.missing:
        book.open.add(name)
    if kept.to_check:
        book.unproven.add(name)
    if kept.path and _refused(book, kept):
        book.refused.add(name)
    if kept.num_surplus or kept.strays:
        book.surplus.add(name)
    for served in book.families.get(name, ()):
        if served in (kept.served, kept.serving):
            book.old.pop(served, None)
        else:
            book.old.setdefault(served, now)


def _count(book: Book, name: str, kept: Kept) -> None:
    """Count who has each version."""
    ready: dict[str, int] = {}
    holders: set[str] = set()
    earlier: set[str] = set()
    strays: set[str] = set()
    unproven: set[str] = set()
    for served in book.families.get(name, ()):
        pods = [book.fleet.pods[address] for address in book.fleet.pods_of.get(served, ())]
        usable = [pod for pod in pods if pod.is_usable]
        if served == kept.served:
            has = [pod for pod in usable if _has(kept, pod)]
            pools = kept.declaration.pools
            own = [pod for pod in has if is_of(pod, pools)]
            strays = {pod.state.address for pod in has if not is_of(pod, pools)}
            unproven = {pod.state.address for pod in own if _is_unproven(book, pod, served)}
            holders.update([pod.state.address for pod in own])
            usable = own + [pod for pod in usable if kept.had(pod.listed[served])]
            earlier = {pod.state.address for pod in usable[len(own) :]}
        if book.settings.needs_effect:
            usable = [pod for pod in usable if pod.effect(served)]
            holders -= unproven
        if usable:
            ready[served] = len(usable)
    for address in holders:
        _arrived(book, address, kept.served)
    kept.ready = ready
    kept.holders, kept.earlier_holders = _frozen(holders), _frozen(earlier)
    kept.strays, kept.unproven = _frozen(strays), _frozen(unproven)


def _frozen(addresses: set[str]) -> frozenset[str]:
    return frozenset(addresses) if addresses else NOBODY


def _arrived(book: Book, address: str, served: str) -> None:
    """Forget what failed: a pod has it all the same."""
    attempt = book.fleet.attempts.of(address, served)
    if attempt is not None and attempt.kind is CallKind.LOAD:
        book.fleet.attempts.succeed(address, served)


def _num_wanted(book: Book, name: str, kept: Kept) -> int:
    """Return how many pods should have an adapter now; 0 for none before a request asks."""
    declared = kept.declaration
    kept.is_eager = declared.load is LoadMode.EAGER or (
        declared.load is LoadMode.AUTO and declared.min_replicas > 0 and book.wanted.fits(name)
    )
    num = declared.min_replicas
    if kept.is_eager or name in book.rates:
        num = max(num, book.wanted.num_homes(name), 1)
    elif name in book.held or kept.ready.keys() - {kept.served}:
        num = max(num, 1)
    else:
        return 0
    return num if declared.max_replicas is None else min(num, declared.max_replicas)


def _aim(book: Book, name: str, kept: Kept, num: int, *, now: float) -> int:
    """Find the pods that should have an adapter; return how many can, up to `num` and spares."""
    good: list[str] = []
    failed_s: list[float] = []
    num_bad = num_untried = 0
    kept.trouble, kept.spares = None, ()
    is_urgent = name in book.held and not kept.holders
    limit = num + NUM_SPARES if is_urgent else num
    for address in book.wanted.walk(name):
        pod = book.fleet.pods[address]
        if not _fits(kept, pod):
            continue
        problem = _problem(book, kept, pod, now=now)
        num_untried += problem is None
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
    resolvers = {each for each in kept.targets if book.fleet.pods[each].state.is_resolver}
    unproven = {a for a in resolvers if _is_unproven(book, book.fleet.pods[a], kept.served)}
    kept.unproven = _frozen(unproven.union(kept.unproven))
    if book.settings.needs_effect:
        resolvers -= unproven
    if resolvers - kept.holders:
        kept.holders |= resolvers
        kept.ready[kept.served] = len(kept.holders)
    if kept.earlier_holders:
        message = f"a new source needs a new version: pods have {kept.served} from another source"
        kept.trouble = Failure.CONFLICT, min(kept.earlier_holders), message
    num_able = len(good) + len(failed_s)
    if num_able < num and kept.trouble is None:
        message = (
            f"replicas.min is {kept.declaration.min_replicas}, but the number of pods that "
            f"can have it is {num_able}"
        )
        kept.trouble = Failure.TOO_FEW, "", message
    if num_untried:
        kept.retry_s = -inf
    elif good or failed_s:
        # A request makes no difference to what is loaded anyway.
        kept.retry_s = inf if kept.is_eager else -inf if good else min(failed_s)
        if kept.retry_s > now and _is_listed_by_one_down(book, kept):
            kept.retry_s = -inf
    else:
        may_fit = _may_fit_one_down(book, kept)
        kept.trouble = _refusal(book) or (None if may_fit else (Failure.UNFIT, "", _misfit(kept)))
        kept.retry_s = -inf if may_fit else inf
    return num_able


def _problem(
    book: Book, kept: Kept, pod: PodHistory, *, now: float
) -> tuple[Failure, str, float] | None:
    """Return why an adapter is not on a pod, and when that may be otherwise; None for no reason."""
    if not pod.bases.isdisjoint((kept.declaration.name, kept.served)):
        return Failure.CONFLICT, "it is the name of the pod's base model", inf
    if pod.state.is_resolver:
        return None
    address, root = pod.state.address, pod.listed.get(kept.served)
    if root is not None and not kept.has(root):
        return Failure.CONFLICT, f"the pod has {root} under that name", inf
    attempt = book.fleet.attempts.of(address, kept.served)
    if attempt is not None and attempt.kind is CallKind.LOAD:
        return attempt.failure, attempt.message, attempt.next_s
    if book.settings.needs_effect and now < pod.mute_until_s and not pod.effect(kept.served):
        return Failure.UNCHECKED, "it gives no answers to compare", pod.mute_until_s
    return None


def _refusal(book: Book) -> tuple[Failure, str, str] | None:
    """Return which pod that is up loads nothing, and why; None for none."""
    for pod in book.fleet.pods.values():
        if pod.is_usable and pod.refusal is not None:
            failure, message, _ = pod.refusal
            return failure, pod.state.address, message
    return None


def _is_listed_by_one_down(book: Book, kept: Kept) -> bool:
    """Return whether a pod that is not up had an adapter when it was: what fails elsewhere says
    nothing of it."""
    pods = book.fleet.pods
    had = [pods[address] for address in book.fleet.pods_of.get(kept.served, ())]
    return any(not pod.is_usable and _has(kept, pod) for pod in had)


def _may_fit_one_down(book: Book, kept: Kept) -> bool:
    """Return whether a pod that is not up may take an adapter, or none is up."""
    down = [pod for pod in book.fleet.pods.values() if not pod.is_usable]
    return len(down) == len(book.fleet.pods) or any(_may_fit(kept, pod) for pod in down)


def _may_fit(kept: Kept, pod: PodHistory) -> bool:
    """Return whether a pod may take an adapter once it is up, as far as it is known."""
    declared = kept.declaration
    if pod.state.max_loras == 0 or not is_of(pod, declared.pools):
        return False
    is_of_base = not declared.base or declared.base in pod.bases
    return not pod.is_known or (is_of_base and _fits(kept, pod))


def _missing(book: Book, kept: Kept, num: int) -> tuple[str, ...]:
    """Return the pods on which an adapter is to be loaded, those that should have it first."""
    has = kept.holders | kept.unproven
    lacking = [address for address in kept.targets if address not in has]
    if not num or not lacking or kept.earlier_holders:
        return ()
    coming = book.fleet.coming_to(kept.served)
    num_coming = len(coming | kept.holders | set(kept.to_check))
    if not kept.is_eager and num_coming >= num:
        return ()
    lacking = [address for address in lacking if address not in coming]
    most = kept.declaration.max_replicas
    return tuple(lacking if most is None else lacking[: max(0, most - num_coming)])


def _is_unproven(book: Book, pod: PodHistory, served: str) -> bool:
    """Return whether it is unknown that an adapter has an effect on a pod, and to be known."""
    settings = book.settings
    if settings.needs_effect:
        return not pod.effect(served)
    return settings.checks_effect and pod.effect(served) is None


def _to_check(book: Book, kept: Kept, *, now: float) -> tuple[str, ...]:
    """Return the pods that are to show now whether an adapter has an effect there."""
    found = []
    for address in sorted(kept.unproven):
        attempt = book.fleet.attempts.of(address, kept.served)
        if attempt is None or attempt.failure not in _OF_CHECKS or attempt.next_s <= now:
            found.append(address)
    return tuple(found)


def _refused(book: Book, kept: Kept) -> bool:
    pods = book.fleet.pods
    return any(pods[address].effect(kept.served) is False for address in kept.unproven)


def _has(kept: Kept, pod: PodHistory) -> bool:
    """Return whether what a pod lists is what is declared; a resolver looks by the name."""
    return pod.state.is_resolver or kept.has(pod.listed[kept.served])


def _fits(kept: Kept, pod: PodHistory) -> bool:
    rank, most = kept.declaration.rank, pod.state.max_rank
    if rank is not None and most is not None and rank > most:
        return False
    return bool(kept.path) or pod.state.is_resolver or kept.served in pod.listed


def _misfit(kept: Kept) -> str:
    declared = kept.declaration
    if not kept.path:
        return "no pod has it, and it has no source to load it from"
    rank = "" if declared.rank is None else f" and loads adapters of rank {declared.rank}"
    of = f" of {' or '.join(sorted(declared.pools))}" if declared.pools else ""
    return f"no pod{of} has the base model {declared.base or '(any)'}{rank}"
