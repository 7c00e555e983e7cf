"""The OpenAI API as bytes: what a request names, and the bodies that we answer with ourselves.

The engine reads a body with Python's `json.loads` (Starlette's `Request.json`), so that is the
meaning of a body here too: where `json.loads(body)["model"]` is a string, `read_body` gives that
string or an error, never another one. msgspec is ten times faster and agrees with it wherever both
accept a body; it refuses what is legal in Python's reading only (NaN, a lone surrogate escape,
UTF-16, a byte order mark), and then `json.loads` decides. It accepts two kinds of body that
`json.loads` refuses (bytes that are not UTF-8, integers of more than 4300 digits, both in members
that are skipped); such a body is forwarded and the engine answers 400.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from extproc.core.errors import RequestError
from extproc.core.types import ModelCard, Reason, Rejection

MAX_MODEL_BYTES = 256
"""Longest model name in UTF-8 bytes. A Hugging Face id has at most 96 characters after its owner
and a path in the hub's cache about 130; names become metric labels and metadata, so no more."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and surrogates, which have no UTF-8 form; the engine refuses the latter."""

_ERROR_TYPES: dict[int, str] = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What routing needs from a complete JSON body.

    Attributes:
        model: Checked by `check_model`.
        previous_response_id: As the body has it, of whatever type; None where absent or null.
    """

    model: str
    previous_response_id: object = None


class _Members(msgspec.Struct, gc=False):
    model: object = None
    previous_response_id: object = None


class _Card(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None


_members_decoder = msgspec.json.Decoder(_Members)


def read_body(body: bytes) -> BodyFields:
    """Read a complete JSON body once.

    Raises:
        RequestError: 400 INVALID_JSON, INVALID_BODY or MISSING_MODEL; answer the client with it.
    """
    if not body:
        raise _bad_request(Reason.INVALID_JSON, "The request body is empty.")
    members = _members_by_msgspec(body) or _members_as_python_reads(body)
    return BodyFields(check_model(members.model), members.previous_response_id)


def extract_model(body: bytes) -> str:
    """The `model` of a complete JSON body. Raises what `read_body` raises."""
    return read_body(body).model


def check_model(model: object) -> str:
    """Answer `model` itself if it can be a model's name.

    Raises:
        RequestError: 400 MISSING_MODEL for null and "", else INVALID_BODY: not a string, longer
            than `MAX_MODEL_BYTES`, control characters or lone surrogates in it.
    """
    if model is None or model == "":
        raise _bad_request(Reason.MISSING_MODEL, "The field `model` is required.")
    if not isinstance(model, str):
        raise _bad_request(Reason.INVALID_BODY, "The field `model` must be a string.")
    if _is_unsafe(model):
        message = "The field `model` must not contain control characters or lone surrogates."
        raise _bad_request(Reason.INVALID_BODY, message)
    if len(model.encode()) > MAX_MODEL_BYTES:
        message = f"The field `model` must not be longer than {MAX_MODEL_BYTES} bytes."
        raise _bad_request(Reason.INVALID_BODY, message)
    return model


def is_model_name(name: str) -> bool:
    """Whether a request can name it: what `check_model` lets through."""
    return bool(name) and not _is_unsafe(name) and len(name.encode()) <= MAX_MODEL_BYTES


def _is_unsafe(name: str) -> bool:
    return not name.isprintable() and _UNSAFE.search(name) is not None


def error_type(status: int) -> str:
    """OpenAI's word for an error's `type`.

    The words are those of OpenAI's error guide (platform.openai.com/docs/guides/error-codes):
    `invalid_request_error` for 4xx, `rate_limit_error` for 429, `service_unavailable_error` for
    503; `server_error`, the word of its older errors and of its event types, for any other 5xx.
    The official clients choose their exception by the status alone and hand `type`, `param` and
    `code` through as strings.
    """
    other = (
        "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    )
    return _ERROR_TYPES.get(status, other)


def error_body(rejection: Rejection) -> bytes:
    """The JSON body of an error answer: `{"error": {"message", "type", "param", "code"}}`."""
    error = {
        "message": rejection.message,
        "type": error_type(rejection.status),
        "param": rejection.param,
        "code": rejection.reason.value,
    }
    return msgspec.json.encode({"error": error})


def models_body(cards: Iterable[ModelCard]) -> bytes:
    """The body of `GET /v1/models`: base models first, then adapters, each kind by id."""
    listed = sorted(cards, key=lambda card: (card.parent is not None, card.id))
    return msgspec.json.encode({"object": "list", "data": [_card(card) for card in listed]})


def model_body(card: ModelCard) -> bytes:
    """The body of `GET /v1/models/{id}`."""
    return msgspec.json.encode(_card(card))


def _members_by_msgspec(body: bytes) -> _Members | None:
    try:
        return _members_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _members_as_python_reads(body: bytes) -> _Members:
    # The exceptions of json hold the whole body: the error is raised outside their handlers, so
    # that it does not drag a prompt along as its context.
    problem = ""
    document: object = None
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} (line {error.lineno}, column {error.colno})"
    except UnicodeDecodeError as error:
        problem = f"bytes that are not {error.encoding} (at {error.start})"
    except ValueError:
        problem = "a number has too many digits"
    except RecursionError:
        problem = "it is nested too deeply"
    if problem:
        message = f"The request body is not valid JSON: {problem}."
        raise _bad_request(Reason.INVALID_JSON, message, param=None)
    if not isinstance(document, dict):
        message = "The request body must be a JSON object."
        raise _bad_request(Reason.INVALID_BODY, message, param=None)
    return _Members(document.get("model"), document.get("previous_response_id"))


def _bad_request(reason: Reason, message: str, *, param: str | None = "model") -> RequestError:
    return RequestError(Rejection(400, reason, message, param=param))


def _card(card: ModelCard) -> _Card:
    return _Card(
        id=card.id,
        object="model",
        created=card.created_wall_s,
        owned_by=card.owned_by,
        root=card.root or None,
        parent=card.parent,
        max_model_len=card.max_model_len,
    )
