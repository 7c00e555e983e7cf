"""The store of declared adapters: followed, leased, and written to over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from extproc.adapters.changes import Changes, WhyNot
from extproc.adapters.declared import Declaration
from extproc.adapters.registration import Registration, Status, Wait
from extproc.adapters.scope import TokenFacts
from extproc.adapters.sources import SourceStatus
from extproc.adapters.stores.content import Medium, Stored
from extproc.adapters.stores.store import Store
from extproc.adapters.tokens import Tokens
from extproc.errors import ExtprocError

log = logging.getLogger(__name__)

RENEWALS = 3
"""Of a lease while it lasts: two may fail."""
OnStored = Callable[[Sequence[Declaration], Sequence[Declaration]], Iterable[None] | None]

MAX_PROBLEMS = 3
"""Contents of the store that cannot be used and are reported; the log has all."""


class RegistrationSettings(Struct, frozen=True):
    """The settings of registration over HTTP.

    Attributes:
        token_file: Has their tokens.
        max_per_s: Requests of each.
        ready_s: Longest wait for an adapter on vLLM's path.
    """

    token_file: Path
    max_per_s: float
    ready_s: float


class StoreRunner:
    """The store of declarations, if there is one, while `run` runs.

    Args:
        medium: Keeps them; None for no store.
        lease_s: How long the router that loads may do so without a word.
        registration: None where nobody may declare over HTTP.
        holder: Of the lease: this router.
        on_stored: Called with what is declared, and with what was deleted and may still be loaded.
            Others run between its passes, if it returns some.
        status: Returns how a declared adapter is, for those who ask over HTTP.
        wait_until_ready: Returns whether enough pods have an adapter within so many seconds.
        why_not: Returns why a name that is declared there would not count.
        known: Decides what holders of limited tokens may declare.
        clock: Monotonic seconds.

    Attributes:
        add_registration: Adds the paths by which adapters are declared; None where nobody may.
    """

    def __init__(
        self,
        medium: Medium | None,
        *,
        lease_s: float,
        registration: RegistrationSettings | None = None,
        holder: str,
        on_stored: OnStored,
        status: Status,
        wait_until_ready: Wait,
        why_not: WhyNot,
        known: TokenFacts,
        clock: Callable[[], float],
    ) -> None:
        self._holder, self._lease_s, self._on_stored = holder, lease_s, on_stored
        self._clock = clock
        self._read_at_s = clock()
        self._has_lease, self._until_s = False, 0.0
        self._store = self._changes = None
        self.add_registration: Callable[[web.Application], None] | None = None
        if medium is None:
            return
        self._store = Store(
            medium,
            on_entries=self._on_entries,
            on_failure=self._on_failure,
            on_recovery=lambda: log.info("adapters.store: works again"),
            on_read=self._on_read,
        )
        if registration is not None:
            tokens = Tokens(
                registration.token_file,
                max_per_s=registration.max_per_s,
                clock=clock,
                on_failure=lambda message: log.warning("adapters.registration: %s", message),
            )
            self._changes = Changes(
                self._store,
                tokens,
                why_not,
                known,
                on_change=lambda message: log.info("adapters.registration: %s", message),
            )
            self.add_registration = Registration(
                self._store,
                tokens,
                self._changes,
                status=status,
                wait_until_ready=wait_until_ready,
                ready_s=registration.ready_s,
            ).add_to

    def sources(self) -> list[SourceStatus]:
        """Return how the store is, if there is one."""
        store = self._store
        if store is None:
            return []
        age_s, problems = self._clock() - self._read_at_s, sorted(store.problems.values())
        problem = store.failure or "; ".join(problems[:MAX_PROBLEMS])
        name = "adapters.store"
        full = "" if self._changes is None else self._changes.full
        return [SourceStatus(name, True, store.is_known, store.is_complete, age_s, problem, full)]

    def leads(self) -> bool:
        """Return whether this router may load, as all do where there is no store.

        One that slept for longer than its lease may not: another may have taken it.
        """
        return self._store is None or (self._has_lease and self._clock() < self._until_s)

    async def run(self) -> None:
        """Follow the store until cancelled."""
        store = self._store
        if store is None:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(store.run())
                tasks.create_task(self._lead(store))
        finally:
            await self._leave(store)

    async def forget(self, names: Iterable[str]) -> None:
        """Forget adapters that were deleted, and that no pod has any more."""
        if self._store is None:
            return
        for name in names:
            try:
                await self._store.forget(name)
            except ExtprocError as error:  # it stays, and is reported again after the next start
                log.warning("adapters.store: %s could not be removed: %s", name, error)

    async def _lead(self, store: Store) -> None:
        """Take the lease and renew it; without it another router loads.

        While the store cannot say who has it, all routers that loaded go on, and one that starts
        begins. Two at once do no harm. Without any, pods that restart would lack their adapters.
        """
        is_known = False
        while True:
            asked_s = self._clock()
            try:
                has_it = await store.lease(self._holder, ttl_s=self._lease_s)
                is_known = True
            except ExtprocError as error:
                log.warning("adapters.store: no lease: %s", error)
                has_it, asked_s = self._has_lease or not is_known, self._clock()
            if has_it is not self._has_lease:
                log.info("adapters: %s", "this router loads" if has_it else "another router loads")
            self._has_lease, self._until_s = has_it, asked_s + self._lease_s
            await asyncio.sleep(self._lease_s / RENEWALS)

    async def _leave(self, store: Store) -> None:
        try:
            if self._has_lease:
                await store.release(self._holder)
        except ExtprocError as error:
            log.warning(
                "adapters.store: the lease could not be released and will expire: %s", error
            )
        finally:
            await store.aclose()

    def _on_read(self) -> None:
        self._read_at_s = self._clock()

    def _on_failure(self, message: str) -> None:
        store = self._store
        assert store is not None
        what = "the last contents stay in force" if store.is_known else "nothing has been read yet"
        log.warning("adapters.store: %s: %s", message, what)

    def _on_entries(self, entries: Mapping[str, Stored]) -> Iterable[None] | None:
        kept = [each.declaration for each in entries.values() if not each.is_deleted]
        deleted = [each.declaration for each in entries.values() if each.is_deleted]
        return self._on_stored(kept, deleted)
