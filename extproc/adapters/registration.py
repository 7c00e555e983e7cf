"""Registration of adapters over HTTP, on the admin port, for holders of a token.

| request | response |
|---|---|
| `POST /v1/adapters` | 201 declared, 200 replaced or the same as before |
| `GET /v1/adapters` | `{"object": "list", "data": [...]}`, by name |
| `GET /v1/adapters/{name}` | one of them, with its tag in `ETag` |
| `DELETE /v1/adapters/{name}` | 204 |
| `POST /v1/load_lora_adapter` | as vLLM answers, once enough pods list it |
| `POST /v1/unload_lora_adapter` | as vLLM answers, at once |

Errors have the shape of OpenAI's. What a store cannot take now is 503, and 507 where it is full:
waiting helps the one, only deleting helps the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from extproc.adapters.declared import Declaration, DeclarationError
from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    ConflictError,
    Put,
    Stored,
    StoreError,
    StoreFullError,
    as_json,
    decode_asked,
)
from extproc.adapters.stores.store import Store
from extproc.adapters.tokens import Places, Tokens, TooManyError
from extproc.openai import error_type
from extproc.wire.httpserver import Handler

BODY_S = 10.0
"""Seconds for a body of at most `MAX_CONTENT_BYTES` to arrive."""
MAX_WAITING = 32
"""Requests of vLLM's path, which wait until pods list an adapter: an equal part for each token;
further ones get 429. The port has 128 places and Envoy's cluster 64: what is left is for others."""
MAX_AT_ONCE = 16
"""Other requests in progress, likewise."""

PATH = "/v1/adapters"

_Asked = TypeVar("_Asked", bound=Struct)

Status = Callable[[str], Mapping[str, Any]]
Wait = Callable[[str, float], Awaitable[bool]]
WhyNot = Callable[[Declaration], str]


class Registration:
    """The paths for holders of a token.

    Args:
        declarations: Where adapters are declared.
        tokens: Who may.
        status: Returns what the pods have of an adapter by its name, as plain values.
        wait_until_ready: Returns whether enough pods list an adapter, within so many seconds.
        why_not: Returns why a declaration would not count, for people; "" if it would. Raises
            DeclarationError for one that nobody may declare here.
        ready_s: How long vLLM's path waits for that.
    """

    def __init__(
        self,
        declarations: Store,
        tokens: Tokens,
        *,
        status: Status,
        wait_until_ready: Wait,
        why_not: WhyNot,
        ready_s: float,
    ) -> None:
        self._declarations = declarations
        self._tokens = tokens
        self._status = status
        self._wait_until_ready = wait_until_ready
        self._why_not = why_not
        self._ready_s = ready_s

    def add_to(self, app: web.Application) -> None:
        """Add the paths to an application."""
        all_others = Places(MAX_AT_ONCE, self._tokens)
        waiting = Places(MAX_WAITING, self._tokens)
        for method, path, handler, places in (
            ("POST", PATH, self._post, all_others),
            ("GET", PATH, self._list, all_others),
            ("GET", f"{PATH}/{{name:.+}}", self._get, all_others),
            ("DELETE", f"{PATH}/{{name:.+}}", self._delete, all_others),
            ("POST", "/v1/load_lora_adapter", self._load, waiting),
            ("POST", "/v1/unload_lora_adapter", self._unload, all_others),
        ):
            app.router.add_route(method, path, self._guarded(handler, places))

    def _guarded(self, handler: Handler, places: Places) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            found = self._tokens.find(token.strip().encode(errors="replace"))
            if scheme.lower() != "bearer" or found is None:
                challenge = {"WWW-Authenticate": "Bearer"}
                return _error(401, "invalid_api_key", "A right token is needed.", challenge)
            wait_s = self._tokens.wait_s(found)
            if wait_s:
                # Whole seconds, so at least one.
                after = {"Retry-After": str(int(wait_s) + 1)}
                return _error(429, "rate_limit_exceeded", "Too many requests.", after)
            try:
                with places.take(found):
                    return await handler(request)
            except _BodyError as error:
                return _error(error.status, error.code, str(error))
            except TooManyError as error:
                return _error(429, "too_many_requests", f"{error}.", {"Retry-After": "1"})
            except ConflictError as error:
                return _conflict(error, _tag_in(request))
            except DeclarationError as error:
                return _error(400, "invalid_adapter", f"{error}.")
            except StoreFullError as error:
                return _error(507, "store_full", f"The store is full: {error}.")
            except StoreError as error:
                after = {"Retry-After": "1"}
                return _error(
                    503, "store_unavailable", f"The store cannot be used: {error}.", after
                )

        return guarded

    async def _post(self, request: web.Request) -> web.StreamResponse:
        declaration = decode_asked(await _body(request))
        put = await self._put(declaration, _tag_in(request))
        body = {**as_json(declaration), "object": "adapter", "change": put.change.value}
        status = 201 if put.change.value == "created" else 200
        return _json(body, status=status, headers={"ETag": f'"{put.tag}"'})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        entries = self._declarations.entries
        data = [self._described(entries[name]) for name in sorted(entries)]
        return _json({"object": "list", "data": data})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        stored = self._declarations.entries.get(request.match_info["name"])
        if stored is None:
            return _unknown(request.match_info["name"])
        if stored.is_deleted:  # no tag: there is nothing to replace, and it may still be on pods
            return _json(self._described(stored), status=410)
        return _json(self._described(stored), headers={"ETag": f'"{stored.tag}"'})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        was_there = await self._declarations.delete(name, if_match=_tag_in(request))
        return web.Response(status=204) if was_there else _unknown(name)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        asked = _decode(await _body(request), _Load)
        if asked.load_inplace:
            return _error(
                400,
                "load_inplace",
                "load_inplace is refused: vLLM would read the adapter again at every step and keep "
                "old prefix blocks. Declare a new version in another directory.",
            )
        if not asked.lora_name or not asked.lora_path:
            return _error(
                400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."
            )
        name, path = asked.lora_name, asked.lora_path
        is_hub = not path.startswith("/") and path.count("/") == 1 and ":" not in path
        declaration = Declaration(name, source=f"hf:{path}" if is_hub else path, origin="store")
        declaration.check()
        await self._put(declaration)
        if not await self._wait_until_ready(name, self._ready_s):
            return self._why_not_ready(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def _why_not_ready(self, name: str) -> web.Response:
        status = self._status(name)
        why = f"{status['reason']}: {status['message']}" if status.get("reason") else ""
        if status.get("state") == "failed":
            message = f"The adapter {name} is declared, and no pod can load it: {why}."
            return _error(422, "adapter_failed", message)
        message = (
            f"The adapter {name} is declared, but within {self._ready_s:g} s not enough pods list "
            f"it; they still may{f' ({why})' if why else ''}."
        )
        return _error(504, "not_ready", message)

    async def _unload(self, request: web.Request) -> web.StreamResponse:
        name = _decode(await _body(request), _Unload).lora_name
        if not name:
            return _error(400, "InvalidUserInput", "'lora_name' needs to be provided to unload.")
        if not await self._declarations.delete(name):
            return _error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _put(self, declaration: Declaration, if_match: str | None = None) -> Put:
        if why := self._why_not(declaration):
            raise ConflictError(f"{declaration.name}: {why}", "")
        return await self._declarations.put(declaration, if_match=if_match)

    def _described(self, stored: Stored) -> dict[str, Any]:
        return {
            **as_json(stored.declaration),
            "object": "adapter",
            "deleted": stored.is_deleted,
            "tag": stored.tag,
            "status": self._status(stored.declaration.name),
        }


class _Load(Struct):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class _Unload(Struct):
    lora_name: str = ""


class _BodyError(Exception):
    """A body that is refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.clone(client_max_size=MAX_CONTENT_BYTES).read()
    except web.HTTPRequestEntityTooLarge:
        message = f"The body must have at most {MAX_CONTENT_BYTES} bytes."
        raise _BodyError(413, "body_too_large", message) from None
    except TimeoutError:
        raise _BodyError(408, "body_timeout", "The body did not arrive in time.") from None


def _decode(body: bytes, kind: type[_Asked]) -> _Asked:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _BodyError(400, "invalid_body", f"The body cannot be read: {error}.") from error


def _tag_in(request: web.Request) -> str | None:
    """Return the tag in If-Match; one in a weak form matches nothing, as HTTP has it.

    vLLM's paths know no tags.
    """
    value = request.headers.get("If-Match") if request.path.startswith(PATH) else None
    return None if value is None else value.strip().strip('"')


def _conflict(error: ConflictError, if_match: str | None) -> web.Response:
    headers = {"ETag": f'"{error.tag}"'} if error.tag else None
    if if_match is None:
        hint = "; send its ETag in If-Match to replace it" if error.tag else ""
        return _error(409, "conflict", f"{error}{hint}.", headers)
    return _error(412, "precondition_failed", f"{error}.", headers)


def _unknown(name: str) -> web.Response:
    return _error(404, "adapter_not_found", f"The adapter {name} is not declared.")


def _json(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _error(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    error = {"message": message, "type": error_type(status), "param": None, "code": code}
    return _json({"error": error}, status=status, headers=headers)
