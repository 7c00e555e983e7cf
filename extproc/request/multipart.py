"""Read the field `model` of a multipart form that arrives in pieces, for the audio routes.

The engine reads forms with Starlette and python-multipart, whose versions treat a malformed form
differently (padding after a boundary, `name*=`, backslashes in quoted strings, a preamble). Only
forms that every reader understands alike are accepted here: RFC 7578 as clients write it, quoted or
bare parameters. Anything else is an error, so no request is routed by one `model` and served by
another. Of repeated fields the last one counts, as in Starlette's `FormData.get`. Other parts are
skipped and not kept.

python-multipart itself would take more code than this and up to ten times the CPU: it is lenient,
tells no positions, and cannot be stopped within a chunk. The tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from extproc.errors import RequestError
from extproc.openai import MAX_MODEL_BYTES, check_model
from extproc.rejections import steers
from extproc.request.bodyslices import IncrementalReader, Place, with_values
from extproc.types import Reason, Rejection

MAX_PARTS = 1000
"""Starlette's default limit of fields, and of files, in one form."""

MAX_PART_HEADERS_BYTES = 4096
"""All header lines of one part; python-multipart allows about that for each line."""

MAX_BOUNDARY_BYTES = 70
"""RFC 2046, section 5.1.1."""

_UNITS_PER_PART = 256
_UNITS_PER_HEADER_BYTE = 2
"""Cost of a part, in the units of `WORK_PER_PASS`."""

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=?-]+")  # RFC 2046's bchars without the space
_TOKEN = r"[!#$%&'+.^_`|~0-9A-Za-z-]+"  # RFC 9110's without "*", which marks an extended value
# Blanks before the value are part of it: whatever could match twice is tried twice at each place.
_HEADER = re.compile(rf"({_TOKEN}):([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*({_TOKEN}\*?)=(?:"([^"\\]*)"|([^\s";\\]+))')


class FormReader(IncrementalReader):
    """One form, slice by slice. Keeps at most a part's headers and the beginning of a `model`.

    Args:
        content_type: The request's `content-type` header.
        removes: Names of fields that are refused.

    Attributes:
        model: The last complete field `model` so far.
        refers_back: False: forms name no earlier response.
        is_whole: The last boundary has been read; anything after it is ignored.
        places: Of the contents of all fields `model` so far.

    Raises:
        RequestError: 415 UNSUPPORTED_MEDIA_TYPE for another media type, 400 INVALID_BODY.
    """

    refers_back = False

    cut = ""  # such a form is refused instead

    def __init__(self, content_type: str, *, removes: frozenset[str] = frozenset()) -> None:
        self._removes = removes
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._content: bytes | None = None
        self._num_parts = 0
        self._read = FormReader._first_boundary
        self.model: str | None = None
        self.is_whole = False
        self.places: list[Place] = []
        self._content_at = 0

    def result(self) -> str:
        """Return the field `model` of a complete form, or raise RequestError (400)."""
        if not self.is_whole:
            raise _invalid("its last boundary is missing")
        return check_model(self.model)

    def rewritten(self, data: bytes | memoryview, model: str) -> bytes:
        """Return the whole form with another model at all its places. If it had none, the model
        goes into a new part before the rest.
        """
        if self.places:
            return with_values(data, [(place, model.encode()) for place in self.places])
        head = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
        return b"".join((self._delimiter[2:], head, model.encode(), b"\r\n", data))

    def _first_boundary(self, part: bytes, pos: int) -> int:
        first = self._delimiter[2:]  # at the very start, without its CRLF
        if part.startswith(first):
            self._read = FormReader._boundary_end
            return len(first)
        if first.startswith(part):
            return self._wait(part, pos)
        raise _invalid("it does not begin with its boundary")

    def _boundary_end(self, part: bytes, pos: int) -> int:
        """Read the ending, which alone makes it a boundary."""
        ending = part[pos : pos + 2]
        if ending in (b"-", b"\r"):
            return self._wait(part, pos)
        if ending not in (b"--", b"\r\n"):
            raise _invalid("text follows a boundary on its line")
        self._end_part()
        if ending == b"--":
            self.is_whole, self._read = True, FormReader._epilogue
            return len(part)
        self._num_parts += 1
        self.work += _UNITS_PER_PART
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._read = FormReader._headers
        return pos  # the line end before the first header may be that of no header

    def _epilogue(self, part: bytes, _pos: int) -> int:
        return len(part)

    def _end_part(self) -> None:
        content, self._content = self._content, None
        if content is None:
            return
        # Only the beginning of an overlong name is kept; it may end within a character.
        errors = "strict" if len(content) <= MAX_MODEL_BYTES else "replace"
        try:
            self.model = content.decode(errors=errors)
        except UnicodeDecodeError:
            raise _invalid("the field `model` is not UTF-8") from None

    def _headers(self, part: bytes, pos: int) -> int:
        limit = pos + len(b"\r\n") + MAX_PART_HEADERS_BYTES
        found = part.find(b"\r\n\r\n", pos, limit)
        if found < 0:
            if len(part) >= limit:
                raise _invalid("the headers of a part are too long")
            return self._wait(part, pos)
        self.work += _UNITS_PER_HEADER_BYTE * (found - pos)
        disposition = _disposition(part[pos + 2 : found])
        if disposition["name"] in self._removes:
            raise RequestError(steers(disposition["name"]))
        if disposition["name"] == "model":
            if len(disposition) > 1:
                raise _invalid("the field `model` must be plain text, not a file")
            self._content, self._content_at = b"", self._begin + found + 4
        self._read = FormReader._skip_content
        return found + 4

    def _skip_content(self, part: bytes, pos: int) -> int:
        """Skip to behind the next delimiter, if it is here; keep the possible beginning of one."""
        found = part.find(self._delimiter, pos)
        end = found if found >= 0 else max(pos, len(part) - len(self._delimiter) + 1)
        if self._content is not None:
            # One byte more than a name may have is enough for `check_model` to refuse it.
            room = MAX_MODEL_BYTES + 1 - len(self._content)
            self._content += part[pos : min(end, pos + room)]
        if found < 0:
            return self._wait(part, end)
        if self._content is not None:
            self.places.append((self._content_at, self._begin + found))
        self._read = FormReader._boundary_end
        return found + len(self._delimiter)


def _disposition(headers: bytes) -> Mapping[str, str]:
    """Return the parameters of the one Content-Disposition among the headers; has `name`."""
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
    """Return a header's main value and its parameters, lower-cased except for their values."""
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


def _invalid(problem: str) -> RequestError:
    message = f"The multipart form cannot be read: {problem}."
    return RequestError(Rejection(400, Reason.INVALID_BODY, message, param="model"))
