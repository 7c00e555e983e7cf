"""The meaning of a request's header fields: a method, or a refusal (9113 8.3, gRPC).

Pure judgement over a list of fields. A refusal is a value, not an exception: the same bytes come
again, and the judgement is cached with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from extproc.wire import grpc
from extproc.wire.rpc import Code, Method

# 9113 8.2.2: "An endpoint MUST NOT generate an HTTP/2 message containing connection-specific header
# fields"; a message with one is malformed.
_CONNECTION_SPECIFIC: Final = frozenset(
    ("connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade")
)
_MAX_QUOTED_CHARS: Final = 64
_PSEUDO: Final = frozenset((":method", ":scheme", ":authority", ":path"))


@dataclass(frozen=True, slots=True)
class Field:
    """One header field, decoded.

    Attributes:
        name: Lowercase, with its colon if it is a pseudo-header field.
        value: As Latin-1, which loses nothing.
        size_bytes: Its share of the header list's size (9113 6.5.2).
        is_valid: Whether name and value conform to 9113 8.2.1.
    """

    name: str
    value: str
    size_bytes: int
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A judged request; at most one of `malformed`, `http_status` and `code` refuses it.

    Attributes:
        method: The method; None if the request is refused.
        metadata: All fields but the pseudo-header fields; repeated ones joined. Read-only, because
            streams with the same bytes share it.
        encoding: From `grpc-encoding`, truncated for messages.
        timeout_s: From `grpc-timeout`; None without a deadline.
        content_length: As announced; None if it was not.
        malformed: Why it is not an HTTP/2 request (9113 8.1.1), or empty.
        http_status: Refused below gRPC with this status, or 0.
        code: Refused with this gRPC status, or OK.
        details: The message for `code`.
    """

    method: Method | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    encoding: str = grpc.IDENTITY
    timeout_s: float | None = None
    content_length: int | None = None
    malformed: str = ""
    http_status: int = 0
    code: Code = Code.OK
    details: str = ""


def judge_request(fields: list[Field], methods: Mapping[str, Method]) -> Request:
    """Judge a request's fields: malformed, refused, or for a method."""
    pseudo: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for item in fields:
        malformed = _judge_field(item, pseudo, has_regular=bool(metadata))
        if malformed:
            return Request(malformed=malformed)
        name, value = item.name, item.value
        if name[0] == ":":
            pseudo[name] = value
        elif name in metadata:
            # 9113 8.2.3 for cookie; gRPC: "may have their values joined with ','".
            metadata[name] += ("; " if name == "cookie" else ",") + value
        else:
            metadata[name] = value
    malformed = _judge_pseudo(pseudo, metadata)
    if malformed:
        return Request(malformed=malformed)
    return _judge_call(pseudo, metadata, methods)


def judge_trailers(fields: list[Field]) -> str:
    """Return why trailers are malformed, or an empty string."""
    for item in fields:
        # 9113 8.1: "Trailers MUST NOT include pseudo-header fields."
        malformed = _judge_field(item, {}, has_regular=True)
        if malformed:
            return malformed
    return ""


def _judge_field(field: Field, pseudo: Mapping[str, str], *, has_regular: bool) -> str:
    name = field.name
    if not field.is_valid:
        return "invalid field name or value"
    if name[0] == ":":
        # 9113 8.3: "Endpoints MUST treat a request [...] that contains undefined or invalid
        # pseudo-header fields as malformed", "All pseudo-header fields MUST appear in a field block
        # before all regular field lines", "The same pseudo-header field name MUST NOT appear more
        # than once".
        if name not in _PSEUDO or name in pseudo or has_regular:
            return f"pseudo-header field {name} unknown, repeated or out of place"
    elif name in _CONNECTION_SPECIFIC or (name == "te" and field.value != "trailers"):
        # 9113 8.2.2: TE "MUST NOT contain any value other than 'trailers'".
        return f"connection-specific field {name}"
    return ""


def _judge_pseudo(pseudo: Mapping[str, str], metadata: Mapping[str, str]) -> str:
    method, path = pseudo.get(":method", ""), pseudo.get(":path", "")
    if method == "CONNECT":
        # 9113 8.5: ":scheme and :path pseudo-header fields MUST be omitted."
        if ":path" in pseudo or ":scheme" in pseudo or not pseudo.get(":authority"):
            return "CONNECT with :scheme or :path, or without :authority"
    elif not method or not pseudo.get(":scheme") or not path:
        # 9113 8.3.1: "All HTTP/2 requests MUST include exactly one valid value for the :method,
        # :scheme, and :path pseudo-header fields", and ":path MUST NOT be empty".
        return "without :method, :scheme or :path"
    elif path[0] != "/" and not (path == "*" and method == "OPTIONS"):
        return ":path does not begin with a slash"
    # 9113 8.3.1: "A server SHOULD treat a request as malformed if it contains a Host header field
    # that identifies an entity that differs from the entity in the :authority".
    if "host" in metadata and metadata["host"] != pseudo.get(":authority", metadata["host"]):
        return "host differs from :authority"
    length = metadata.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        return "content-length is not a number"
    return ""


def _judge_call(
    pseudo: Mapping[str, str], metadata: dict[str, str], methods: Mapping[str, Method]
) -> Request:
    if pseudo[":method"] != "POST":
        return Request(http_status=405)
    kind = metadata.get("content-type", "")
    if not kind.startswith("application/grpc") or kind[16:17] not in ("", "+", ";"):
        # gRPC: "If Content-Type does not begin with 'application/grpc', gRPC servers SHOULD respond
        # with HTTP status of 415 (Unsupported Media Type)."
        return Request(http_status=415)
    timeout = metadata.get("grpc-timeout")
    timeout_s = None if timeout is None else grpc.parse_timeout_s(timeout.encode("latin-1"))
    if timeout is not None and timeout_s is None:
        return Request(code=Code.INTERNAL, details="malformed grpc-timeout")
    method = methods.get(pseudo[":path"])
    if method is None:
        return Request(code=Code.UNIMPLEMENTED, details=f"unknown method {pseudo[':path'][:200]}")
    length = metadata.get("content-length")
    return Request(
        method=method,
        metadata=MappingProxyType(metadata),
        encoding=metadata.get("grpc-encoding", grpc.IDENTITY)[:_MAX_QUOTED_CHARS],
        timeout_s=timeout_s,
        content_length=None if length is None else int(length),
    )
