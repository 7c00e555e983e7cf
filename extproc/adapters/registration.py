"""Registration of adapters over HTTP, on the admin port, for holders of a token.

| request | response |
|---|---|
| `POST /v1/adapters` | 201 declared, 200 replaced or the same as before; of a list, all or none |
| `GET /v1/adapters` | `{"object": "list", "data": [...]}`, by name, in pages if asked for |
| `GET /v1/adapters/{name}` | one of them, with its tag in `ETag` |
| `DELETE /v1/adapters/{name}` | 204 |
| `POST /v1/load_lora_adapter` | as vLLM answers, once enough pods list it |
| `POST /v1/unload_lora_adapter` | as vLLM answers, at once |

Errors have the shape of OpenAI's. The response is 503 if a store cannot take a declaration now, and
507 if it is full: waiting helps the one, only deleting helps the other. Each change is logged: by
whom, what, from which address.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from aiohttp import web
from msgspec import Struct

from extproc.adapters.changes import Changes
from extproc.adapters.declared import Declaration
from extproc.adapters.registrationhttp import (
    MAX_LIST,
    PATH,
    RefusedError,
    body_of,
    decode,
    error_answer,
    is_list,
    json_answer,
    limit_in,
    refusal,
    refused_list,
    replaces_in,
    tag_in,
    unknown,
    wait_in,
)
from extproc.adapters.stores.content import (
    ConflictError,
    Put,
    Stored,
    as_json,
    decode_all,
    decode_asked,
)
from extproc.adapters.stores.store import Store
from extproc.adapters.stores.writing import BulkError
from extproc.adapters.tokens import RequestPlaces, Token, Tokens
from extproc.wire.httpserver import Handler
from extproc.wire.yielding import yield_to_requests

MAX_WAITING = 32
"""Requests which wait until pods list an adapter: an equal part for each token; further ones get
429. The port has 128 places and Envoy's cluster 64. The rest are for other clients.
"""
MAX_AT_ONCE = 16
"""Other requests in progress, likewise."""
T = TypeVar("T")

NUM_AT_ONCE = 100
"""Entries of a list before other work has its turn: so many take a millisecond or two."""

_NOT_ALL_LOADED = "All are declared, but not all are loaded"

Status = Callable[[str], Mapping[str, Any]]
Wait = Callable[[str, float], Awaitable[bool]]
_Answer = Callable[[web.Request, Token], Awaitable[web.StreamResponse]]


class Registration:
    """The paths for holders of a token.

    Args:
        declarations: Where adapters are declared.
        tokens: The tokens that may do so.
        changes: Makes what they change.
        status: Returns what the pods have of an adapter by its name, as plain values.
        wait_until_ready: Returns whether enough pods list an adapter, within so many seconds.
        ready_s: How long vLLM's path waits for that.
    """

    def __init__(
        self,
        declarations: Store,
        tokens: Tokens,
        changes: Changes,
        *,
        status: Status,
        wait_until_ready: Wait,
        ready_s: float,
    ) -> None:
        self._declarations = declarations
        self._tokens = tokens
        self._changes = changes
        self._status = status
        self._wait_until_ready = wait_until_ready
        self._ready_s = ready_s

    def add_to(self, app: web.Application) -> None:
        """Add the paths to an application."""
        others = RequestPlaces(MAX_AT_ONCE, self._tokens)
        waiting = RequestPlaces(MAX_WAITING, self._tokens)
        for method, path, answer, places, places_to_wait in (
            ("POST", PATH, self._post, others, waiting),
            ("GET", PATH, self._list, others, others),
            ("GET", f"{PATH}/{{name:.+}}", self._get, others, others),
            ("DELETE", f"{PATH}/{{name:.+}}", self._delete, others, others),
            ("POST", "/v1/load_lora_adapter", self._load, waiting, waiting),
            ("POST", "/v1/unload_lora_adapter", self._unload, others, others),
        ):
            app.router.add_route(method, path, self._guarded(answer, places, places_to_wait))

    def _guarded(
        self, answer: _Answer, places: RequestPlaces, places_to_wait: RequestPlaces
    ) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                token = self._token_of(request)
                with (places_to_wait if "wait" in request.query else places).take(token):
                    return await answer(request, token)
            except Exception as error:
                found = refusal(error, tag_in(request))
                if found is None:
                    raise
                return error_answer(found)

        return guarded

    def _token_of(self, request: web.Request) -> Token:
        """Return whose request it is, and count it.

        Raises:
            RefusedError: Nobody's, or one too many.
        """
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        found = self._tokens.find(secret.strip().encode(errors="replace"))
        if scheme.lower() != "bearer" or found is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            raise RefusedError(401, "invalid_api_key", "A valid token is required.", challenge)
        wait_s = self._tokens.wait_s(found)
        if wait_s:
            # Whole seconds, so at least one.
            after = {"Retry-After": str(int(wait_s) + 1)}
            raise RefusedError(429, "rate_limit_exceeded", "Too many requests.", after)
        return found

    async def _post(self, request: web.Request, token: Token) -> web.StreamResponse:
        wait_s, body = wait_in(request), await body_of(request)
        if is_list(body):
            return await self._post_all(request, token, body, wait_s)
        declaration = decode_asked(body)
        put = await self._changes.put(request, token, declaration)
        if wait_s and (late := await self._why_late(declaration, wait_s)):
            return error_answer(late)
        status = 201 if put.change == "created" else 200
        body_out = self._answered(declaration, put, has_waited=bool(wait_s))
        return json_answer(body_out, status=status, headers={"ETag": f'"{put.tag}"'})

    def _refusal(
        self, request: web.Request, token: Token, declaration: Declaration
    ) -> Exception | None:
        """Return why one of a list cannot be declared."""
        try:
            self._changes.check(request, token, declaration)
        except (ConflictError, RefusedError) as error:
            return error.with_traceback(None)  # of a thousand, each would keep its frames
        return None

    async def _post_all(
        self, request: web.Request, token: Token, body: bytes, wait_s: float
    ) -> web.StreamResponse:
        """Declare all of a list or none, with a reason for each that cannot be declared."""
        replaces = replaces_in(request)
        items = [each async for each in _with_pauses(decode_all(body, MAX_LIST))]
        if not 1 <= len(items) <= MAX_LIST:
            message = f"A list must have 1 to {MAX_LIST} declarations."
            raise RefusedError(400, "invalid_body", message)
        errors: dict[int, Exception] = {}
        declared: list[Declaration] = []
        async for number, item in _with_pauses(enumerate(items)):
            refusal = item if isinstance(item, Exception) else self._refusal(request, token, item)
            if isinstance(item, Declaration) and refusal is None:
                declared.append(item)
            elif refusal is not None:
                errors[number] = refusal
        try:
            if errors:
                raise BulkError(errors)
            puts = await self._changes.put_all(request, token, declared, replaces=replaces)
        except BulkError as error:
            return refused_list(items, error.errors, "None is declared", mixed=400)
        if wait_s:
            late = await asyncio.gather(*(self._why_late(each, wait_s) for each in declared))
            if any(late):
                whys = {number: each for number, each in enumerate(late) if each is not None}
                return refused_list(items, whys, _NOT_ALL_LOADED, mixed=504)
        data = [
            self._answered(declaration, put, has_waited=bool(wait_s))
            async for declaration, put in _with_pauses(zip(declared, puts, strict=True))
        ]
        return json_answer({"object": "list", "data": data})

    async def _list(self, request: web.Request, token: Token) -> web.StreamResponse:
        entries, limit = self._declarations.entries, limit_in(request)
        names = sorted(entries)
        if token.scope.is_limited:
            names = [name async for name in _with_pauses(names) if token.scope.may(name)]
        first = bisect_right(names, request.query.get("after", ""))
        page = names[first : first + limit]
        data = [self._described(entries[name]) async for name in _with_pauses(page)]
        return json_answer(
            {
                "object": "list",
                "data": data,
                "first_id": page[0] if page else None,
                "last_id": page[-1] if page else None,
                "has_more": first + limit < len(names),
            }
        )

    async def _get(self, request: web.Request, token: Token) -> web.StreamResponse:
        name = request.match_info["name"]
        self._changes.permit(request, token, name)
        stored = self._declarations.entries.get(name)
        if stored is None:
            raise unknown(name)
        if stored.is_deleted:  # no tag: there is nothing to replace, and it may still be on pods
            return json_answer(self._described(stored), status=410)
        return json_answer(self._described(stored), headers={"ETag": f'"{stored.tag}"'})

    async def _delete(self, request: web.Request, token: Token) -> web.StreamResponse:
        name = request.match_info["name"]
        if not await self._changes.remove(request, token, name):
            raise unknown(name)
        return web.Response(status=204)

    async def _load(self, request: web.Request, token: Token) -> web.StreamResponse:
        asked = decode(await body_of(request), _Load)
        if asked.load_inplace:
            raise RefusedError(
                400,
                "load_inplace",
                "load_inplace is refused: vLLM would read the adapter again at every step and keep "
                "old prefix blocks. Declare a new version in another directory.",
            )
        if not asked.lora_name or not asked.lora_path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise RefusedError(400, "InvalidUserInput", message)
        name, path = asked.lora_name, asked.lora_path
        is_hub = not path.startswith("/") and path.count("/") == 1 and ":" not in path
        declaration = Declaration(name, source=f"hf:{path}" if is_hub else path, origin="store")
        declaration.check()
        await self._changes.put(request, token, declaration)
        if late := await self._why_late(declaration, self._ready_s):
            return error_answer(late)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request, token: Token) -> web.StreamResponse:
        name = decode(await body_of(request), _Unload).lora_name
        if not name:
            message = "'lora_name' needs to be provided to unload."
            raise RefusedError(400, "InvalidUserInput", message)
        if not await self._changes.remove(request, token, name):
            message = f"The lora adapter '{name}' cannot be found."
            raise RefusedError(404, "NotFoundError", message)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _why_late(self, declaration: Declaration, wait_s: float) -> RefusedError | None:
        """Wait until enough pods list an adapter; return why they do not by then."""
        name = declaration.name
        if declaration.is_alias or await self._wait_until_ready(name, wait_s):
            return None
        status = self._status(name)
        why = f"{status['reason']}: {status['message']}" if status.get("reason") else ""
        if status.get("state") == "failed":
            message = f"The adapter {name} is declared, and no pod can load it: {why}."
            return RefusedError(422, "adapter_failed", message)
        message = (
            f"The adapter {name} is declared, but not enough pods listed it within {wait_s:g} s; "
            f"they may list it later{f' ({why})' if why else ''}."
        )
        return RefusedError(504, "not_ready", message)

    def _answered(
        self, declaration: Declaration, put: Put, *, has_waited: bool
    ) -> Mapping[str, Any]:
        name = declaration.name
        status = {"status": self._status(name)} if has_waited else {}
        own = {"id": name, "object": "adapter", "change": put.change}
        return {**as_json(declaration), **own, **status}

    def _described(self, stored: Stored) -> dict[str, Any]:
        return {
            **as_json(stored.declaration),
            "id": stored.declaration.name,
            "object": "adapter",
            "deleted": stored.is_deleted,
            "tag": stored.tag,
            "status": self._status(stored.declaration.name),
        }


async def _with_pauses(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield each, and let other work have its turn now and then: there may be 10,000."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % NUM_AT_ONCE == 0:
            await yield_to_requests()


class _Load(Struct):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class _Unload(Struct):
    lora_name: str = ""
