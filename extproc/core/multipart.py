"""Find the field `model` in a multipart form: the audio routes.

The engine reads forms with Starlette and python-multipart, whose versions differ in what they make
of a malformed form (padding after a boundary, `name*=`, backslashes in quoted strings, a preamble).
Only forms that every reader takes alike are read here: RFC 7578 as clients write it, quoted or bare
parameters. Anything else is an error, so nobody is routed by one `model` and served by another.
Where the field comes twice the last one counts, as in Starlette's `FormData.get`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from extproc.core.errors import RequestError
from extproc.core.openai import check_model
from extproc.core.types import Reason, Rejection

MAX_PARTS = 1000
"""Starlette's default limit of fields, and of files, in one form."""

MAX_PART_HEADERS_BYTES = 4096
"""All header lines of one part; python-multipart allows about that for each line."""

MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=?-]+")  # RFC 2046's bchars without the space
_TOKEN = r"[!#$%&'+.^_`|~0-9A-Za-z-]+"  # RFC 9110's without "*", which marks an extended value
_HEADER = re.compile(rf"({_TOKEN}):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*({_TOKEN}\*?)=(?:"([^"\\]*)"|([^\s";\\]+))')


class _CutError(Exception):
    """The form ends before its closing boundary, and is well formed so far."""


def model_in_form(body: bytes, content_type: str) -> str:
    """The field `model` of a complete form.

    Args:
        body: The request body.
        content_type: The request's `content-type` header.

    Raises:
        RequestError: 415 UNSUPPORTED_MEDIA_TYPE for another media type, 400 INVALID_BODY for a
            form that readers could disagree about or a `model` that is a file or no model's name,
            400 MISSING_MODEL; answer the client with it.
    """
    model: str | None = None
    try:
        for value in _models(body, content_type):
            model = value
    except _CutError:
        raise _invalid("its last boundary is missing") from None
    return check_model(model)


def model_in_form_prefix(prefix: bytes, content_type: str) -> str | None:
    """The field `model` if it stands in `prefix` up to the boundary behind it, else None.

    Raises:
        RequestError: As `model_in_form`, for what can be seen.
    """
    model: str | None = None
    try:
        for value in _models(prefix, content_type):
            model = value
    except _CutError:
        pass
    return None if model is None else check_model(model)


def _models(body: bytes, content_type: str) -> Iterator[str]:
    """Every value of the field `model`, in order."""
    for headers, content in _parts(body, _boundary(content_type)):
        disposition = _disposition(headers)
        if disposition["name"] != "model":
            continue
        if len(disposition) > 1:
            raise _invalid("the field `model` must be plain text, not a file")
        try:
            yield content.decode()
        except UnicodeDecodeError:
            raise _invalid("the field `model` is not UTF-8") from None


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The complete parts in order: header lines, content."""
    delimiter = b"\r\n--" + boundary
    at = len(delimiter) - 2  # the first one stands at the very start, without its CRLF
    if not body.startswith(delimiter[2:]):
        raise _cut_or_invalid(delimiter[2:].startswith(body), "it does not begin with its boundary")
    num_parts = 0
    while not _is_last(body, at):
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        start = _end_of_headers(body, at)
        end = body.find(delimiter, start)
        if end < 0:
            raise _CutError
        headers = body[at + 2 : start - 4]
        at = end + len(delimiter)
        _is_last(body, at)  # what looks like a boundary is one only with its ending
        yield headers, body[start:end]


def _is_last(body: bytes, at: int) -> bool:
    """Whether the boundary that ends at `at` closes the form; else a part follows."""
    ending = body[at : at + 2]
    if ending in (b"--", b"\r\n"):
        return ending == b"--"
    raise _cut_or_invalid(ending in (b"", b"-", b"\r"), "text follows a boundary on its line")


def _end_of_headers(body: bytes, at: int) -> int:
    """Where the content begins; `at` is the line end before the first header."""
    limit = at + len(b"\r\n") + MAX_PART_HEADERS_BYTES
    found = body.find(b"\r\n\r\n", at, limit)
    if found < 0:
        raise _cut_or_invalid(len(body) < limit, "the headers of a part are too long")
    return found + 4


def _disposition(headers: bytes) -> Mapping[str, str]:
    """The parameters of the one Content-Disposition among header lines; has `name`."""
    lines = [_HEADER.fullmatch(line) for line in headers.decode("latin-1").split("\r\n")]
    values = [line[2] for line in lines if line and line[1].lower() == "content-disposition"]
    if None in lines or len(values) != 1:
        raise _invalid("a part needs well-formed headers with one Content-Disposition")
    kind, parameters = _parameters(values[0])
    has_odd_name = any(key.endswith("*") and key != "filename*" for key in parameters)
    if kind != "form-data" or "name" not in parameters or has_odd_name:
        raise _invalid("a part's Content-Disposition must be form-data with a plain name")
    return parameters


def _boundary(content_type: str) -> bytes:
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        message = "This path takes multipart/form-data only."
        raise RequestError(Rejection(415, Reason.UNSUPPORTED_MEDIA_TYPE, message))
    _, parameters = _parameters(content_type)
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise _invalid("its charset must be UTF-8")
    boundary = parameters.get("boundary", "")
    is_odd = any(key.endswith("*") for key in parameters) or not _BOUNDARY.fullmatch(boundary)
    if is_odd or len(boundary) > MAX_BOUNDARY_BYTES:
        raise _invalid(f"content-type needs one plain boundary of 1 to {MAX_BOUNDARY_BYTES} bytes")
    return boundary.encode()


def _parameters(value: str) -> tuple[str, Mapping[str, str]]:
    """A header's main value and its parameters, both lower-cased but for the values."""
    at = len(value.partition(";")[0])
    main = value[:at].strip().lower()
    parameters: dict[str, str] = {}
    while at < len(value):
        found = _PARAMETER.match(value, at)
        if found is None or found[1].lower() in parameters:
            raise _invalid("a header has parameters that are malformed or stand twice")
        parameters[found[1].lower()] = found[3] if found[2] is None else found[2]
        at = found.end()
    return main, parameters


def _cut_or_invalid(is_cut: bool, problem: str) -> Exception:
    return _CutError() if is_cut else _invalid(problem)


def _invalid(problem: str) -> RequestError:
    message = f"The multipart form cannot be read: {problem}."
    return RequestError(Rejection(400, Reason.INVALID_BODY, message, param="model"))
