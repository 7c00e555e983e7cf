"""Which declarations a token may change, and the log line of each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from aiohttp import web

from extproc.adapters.declared import ITEMS_A_PLACE, Declaration
from extproc.adapters.registrationhttp import RefusedError, tag_in
from extproc.adapters.scope import Excess, TokenFacts, TokenScope
from extproc.adapters.stores.content import ConflictError, Put, Stored, StoreFullError, encode
from extproc.adapters.stores.store import Store
from extproc.adapters.stores.writing import BulkError
from extproc.adapters.tokens import Token, Tokens
from extproc.phrases import listed, shortened

MAX_LOGGED_CHARS = 1000
"""Of what is declared, and of an address that somebody wrote, in the line about it."""

WhyNot = Callable[[Declaration], str]


class Changes:
    """Changes of what is declared, by requests of holders of tokens.

    Args:
        declarations: Where adapters are declared.
        tokens: The tokens.
        why_not: Returns why a declaration would not count, for people; "" if it would. Raises
            DeclarationError for one that nobody may declare here.
        known: Decides what limited tokens may declare.
        on_change: Called with a line about each change, and each that a token does not permit.
    """

    def __init__(
        self,
        declarations: Store,
        tokens: Tokens,
        why_not: WhyNot,
        known: TokenFacts,
        on_change: Callable[[str], None],
    ) -> None:
        self._declarations = declarations
        self._tokens = tokens
        self._why_not = why_not
        self._known = known
        self._on_change = on_change
        self._full, self._full_at = "", declarations.entries
        self._counted: Mapping[str, Stored] = {}
        self._nums_there: dict[tuple[str, ...], int] = {}
        # Those that are being written, by the names of a scope.
        self._coming: dict[tuple[str, ...], dict[object, Sequence[Declaration]]] = {}

    @property
    def full(self) -> str:
        """Why the last declaration had no room; "" where it had, or something has changed since."""
        return self._full if self._full_at is self._declarations.entries else ""

    def permit(self, request: web.Request, token: Token, name: str) -> None:
        """Raise RefusedError if a token may not see and change an adapter."""
        if not token.scope.may(name):
            self._refuse(request, token, name, Excess("name_not_allowed", f"use the name {name}"))

    def _refuse(self, request: web.Request, token: Token, name: str, excess: Excess) -> None:
        self._tell(request, token, f"refused {request.method} of {name}")
        raise RefusedError(403, excess.code, f"The token {token.name} may not {excess.why}.")

    def check(self, request: web.Request, token: Token, declaration: Declaration) -> None:
        """Raise an error if a token may not declare this, or if it would not count."""
        if (excess := token.scope.excess(declaration, self._known)) is not None:
            self._refuse(request, token, declaration.name, excess)
        if why := self._why_not(declaration):
            raise ConflictError(f"{declaration.name}: {why}", "")

    async def put(self, request: web.Request, token: Token, declaration: Declaration) -> Put:
        """Declare an adapter, as `check` permits and the request's tag."""
        self.check(request, token, declaration)
        with (
            self._reporting_no_room(request, token, [declaration.name]),
            self._room(token, [declaration]),
        ):
            put = await self._declarations.put(declaration, if_match=tag_in(request), by=token.name)
        self._tell_put(request, token, declaration, put)
        return put

    async def put_all(
        self, request: web.Request, token: Token, declared: Sequence[Declaration], *, replaces: bool
    ) -> list[Put]:
        """Declare all of these, which `check` permits, or none."""
        names = [each.name for each in declared]
        with self._reporting_no_room(request, token, names), self._room(token, declared):
            puts = await self._declarations.put_all(declared, replaces=replaces, by=token.name)
        for declaration, put in zip(declared, puts, strict=True):
            self._tell_put(request, token, declaration, put)
        return puts

    async def remove(self, request: web.Request, token: Token, name: str) -> bool:
        """Delete an adapter; return whether it was declared."""
        self.permit(request, token, name)
        with self._reporting_no_room(request, token, [name]):
            was_there = await self._declarations.delete(
                name, if_match=tag_in(request), by=token.name
            )
        if was_there:
            self._tell(request, token, f"deleted {name}")
        return was_there

    @contextmanager
    def _reporting_no_room(
        self, request: web.Request, token: Token, names: Sequence[str]
    ) -> Iterator[None]:
        """Tell where something has no room, and remember that."""
        try:
            yield
        except (StoreFullError, RefusedError, BulkError) as error:
            if (why := _no_room(error)) is not None:
                self._full, self._full_at = str(why), self._declarations.entries
                self._tell(request, token, f"no room for {listed(names)}: {why}")
            raise
        self._full = ""

    @contextmanager
    def _room(self, token: Token, declared: Sequence[Declaration]) -> Iterator[None]:
        """Keep room for what a token declares while it is written.

        Raises:
            RefusedError: Its part of the store is full.
        """
        most, scope = self._tokens.max_declarations(token), token.scope
        writes = self._coming.setdefault(scope.names, {})
        if most is not None and any(map(self._growth, declared)):
            growth = dict[str, int]()
            for each in chain(declared, *writes.values()):
                growth[each.name] = max(growth.get(each.name, 0), self._growth(each))
            num_there = self._num_there(scope)
            if num_there + sum(growth.values()) > most:
                message = (
                    f"The names of the token {token.name} may take at most {most} places, one for "
                    f"each declaration and each {ITEMS_A_PLACE} of its tenants and targets, "
                    "deleted ones included until pods have let go of them."
                )
                raise RefusedError(507, "store_full", message)
        writes[key := object()] = declared
        try:
            yield
        finally:
            del writes[key]
            if not writes:
                self._coming.pop(scope.names, None)

    def _num_there(self, scope: TokenScope) -> int:
        """Return how many places the names of a scope have; counted once for each change."""
        entries = self._declarations.entries
        if self._counted is not entries:
            self._counted, self._nums_there = entries, {}
        num = self._nums_there.get(scope.names)
        if num is None:
            there = (each.declaration for name, each in entries.items() if scope.may(name))
            num = self._nums_there[scope.names] = sum(each.num_places for each in there)
        return num

    def _growth(self, declaration: Declaration) -> int:
        """Return how many more places will be taken by a name."""
        there = self._declarations.entries.get(declaration.name)
        return max(0, declaration.num_places - (there.declaration.num_places if there else 0))

    def _tell_put(
        self, request: web.Request, token: Token, declaration: Declaration, put: Put
    ) -> None:
        if put.change != "none":
            content = shortened(encode(declaration).decode(), MAX_LOGGED_CHARS)
            self._tell(request, token, f"{put.change} {declaration.name}: {content}")

    def _tell(self, request: web.Request, token: Token, what: str) -> None:
        address = request.remote or "an unknown address"
        if forwarded := request.headers.get("X-Forwarded-For"):
            address += f", which says it is for {shortened(forwarded, MAX_LOGGED_CHARS)!r}"
        self._on_change(f"{token.name} at {address}: {what}")


def _no_room(error: Exception) -> Exception | None:
    """Return why there was no room; None where another thing was wrong."""
    found = error.errors.values() if isinstance(error, BulkError) else (error,)
    kinds = StoreFullError, RefusedError  # of these, only that of a full part comes here
    return next((each for each in found if isinstance(each, kinds)), None)
