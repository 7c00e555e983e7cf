"""Loads and unloads adapters on pods: the calls of vLLM and of SGLang.

A response is judged by its status and the shape of its body, never by a text: texts change between
versions. Nor does success mean much: it is `/v1/models` that shows which adapters a pod has.

    vLLM    200 and a text; an error as {"error": {...}}, up to 0.9 flat with "object": "error"
    SGLang  200 or 400, with "success", "error_message" and "loaded_adapters" (name to path)

`load_inplace` is never sent: vLLM 0.15 to 0.32 then read the files again in each step (pull request
41482), and cached prompts of the old weights stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from yarl import URL

from extproc.adapters import effect
from extproc.adapters.adapterstates import Failure, Result
from extproc.bounds import has_few_values
from extproc.phrases import shortened
from extproc.reports.engines import EngineMetrics
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, ResponseError, describe, describe_status

MAX_BODY_BYTES: Final = 1024 * 1024
"""Of a response: SGLang's lists every adapter that it has."""
MAX_VALUES: Final = 50_000
"""Of a response's JSON: the names and paths of more adapters than a server has."""
MAX_ANSWER_BYTES: Final = 64 * 1024
"""Of a response with a few probabilities, which is some 2 KB. Every pod may be asked at once."""
MAX_REASON_CHARS: Final = 500
"""Of an engine's reason: vLLM's begins with 80 characters of its own, and names paths."""

_STATUSES_WITH_REASON = (HTTPStatus.OK, HTTPStatus.BAD_REQUEST, HTTPStatus.INTERNAL_SERVER_ERROR)
_NO_RUNTIME = (
    "the server has no such path: it must run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or have its "
    "adapters from the start"
)


class _Reply(msgspec.Struct):
    """The fields of every shape; untyped, as each engine and each gateway has its own."""

    error: object = None
    type: object = None
    message: object = None
    detail: object = None
    success: object = None
    error_message: object = None
    loaded_adapters: object = None

    @property
    def kind(self) -> object:
        """The type of an error: vLLM's name for it."""
        return self.error.get("type") if isinstance(self.error, dict) else self.type

    @property
    def code(self) -> object:
        """The code of an error."""
        return self.error.get("code") if isinstance(self.error, dict) else None

    @property
    def reason(self) -> str:
        """The reason of an error, in one line; "" where there is none."""
        wrapped = self.error.get("message") if isinstance(self.error, dict) else self.error
        for text in (wrapped, self.error_message, self.message, self.detail):
            if isinstance(text, str) and text:
                return _line(text)
        return ""

    def lists(self, name: str) -> bool | None:
        """Return whether SGLang has this adapter; None where it does not say."""
        loaded = self.loaded_adapters
        return name in loaded if isinstance(loaded, dict) else None


async def load(
    client: PodClient,
    url: str,
    profile: EngineMetrics,
    *,
    name: str,
    path: str,
    timeout_s: float,
) -> Result:
    """Load an adapter on the pod at `url` (no trailing slash).

    Returns:
        No failure also where the name is taken already, with the engine's message: the list of
        models shows by which path, and whether the adapter is there at all.
    """

    def judge(status: int, reply: _Reply) -> Result | None:
        is_taken = reply.kind == "InvalidUserInput" or reply.lists(name) is True
        if status == HTTPStatus.BAD_REQUEST and is_taken:
            return Result(None, reply.reason)
        has_no_files = status == HTTPStatus.NOT_FOUND and reply.kind == "NotFoundError"
        return Result(Failure.FILES, reply.reason) if has_no_files else None

    document = {"lora_name": name, "lora_path": path}
    return await _call(client, url + profile.load_path, document, timeout_s, judge)


async def unload(
    client: PodClient,
    url: str,
    profile: EngineMetrics,
    *,
    name: str,
    timeout_s: float,
) -> Result:
    """Unload an adapter on the pod at `url` (no trailing slash); no failure if it has none."""

    def judge(status: int, reply: _Reply) -> Result | None:
        is_unknown = status == HTTPStatus.NOT_FOUND and (
            reply.kind == "NotFoundError" or reply.code == "model_not_found"  # of the Rust frontend
        )
        has_none = is_unknown or reply.lists(name) is False
        return Result(None, reply.reason) if has_none else None

    document = {"lora_name": name}
    return await _call(client, url + profile.unload_path, document, timeout_s, judge)


async def likeliest(
    client: PodClient, url: str, model: str, *, timeout_s: float
) -> effect.Logprobs | None:
    """Return what a model of the pod at `url` answers to `effect.question`, by the name that the
    engine reads; None where it gives no answer to compare.
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, _, body = await client.ask(
                "POST",
                URL(url + effect.PATH),
                effect.question(model),
                max_bytes=MAX_ANSWER_BYTES,
            )
    except FAILURES:
        return None
    return effect.read_answer(body) if status == HTTPStatus.OK else None


async def _call(
    client: PodClient,
    url: str,
    document: Mapping[str, str],
    timeout_s: float,
    judge: Callable[[int, _Reply], Result | None],
) -> Result:
    """Return what came of a call.

    Args:
        judge: Returns what a response that is no success means for this call, by its status and
            body; None for what it means for any.
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, _, body = await client.ask("POST", URL(url), document, max_bytes=MAX_BODY_BYTES)
    except TimeoutError:
        return Result(Failure.TIMEOUT, f"no answer within {timeout_s:g} s")
    except ResponseError as error:
        return Result(Failure.ENGINE, describe(error))
    except FAILURES as error:
        return Result(Failure.UNREACHABLE, _line(describe(error)))
    reply = _decode(body)
    if status == HTTPStatus.OK and reply.success is not False:
        return Result()
    return judge(status, reply) or _refusal(status, reply)


def _decode(body: bytes) -> _Reply:
    """Decode a body; without fields where it is no JSON object, such as vLLM's text, or too large
    a one."""
    if not has_few_values(body, MAX_VALUES):
        return _Reply()
    try:
        return msgspec.json.decode(body, type=_Reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Reply()


def _refusal(status: int, reply: _Reply) -> Result:
    """Return what stands behind a response that is no success of any kind."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return Result(Failure.UNAUTHORIZED, describe_status(status))
    if status == HTTPStatus.NOT_FOUND and reply.detail is not None:
        return Result(Failure.NO_RUNTIME, _NO_RUNTIME)
    reason = reply.reason
    if reason and status in _STATUSES_WITH_REASON:
        return Result(Failure.REFUSED, reason)
    return Result(Failure.ENGINE, describe_status(status) + (f": {reason}" if reason else ""))


def _line(text: str) -> str:
    """Return a text in one line of printable characters, cut to `MAX_REASON_CHARS`."""
    line = " ".join(text[: 2 * MAX_REASON_CHARS].split())
    printable = "".join(each if each.isprintable() else "?" for each in line)
    return shortened(printable, MAX_REASON_CHARS)
