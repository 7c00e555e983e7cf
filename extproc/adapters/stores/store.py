"""A store of declarations, whatever keeps them.

Every write replaces a content that its writer has read, so nothing is overwritten unseen, except in
a directory, where the last writer wins. A content that cannot be used does not replace the one
before: the last good one counts until it is repaired.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import process_time
from types import MappingProxyType

from msgspec import Struct

from extproc.adapters.declared import Declaration, DeclarationError, Names
from extproc.adapters.stores.content import (
    MAX_DECLARATIONS,
    Medium,
    Put,
    Stored,
    StoreError,
    decode,
    encode,
)
from extproc.adapters.stores.writing import (
    ChangedError,
    StorePlaces,
    Swaps,
    WriterLock,
    check_match,
    decoded,
    put_of,
    to_write,
)
from extproc.wire.yielding import yield_to_requests

MAX_ATTEMPTS = 20
"""To write one content: somebody else wrote the same one each time before."""
SETTLED_AFTER = 3
"""Looks at the same unusable content before it counts as bad: whoever writes a file in place has
it half written in between."""
REST_RATIO = 9
"""The rest after a look, over what it took, before another one for those who have written."""
MAX_REST_S = 0.5
_DECODED_A_PASS = 128
"""Contents: some 1 ms."""

OnEntries = Callable[[Mapping[str, Stored]], Iterable[None] | None]


class _Kept(Struct):
    """The knowledge of one key: the content last seen, and the last good declaration."""

    content: bytes | StoreError
    good: Stored | None = None
    problem: str = ""
    num_reads: int = 0
    name: str = ""
    num_places: int = 0

    def __post_init__(self) -> None:
        if self.good is not None:
            declaration = self.good.declaration
            self.name, self.num_places = declaration.name, declaration.num_places

    @property
    def is_bad(self) -> bool:
        """Whether it cannot be used and nobody is writing it."""
        return bool(self.problem) and self.num_reads >= SETTLED_AFTER


class Store:
    """Declarations by name, the deleted ones included until they are forgotten, if they are kept.

    Attributes:
        entries: The declarations last read; replaced at each change, never changed.
        problems: Why a content cannot be used, by its key, for people.
        failure: Why the medium could not be read at the last look; "" if it could.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        on_entries: OnEntries = lambda entries: None,
        on_failure: Callable[[str], None] = lambda message: None,
        on_recovery: Callable[[], None] = lambda: None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            medium: Keeps the contents.
            on_entries: Called with `entries` after the first read and after each change. Others run
                between its passes, if it returns some.
            on_failure: Called with a message, once per new failure.
            on_recovery: Called when the medium and every content can be used again.
            on_read: Called each time the medium could be read, before anything else is.
        """
        self.entries: Mapping[str, Stored] = MappingProxyType({})
        self.problems: Mapping[str, str] = MappingProxyType({})
        self._medium = medium
        self._on_entries = on_entries
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self._on_read = on_read
        self.failure = ""
        self._unread: set[str] | None = None
        self._kept: dict[str, _Kept] = {}
        self._read: Mapping[str, bytes | StoreError] | None = None
        self._was_handed_on = False
        self._failures: frozenset[str] = frozenset()
        self._names = Names()
        self._places, self._is_doubted = StorePlaces(), False
        self._num_written = self._num_seen = 0
        self._rest_until_s = 0.0
        self._lock = WriterLock()  # a read that began before a write must not hide it
        self._lists: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def is_known(self) -> bool:
        """Whether the medium has been read. Until then it may have entries that are not here."""
        return self._read is not None

    @property
    def is_complete(self) -> bool:
        """Whether besides all that was there at first has been usable since, or is gone.

        Until then somebody may have deleted an adapter, and it is not known which.
        """
        return self._unread is not None and not self._unread

    async def run(self) -> None:
        """Follow the medium until cancelled."""
        while True:
            await self.poll()
            await self._medium.changed()

    async def poll(self) -> None:
        """Read the medium once. If it cannot be read, the last entries stay."""
        async with self._lock.take(""):
            await self._read_medium()

    async def put(
        self, declaration: Declaration, *, if_match: str | None = None, by: str = ""
    ) -> Put:
        """Declare an adapter, and return what is there then.

        Args:
            declaration: It must stand (`Declaration.check`).
            if_match: The tag of what it replaces, or `ANY_TAG`; None if it replaces nothing, or the
                same. A deleted declaration counts as none.
            by: The name of the writer; writers have turns.

        Raises:
            ConflictError: Something else is there, or pods could mistake another one for it.
            DeclarationError: It is too large.
            StoreError: It cannot be written; nothing has changed.
        """

        def change(old: Stored | None) -> bytes | None:
            new = to_write(declaration, old, if_match, self._names)
            if new is not None:
                self._places.check(declaration)
            return new

        return put_of(declaration, await self._write(declaration.name, change, by, declaration))

    async def put_all(
        self, declarations: Sequence[Declaration], *, replaces: bool = False, by: str = ""
    ) -> list[Put]:
        """Declare all of them or none, and return what is there then, in their order.

        Args:
            declarations: Each must stand (`Declaration.check`).
            replaces: Whether they replace what is declared otherwise.
            by: The name of the writer. Each write is a turn; other writers have theirs in between.

        Raises:
            BulkError: Some cannot be declared.
            StoreError: They cannot be written; the message names what could not be taken back.
        """
        async with self._lists[by]:  # its lists may be about the same names
            for _ in range(MAX_ATTEMPTS - 1):
                with suppress(ChangedError):
                    return await self._put_all(declarations, replaces=replaces, by=by)
            return await self._put_all(declarations, replaces=replaces, by=by)

    async def _put_all(
        self, declarations: Sequence[Declaration], *, replaces: bool, by: str
    ) -> list[Put]:
        names, swaps = self._declared_names(), Swaps()
        for each in declarations:
            content = await self._medium.get(each.name)
            swaps.add(each, content, replaces=replaces, names=names)
        try:
            return await swaps.write(
                self._medium,
                partial(self._lock.take, by),
                lambda: self._names,
                lambda: self._places,
            )
        except StoreError:  # what was taken back does not count, once that has been seen
            self._is_doubted = True
            raise
        finally:
            self._num_written += 1
            await self._written()

    def _declared_names(self) -> Names:
        return Names(name for name, each in self.entries.items() if not each.is_deleted)

    async def delete(self, name: str, *, if_match: str | None = None, by: str = "") -> bool:
        """Declare that an adapter is gone; return whether it was declared.

        Raises:
            ConflictError: It is not what `if_match` says.
            StoreError: As for `put`.
        """

        def change(old: Stored | None) -> bytes | None:
            there = None if old is None or old.is_deleted else old
            if if_match is not None:
                check_match(name, there, if_match)
            if there is None:
                return None
            keeps_it = self._medium.keeps_deleted and not there.declaration.is_alias
            return encode(there.declaration, is_deleted=True) if keeps_it else b""

        old = await self._write(name, change, by)
        return old is not None and not old.is_deleted

    async def forget(self, name: str) -> None:
        """Remove what is kept of a deleted adapter; no effect if it is declared.

        Raises:
            StoreError: As for `put`.
        """

        def change(old: Stored | None) -> bytes | None:
            return b"" if old is not None and old.is_deleted else None

        await self._write(name, change)

    async def lease(self, holder: str, *, ttl_s: float = 15.0) -> bool:
        """Take or renew the lease; return whether `holder` has it for the next `ttl_s`.

        Two may have it for a while, after a clock has jumped or a holder has slept. Where people
        may put files, all have it. The guarded work must bear that.

        Raises:
            StoreError: The medium cannot be used.
        """
        return await self._medium.lease(holder, ttl_s=ttl_s)

    async def release(self, holder: str) -> None:
        """Give the lease up if `holder` has it.

        Raises:
            StoreError: The medium cannot be used; the lease expires.
        """
        await self._medium.release(holder)

    async def aclose(self) -> None:
        """Release the medium."""
        await self._medium.aclose()

    async def _write(
        self,
        name: str,
        change: Callable[[Stored | None], bytes | None],
        by: str = "",
        declaration: Declaration | None = None,
    ) -> Stored | None:
        """Write what `change` makes of the content, b"" for none, and return what was there.

        `change` returns None to leave it. Others may write meanwhile: then it is asked again.

        Args:
            declaration: To count from now on, if it is written.
        """
        async with self._lock.take(by):
            for _ in range(MAX_ATTEMPTS):
                content = await self._medium.get(name)
                old = None if content is None else decoded(name, content)
                new = change(old)
                if new is None:
                    return old
                if await self._medium.swap(name, content, new or None):
                    self._num_written += 1
                    if declaration is not None:
                        self._names.add(name)
                        self._places.take(declaration)
                    break
            else:
                raise StoreError(f"{name}: other writers keep changing it")
        await self._written()
        return old

    async def _written(self) -> None:
        """Wait until what has been written was read and handed on.

        All who have written since the last look share the next one. The rest in between bounds
        what many writers take of the event loop.
        """
        if not self.is_known:  # nobody follows, or does not know all yet
            return
        number = self._num_written
        await asyncio.sleep(self._rest_until_s - asyncio.get_running_loop().time())
        if self._num_seen >= number:
            return
        async with self._lock.take(""):
            if self._num_seen < number:
                began_s = process_time()
                await self._read_medium()
                rest_s = min(MAX_REST_S, REST_RATIO * (process_time() - began_s))
                self._rest_until_s = asyncio.get_running_loop().time() + rest_s

    async def _read_medium(self) -> None:
        num_written = self._num_written
        try:
            contents = await self._medium.read()
        except StoreError as error:
            self.failure = str(error)
            self._report({*self.problems.values(), self.failure})
        else:
            self.failure = ""
            self._on_read()
            await self._take(contents)
            self._report(set(self.problems.values()))
        self._num_seen = num_written  # not before: who asks need not wait for it

    async def _take(self, contents: Mapping[str, bytes | StoreError]) -> None:
        is_same = contents is self._read and not self._is_doubted and self._was_handed_on
        if is_same and not any(kept.problem for kept in self._kept.values()):
            return
        self._kept = await self._decode_all(contents)
        self._read, self._is_doubted = contents, False
        unread = {key for key, kept in self._kept.items() if kept.good is None}
        self._unread = unread if self._unread is None else self._unread & unread
        problems = {
            key: f"{key}: {kept.problem}"
            for key, kept in self._kept.items()
            if kept.problem and kept.is_bad
        }
        entries, places, num_places = dict[str, Stored](), dict[str, int](), 0
        for key, kept in self._kept.items():
            good, name = kept.good, kept.name
            if good is None:
                continue
            if name in entries:
                problems[key] = f"{key}: {name} is also declared elsewhere"
                continue
            num_places += kept.num_places
            if num_places > MAX_DECLARATIONS:
                problems[""] = f"only declarations that take {MAX_DECLARATIONS} places count"
                break
            entries[name], places[name] = good, kept.num_places
        self._places = StorePlaces(places)
        for name, why in self._take_names(entries).items():
            del entries[name]
            problems[name] = f"{name}: {why}"
        self.problems = MappingProxyType(problems)
        await self._hand_on(entries)

    def _take_names(self, entries: Mapping[str, Stored]) -> dict[str, str]:
        """Return which entries cannot stand beside the rest, and why.

        Two writers may have declared them at the same moment, or somebody wrote past us. The
        shorter name counts, so that it is the same one for all routers.
        """
        names, refused = [n for n, each in entries.items() if not each.is_deleted], dict[str, str]()
        self._names = Names(name for name in names if "@" not in name)
        for name in sorted(name for name in names if "@" in name):
            if why := self._names.why_not(name):
                refused[name] = why
            else:
                self._names.add(name)
        return refused

    async def _decode_all(self, contents: Mapping[str, bytes | StoreError]) -> dict[str, _Kept]:
        before, found, num_decoded = self._kept, dict[str, _Kept](), 0
        for key, content in contents.items():
            kept = before.get(key)
            if kept is None or kept.problem or kept.content != content:
                kept, num_decoded = self._decode(key, content), num_decoded + 1
                if num_decoded % _DECODED_A_PASS == 0:
                    await yield_to_requests()
            found[key] = kept
        return found

    def _decode(self, key: str, content: bytes | StoreError) -> _Kept:
        before = self._kept.get(key)
        if before is not None and before.content == content:
            before.num_reads += 1
            return before
        good = None if before is None else before.good
        if isinstance(content, StoreError):
            return _Kept(content, good, str(content), SETTLED_AFTER)
        try:
            return _Kept(content, decode(content))
        except DeclarationError as error:
            was_bad = before is not None and before.is_bad
            return _Kept(content, good, str(error), SETTLED_AFTER if was_bad else 1)

    async def _hand_on(self, entries: dict[str, Stored]) -> None:
        if self._was_handed_on and entries == self.entries:
            return
        self.entries, self._was_handed_on = MappingProxyType(entries), False
        for _ in self._on_entries(self.entries) or ():
            await yield_to_requests()
        self._was_handed_on = True  # as a whole: a task may end between two passes

    def _report(self, failures: set[str]) -> None:
        for message in sorted(failures - self._failures):
            self._on_failure(message)
        if self._failures and not failures:
            self._on_recovery()
        self._failures = frozenset(failures)
