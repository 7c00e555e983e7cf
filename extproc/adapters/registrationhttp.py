"""The requests and responses of registration: in JSON, with errors as OpenAI's are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from extproc.adapters.declared import Declaration, DeclarationError
from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    MAX_DECLARATIONS,
    ConflictError,
    StoreError,
    StoreFullError,
)
from extproc.adapters.tokens import TooManyError
from extproc.errors import ExtprocError
from extproc.openai import error_type

BODY_S = 10.0
"""Seconds for a body of at most `MAX_LIST_BYTES` to arrive."""
MAX_LIST_BYTES = 256 * 1024
"""Of a list of declarations; one alone has `MAX_CONTENT_BYTES`."""
PATH = "/v1/adapters"
"""Of what is declared: below it are its adapters by name."""
MAX_LIST = 1000
"""Declarations in a list."""
MAX_WAIT_S = 600.0
"""For which a request may wait, as for `registration.ready_s`."""
_AGAIN = {"Retry-After": "1"}
_AS_IT_IS = "identity"

_Asked = TypeVar("_Asked", bound=Struct)


class RefusedError(ExtprocError):
    """A request, or an item of its list, that is refused."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def refusal(
    error: Exception, if_match: str | None, hint: str = "send its ETag in If-Match"
) -> RefusedError | None:
    """Return the response to an error of a store or of a declaration; None for other errors.

    Args:
        if_match: The tag that the request expects.
        hint: The way for a client to replace a declaration.
    """
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, TooManyError):
        return RefusedError(429, "too_many_requests", f"{error}.", _AGAIN)
    if isinstance(error, ConflictError):
        return _conflict(error, if_match, hint)
    if isinstance(error, DeclarationError):
        return RefusedError(400, "invalid_adapter", f"{error}.")
    if isinstance(error, StoreFullError):
        return RefusedError(507, "store_full", f"The store is full: {error}.")
    if isinstance(error, StoreError):
        message = f"The store cannot be used: {error}."
        return RefusedError(503, "store_unavailable", message, _AGAIN)
    return None


def _conflict(error: ConflictError, if_match: str | None, hint: str) -> RefusedError:
    headers = {"ETag": f'"{error.tag}"'} if error.tag else None
    if if_match is None:
        how = f"; {hint} to replace it" if error.tag else ""
        return RefusedError(409, "conflict", f"{error}{how}.", headers)
    return RefusedError(412, "precondition_failed", f"{error}.", headers)


def unknown(name: str) -> RefusedError:
    """Return the error for a name that nobody declares."""
    return RefusedError(404, "adapter_not_found", f"The adapter {name} is not declared.")


def is_list(body: bytes | bytearray) -> bool:
    """Return whether a body begins as a list does."""
    return body.lstrip(b" \t\r\n").startswith(b"[")


async def body_of(request: web.Request) -> bytes:
    """Return the body.

    Raises:
        RefusedError: It is compressed or too large, or does not arrive in time.
    """
    if request.headers.get("Content-Encoding", _AS_IT_IS).strip().lower() != _AS_IT_IS:
        message = "The request body must not be compressed (content-encoding)."
        raise RefusedError(415, "unsupported_content_encoding", message)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                most = MAX_LIST_BYTES if is_list(body) else MAX_CONTENT_BYTES
                if len(body) > most:
                    message = f"The body must have at most {most} bytes."
                    raise RefusedError(413, "body_too_large", message)
    except TimeoutError:
        raise RefusedError(408, "body_timeout", "The body did not arrive in time.") from None
    return bytes(body)


def decode(body: bytes, kind: type[_Asked]) -> _Asked:
    """Return a body of vLLM's paths.

    Raises:
        RefusedError: It is none.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(400, "invalid_body", f"The body cannot be read: {error}.") from error


def tag_in(request: web.Request) -> str | None:
    """Return the tag in If-Match; one in a weak form matches nothing, as HTTP has it.

    vLLM's paths know no tags, only those below `PATH` do.
    """
    value = request.headers.get("If-Match") if request.path.startswith(PATH) else None
    return None if value is None else value.strip().strip('"')


def wait_in(request: web.Request) -> float:
    """Return for how long a request may wait; 0 where it does not say so.

    Raises:
        RefusedError: It is no such time.
    """
    text = request.query.get("wait")
    if text is None:
        return 0.0
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not (isfinite(wait_s) and 0 <= wait_s <= MAX_WAIT_S):
        message = f"wait must be seconds, from 0 to {MAX_WAIT_S:g}."
        raise RefusedError(400, "invalid_query", message)
    return wait_s


def replaces_in(request: web.Request) -> bool:
    """Return whether a list replaces what is declared otherwise.

    Raises:
        RefusedError: It says neither so nor not, or as for one declaration.
    """
    text = request.query.get("replace", "false")
    if text not in ("true", "false"):
        raise RefusedError(400, "invalid_query", "replace must be true or false.")
    if "If-Match" in request.headers:
        message = "If-Match is for one declaration; for a list there is replace=true."
        raise RefusedError(400, "invalid_if_match", message)
    return text == "true"


def limit_in(request: web.Request) -> int:
    """Return how many entries of a list are wanted at most.

    Raises:
        RefusedError: It is no such number.
    """
    text = request.query.get("limit", str(MAX_DECLARATIONS))
    # The count of digits first: int() refuses thousands of them with a ValueError.
    if not (
        text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= MAX_DECLARATIONS
    ):
        message = f"limit must be a number from 1 to {MAX_DECLARATIONS}."
        raise RefusedError(400, "invalid_query", message)
    return int(text)


def json_answer(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer in JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error_answer(
    error: RefusedError, items: Mapping[int, tuple[str, RefusedError]] | None = None
) -> web.Response:
    """Return the answer to a request that is refused.

    Args:
        error: Why.
        items: Name and reason of each item of its list that is, by their place from 0.
    """
    body: dict[str, Any] = {
        "message": str(error),
        "type": error_type(error.status),
        "param": None,
        "code": error.code,
    }
    if items is not None:
        body["items"] = [
            {
                "index": index,
                "name": name,
                "status": each.status,
                "code": each.code,
                "message": str(each),
            }
            for index, (name, each) in sorted(items.items())
        ]
    return json_answer({"error": body}, status=error.status, headers=error.headers)


def refused_list(
    items: Sequence[Declaration | DeclarationError],
    errors: Mapping[int, Exception],
    what: str,
    *,
    mixed: int,
) -> web.Response:
    """Return the answer to a list, with the reason for each item that has one.

    Args:
        items: All of it.
        errors: By their place from 0; `refusal` knows each.
        what: The result for the list, for people.
        mixed: The status where the items' statuses differ.
    """
    whys: dict[int, tuple[str, RefusedError]] = {}
    for number, error in errors.items():
        item, why = items[number], refusal(error, None, "send replace=true")
        assert why is not None
        whys[number] = "" if isinstance(item, DeclarationError) else item.name, why
    statuses = {why.status for _, why in whys.values()}
    message = f"{what}: {len(whys)} of {len(items)} have an error, in `items`."
    status = statuses.pop() if len(statuses) == 1 else mixed
    return error_answer(RefusedError(status, "list_refused", message), whys)
