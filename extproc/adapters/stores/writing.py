"""The effect of a write on the present contents; and several writes in one, of which all are made
or none.

Each of several is looked at before the first one is written. A medium writes one content at a time:
if it fails midway, the written ones are taken back. Readers may see a part of it meanwhile, and
other writers have their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import MappingProxyType
from weakref import WeakValueDictionary

from msgspec import Struct

from extproc.adapters.declared import ITEMS_A_PLACE, Declaration, DeclarationError, Names
from extproc.adapters.stores.content import (
    MAX_DECLARATIONS,
    ConflictError,
    Medium,
    Put,
    Stored,
    StoreError,
    StoreFullError,
    decode,
    encode,
    tag_of,
)
from extproc.errors import ExtprocError
from extproc.phrases import listed

ANY_TAG = "*"
"""Stands for whatever is there, as in HTTP's If-Match."""
_MAX_NAMED = 5

LockFactory = Callable[[], AbstractAsyncContextManager[None]]


class WriterLock:
    """A lock that is given to writers of different names in turn: those of one name wait for each
    other first, so that one of them at most is before a writer of another name.
    """

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        """Have the lock for one read or write."""
        own = self._of.get(name)
        if own is None:
            self._of[name] = own = asyncio.Lock()
        async with own, self._all:
            yield


class StorePlaces:
    """The places of a store that are taken, by name: of what was read last and written since."""

    def __init__(self, taken: Mapping[str, int] = MappingProxyType({})) -> None:
        self._taken = dict(taken)
        self._num = sum(taken.values())

    def check(self, declaration: Declaration) -> None:
        """Raise StoreFullError if there is no room for a declaration instead of its name's."""
        new, old = declaration.num_places, self._taken.get(declaration.name, 0)
        if new > old and self._num + new - old > MAX_DECLARATIONS:
            raise StoreFullError(
                f"{self._num} of {MAX_DECLARATIONS} places are taken; {declaration.name} takes "
                f"{new}: one, and one for each {ITEMS_A_PLACE} tenants and targets"
            )

    def take(self, declaration: Declaration) -> None:
        """Count a declaration that was written."""
        new = declaration.num_places
        self._num += new - self._taken.get(declaration.name, 0)
        self._taken[declaration.name] = new


class BulkError(ExtprocError):
    """Some of several declarations cannot be made, so none was.

    Attributes:
        errors: By their place in the list, from 0: what `put` raises for one alone.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(f"{len(errors)} cannot be declared, so none was")
        self.errors = errors


class ChangedError(StoreError):
    """Somebody else wrote one of several just now."""


class _Swap(Struct, frozen=True):
    """A content that is to replace another one; None stands for no content.

    Attributes:
        is_new: Nothing is declared under that name.
    """

    declaration: Declaration
    old: bytes | None
    new: bytes
    is_new: bool


class Swaps:
    """Declarations that are to be written together."""

    def __init__(self) -> None:
        self._num = 0
        self._names: set[str] = set()
        self._errors: dict[int, Exception] = {}
        self._swaps: list[_Swap] = []
        self._puts: list[Put] = []

    def add(
        self, declaration: Declaration, content: bytes | None, *, replaces: bool, names: Names
    ) -> None:
        """Add one.

        Args:
            content: The present content of it.
            replaces: Whether it replaces what is declared otherwise.
            names: All that are declared; it is added to them.
        """
        name, number = declaration.name, self._num
        self._num += 1
        try:
            if name in self._names:
                raise DeclarationError(f"{name} is in the list twice")
            self._names.add(name)
            old = None if content is None else decoded(name, content)
            is_there = old is not None and not old.is_deleted
            if_match = ANY_TAG if replaces and is_there else None
            new = to_write(declaration, old, if_match, names)
        except (ConflictError, DeclarationError) as error:
            self._errors[number] = error.with_traceback(None)
            return
        names.add(name)
        self._puts.append(put_of(declaration, old))
        if new is not None:
            self._swaps.append(_Swap(declaration, content, new, not is_there))

    async def write(
        self,
        medium: Medium,
        lock: LockFactory,
        names: Callable[[], Names],
        places: Callable[[], StorePlaces],
    ) -> list[Put]:
        """Write all of them or none, and return what is there then, in their order.

        Args:
            lock: To be taken for each write.
            names: Returns all that are declared now; those that are written are added.
            places: Returns those that are taken now; those that are written are added.

        Raises:
            BulkError: Some cannot be declared.
            ChangedError: Somebody else wrote one of them just now, or a name that pods could
                mistake for one. Nothing is left of them.
            StoreError: The medium failed. The message names those that could not be taken back, if
                any.
        """
        if self._errors:
            raise BulkError(self._errors)
        done: list[_Swap] = []
        try:
            for swap in self._swaps:
                name = swap.declaration.name
                async with lock():
                    places().check(swap.declaration)
                    is_clear = not (swap.is_new and names().why_not(name))
                    if not (is_clear and await medium.swap(name, swap.old, swap.new)):
                        raise ChangedError(f"{name}: another writer has just changed it")
                    names().add(name)
                    places().take(swap.declaration)
                    done.append(swap)
        except StoreError as error:
            stays = await _taken_back(medium, done, lock)
            if not stays:
                raise
            names_left = listed(stays, _MAX_NAMED)
            raise StoreError(f"{error}; these could not be taken back: {names_left}") from error
        return self._puts


async def _taken_back(medium: Medium, done: Sequence[_Swap], lock: LockFactory) -> list[str]:
    """Put the old contents back, the last one first; return the names of those that stay."""
    stays = []
    for swap in reversed(done):
        name = swap.declaration.name
        try:
            async with lock():
                is_back = await medium.swap(name, swap.new, swap.old)
        except StoreError:
            is_back = False
        if not is_back:
            stays.append(name)
    return stays


def decoded(name: str, content: bytes) -> Stored:
    """Return what is there.

    Raises:
        ConflictError: It cannot be used, and nothing replaces it unseen.
    """
    try:
        return decode(content)
    except DeclarationError as error:
        raise ConflictError(
            f"the stored declaration of {name} cannot be used: {error}", ""
        ) from error


def to_write(
    declaration: Declaration, old: Stored | None, if_match: str | None, names: Names
) -> bytes | None:
    """Return the content that is to replace another one; None if it is the same.

    Raises:
        ConflictError: It may not.
        DeclarationError: It is too large.
    """
    name, new = declaration.name, encode(declaration)
    if old is not None and old.declaration.is_alias is not declaration.is_alias:
        if old.is_deleted:
            raise ConflictError(f"{name}: pods still have the adapter of that name", "")
        kind = "an alias" if old.declaration.is_alias else "an adapter"
        raise ConflictError(f"{name} is {kind}: delete it first", "")
    there = None if old is None or old.is_deleted else old
    is_same = there is not None and encode(there.declaration) == new
    if if_match is None:
        if there is not None and not is_same:
            raise ConflictError(f"{name} is already declared with other content", there.tag)
    else:
        check_match(name, there, if_match)
    if there is None and (why := names.why_not(name)):
        raise ConflictError(f"{name}: {why}", "")
    return None if is_same else new


def put_of(declaration: Declaration, old: Stored | None) -> Put:
    """Return what is there after a put, given what was there before."""
    new = encode(declaration)
    if old is None or old.is_deleted:
        return Put(tag_of(new), "created")
    if encode(old.declaration) == new:
        return Put(old.tag, "none")
    return Put(tag_of(new), "replaced")


def check_match(name: str, there: Stored | None, if_match: str) -> None:
    """Raise ConflictError if what is there is not what the writer expects."""
    if there is None:
        raise ConflictError(f"{name} is not declared", "")
    if if_match not in (ANY_TAG, there.tag):
        raise ConflictError(f"{name} has been changed since", there.tag)
