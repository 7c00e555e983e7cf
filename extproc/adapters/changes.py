"""Which declarations a token may change, and the log line of each change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web

from extproc.adapters.declared import Declaration
from extproc.adapters.registrationhttp import RefusedError, tag_in
from extproc.adapters.stores.content import ConflictError, Put, encode
from extproc.adapters.stores.store import Store
from extproc.adapters.tokens import Token
from extproc.phrases import shortened

MAX_TOLD_CHARS = 1000
"""Of what is declared, and of an address that somebody wrote, in the line about it."""

WhyNot = Callable[[Declaration], str]


class Changes:
    """Changes of what is declared, by requests of holders of tokens.

    Args:
        declarations: Where adapters are declared.
        why_not: As for `Registration`.
        on_change: Likewise.
    """

    def __init__(
        self, declarations: Store, why_not: WhyNot, on_change: Callable[[str], None]
    ) -> None:
        self._declarations = declarations
        self._why_not = why_not
        self._on_change = on_change

    def permit(self, request: web.Request, token: Token, name: str) -> None:
        """Raise RefusedError if a token may not see and change an adapter."""
        if not token.may(name):
            self._tell(request, token, f"refused {request.method} of {name}")
            message = f"The token {token.name} may not use the name {name}."
            raise RefusedError(403, "name_not_allowed", message)

    def check(self, request: web.Request, token: Token, declaration: Declaration) -> None:
        """Raise an error if a token may not declare this, or if it would not count."""
        self.permit(request, token, declaration.name)
        if why := self._why_not(declaration):
            raise ConflictError(f"{declaration.name}: {why}", "")

    async def put(self, request: web.Request, token: Token, declaration: Declaration) -> Put:
        """Declare an adapter, as `check` permits and the request's tag."""
        self.check(request, token, declaration)
        put = await self._declarations.put(declaration, if_match=tag_in(request))
        self._tell_put(request, token, declaration, put)
        return put

    async def put_all(
        self, request: web.Request, token: Token, declared: Sequence[Declaration], *, replaces: bool
    ) -> list[Put]:
        """Declare all of these, which `check` permits, or none."""
        puts = await self._declarations.put_all(declared, replaces=replaces)
        for declaration, put in zip(declared, puts, strict=True):
            self._tell_put(request, token, declaration, put)
        return puts

    async def remove(self, request: web.Request, token: Token, name: str) -> bool:
        """Delete an adapter; return whether it was declared."""
        self.permit(request, token, name)
        was_there = await self._declarations.delete(name, if_match=tag_in(request))
        if was_there:
            self._tell(request, token, f"deleted {name}")
        return was_there

    def _tell_put(
        self, request: web.Request, token: Token, declaration: Declaration, put: Put
    ) -> None:
        if put.change.value != "none":
            content = shortened(encode(declaration).decode(), MAX_TOLD_CHARS)
            self._tell(request, token, f"{put.change.value} {declaration.name}: {content}")

    def _tell(self, request: web.Request, token: Token, what: str) -> None:
        address = request.remote or "an unknown address"
        if forwarded := request.headers.get("X-Forwarded-For"):
            address += f", which says it is for {shortened(forwarded, MAX_TOLD_CHARS)!r}"
        self._on_change(f"{token.name} at {address}: {what}")
