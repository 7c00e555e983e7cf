"""How adapters are, said for others."""

from __future__ import annotations

from collections.abc import Container, Iterator

from extproc.adapters.book import Book
from extproc.adapters.states import AdapterStatus, Failure, State, VersionState, VersionStatus
from extproc.adapters.versions import Kept


def state_of(book: Book, kept: Kept, coming: Container[str], *, now: float) -> State:
    """Return how an adapter is, if these served names are being loaded."""
    name = kept.declaration.name
    if kept.is_ready:
        return State.READY
    if kept.retry_s > now:
        return State.FAILED
    if kept.is_eager or name in book.held or kept.served in coming:
        return State.LOADING
    return State.COLD


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
    return [each for each in kept.holders if each in pods and kept.served in pods[each].ineffective]


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
