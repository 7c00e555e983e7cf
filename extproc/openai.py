"""The OpenAI API: valid names of models, how engines spell them, and the bodies of our own
responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from heapq import merge

import msgspec

from extproc.errors import RequestError
from extproc.types import ModelCard, Reason, Rejection

MAX_MODEL_BYTES = 256
"""Longest model name in UTF-8 bytes. A Hugging Face id has at most 96 characters after its owner
and a path in the hub's cache about 130; names become metric labels and metadata, so no more."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and surrogates, which have no UTF-8 form; the engine refuses the latter."""

_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


def check_model(model: object) -> str:
    """Return `model` itself if it can be a model's name.

    Raises:
        RequestError: 400 MISSING_MODEL for null and "", else INVALID_BODY: not a string, longer
            than `MAX_MODEL_BYTES`, control characters or lone surrogates in it.
    """
    if model is None or model == "":
        raise _bad_request(Reason.MISSING_MODEL, "The field `model` is required.")
    if not isinstance(model, str):
        raise _bad_request(Reason.INVALID_BODY, "The field `model` must be a string.")
    if not model.isprintable() and _is_unsafe(model):
        message = "The field `model` must not contain control characters or lone surrogates."
        raise _bad_request(Reason.INVALID_BODY, message)
    if len(model) > MAX_MODEL_BYTES // 4 and len(model.encode()) > MAX_MODEL_BYTES:
        message = f"The field `model` must not be longer than {MAX_MODEL_BYTES} bytes."
        raise _bad_request(Reason.INVALID_BODY, message)
    return model


def is_model_name(name: str) -> bool:
    """Return whether a request can name it: whether `check_model` accepts it."""
    return bool(name) and not _is_unsafe(name) and len(name.encode()) <= MAX_MODEL_BYTES


def _is_unsafe(name: str) -> bool:
    return _UNSAFE.search(name) is not None


def error_type(status: int) -> str:
    """Return OpenAI's `type` of an error.

    The types are those of OpenAI's error guide (platform.openai.com/docs/guides/error-codes);
    `server_error`, that of its older errors and its event types, stands for any other 5xx. The
    official clients choose their exception by the status alone and pass `type`, `param` and `code`
    through as strings.
    """
    return _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(rejection: Rejection) -> bytes:
    """Return the JSON body of an error: `{"error": {"message", "type", "param", "code"}}`."""
    error = {
        "message": rejection.message,
        "type": error_type(rejection.status),
        "param": rejection.param,
        "code": rejection.reason.value,
    }
    return msgspec.json.encode({"error": error})


Encoded = MutableMapping[str, tuple[ModelCard, bytes]]
"""By name, each card as it was last encoded for a list."""


NAMES_A_PASS = 128
"""Of a list that is made in passes: some 0.5 ms each, as other requests wait for one."""
_SORTED_A_PASS = 8 * NAMES_A_PASS  # in C


def list_in_passes(
    cards: Mapping[str, ModelCard], encoded: Encoded | None = None
) -> Iterator[bytes]:
    """Yield b"" after each pass, and in the end the body of `GET /v1/models`.

    Base models come first, then adapters, each by id.

    A card that equals its `encoded` one is not encoded again; new ones are kept there.
    """
    kept = {} if encoded is None else encoded
    bases, adapters, pieces, names = list[bytes](), list[bytes](), list[bytes](), list(cards)
    starts = range(0, len(names), _SORTED_A_PASS)
    parts = list[list[str]]()
    for start in starts:
        parts.append(sorted(names[start : start + _SORTED_A_PASS]))
        yield b""
    for number, name in enumerate(parts[0] if len(parts) == 1 else merge(*parts), start=1):
        card, known = cards[name], kept.get(name)
        if known is None or known[0] != card:
            kept[name] = known = card, model_body(card)
        (bases if card.parent is None else adapters).append(known[1])
        if number % NAMES_A_PASS == 0:
            pieces.append(b",".join(adapters))
            adapters.clear()
            yield b""
    entries = [*bases, *filter(None, pieces), *adapters] or [b""]
    entries[0] = b'{"object":"list","data":[' + entries[0]
    entries[-1] += b"]}"
    yield b",".join(entries)  # copies all, so it is done once


def model_body(card: ModelCard) -> bytes:
    """Return the body of `GET /v1/models/{id}`."""
    return msgspec.json.encode(_card(card))


def version_body(version: str) -> bytes:
    """Return the body of `GET /version`, which is vLLM's and not OpenAI's."""
    return msgspec.json.encode({"version": version})


def _bad_request(reason: Reason, message: str) -> RequestError:
    return RequestError(Rejection(400, reason, message, param="model"))


class _Card(msgspec.Struct):
    """As OpenAI and vLLM show a model; three times as fast to make and to encode as a dict."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None


def _card(card: ModelCard) -> _Card:
    return _Card(
        card.id,
        "model",
        card.created_wall_s,
        card.owned_by,
        card.root or None,
        card.parent,
        card.max_model_len,
    )


# How requests name adapters where an engine wants their base model's name before them.
#
# SGLang takes BASE:ADAPTER in `model`, or the adapter in `lora_path`; a bare adapter's name it
# answers with the base model and status 200 (sgl-project/sglang pull request 11570, issue 12243),
# although it lists that name.

_BETWEEN = ":"


def joined(model: str, adapter: str) -> str:
    """Return how `model` would name what a body names by `model` and `lora_path` together.

    An adapter in `model` comes first.
    """
    return model if _BETWEEN in model else f"{model}{_BETWEEN}{adapter}"


class Spelling(msgspec.Struct, frozen=True):
    """The names that clients and pods write in `model`, and those that pods list.

    Attributes:
        find: Returns what pods list, or is declared, under a name.
        joins: Adapters are named with their base model; False: by the names that are listed.
    """

    find: Callable[[str], ModelCard | None]
    joins: bool = False

    def listed(self, model: str) -> str:
        """Return the name that pods list for what a client wrote; that itself if there is none."""
        if not self.joins or _BETWEEN not in model or self.find(model) is not None:
            return model
        base, _, adapter = model.partition(_BETWEEN)
        card = self.find(adapter)
        return adapter if card is not None and card.parent in (base, "") else model

    def full(self, name: str) -> str:
        """Return what a pod is to read in `model` for a name that it lists."""
        card = self.find(name) if self.joins else None
        return name if card is None or card.parent is None else f"{card.parent}{_BETWEEN}{name}"


LISTED = Spelling(lambda _name: None)
"""Where clients and pods write the names that are listed."""
