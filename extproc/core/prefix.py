"""Find `model` in a JSON body of which only the beginning is here.

A body over Envoy's buffer (BUFFERED_PARTIAL) or still arriving (streamed modes) cannot be parsed
whole. Keys and values are read one after the other by Python's own JSON scanner, the one behind
the engine's `json.loads`, so whatever stands complete in the prefix reads as it does there. A
member is skipped at C speed, however it is nested, and the cost is linear in the prefix.

What lies behind the prefix is not known: where a body names `model` twice, the engine takes the
last one, and this takes the last one that it can see.
"""

from __future__ import annotations

import json
import re

from extproc.core.openai import check_model

MAX_MEMBERS = 1024
"""Top-level members read before giving up. Requests have some tens; a MiB of tiny members would
hold the event loop for a third of a second."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOKEN = re.compile(r"[^ \t\n\r]")  # JSON's four kinds of whitespace; re's \s would take more
_read_value = json.JSONDecoder().raw_decode


def model_in_prefix(prefix: bytes) -> str | None:
    """The string value of the top-level `model` if it stands complete in `prefix`.

    None where it is not there, not there yet or not a string, where `prefix` stops being JSON
    before it, and for UTF-16 and UTF-32. Never a nested `model`, nor one inside a string. A value
    is complete with its closing quote. Takes time and memory linear in `prefix`.

    Raises:
        RequestError: 400 as `check_model` raises it; the name is complete and no model's name.
    """
    model: object = None
    text = _decoded(prefix)
    try:
        at = _after(text, 0, "{")
        for _ in range(MAX_MEMBERS):
            key, at = _read_string(text, _skip(text, at))
            value, at = _read_value(text, _after(text, at, ":"))
            if key == "model":
                model = value
            at = _after(text, at, ",")
    except (ValueError, RecursionError):
        pass  # the prefix ends here, or it is not JSON: the engine will say so
    return check_model(model) if isinstance(model, str) else None


def _decoded(prefix: bytes) -> str:
    prefix = prefix.removeprefix(_BYTE_ORDER_MARK)
    try:
        return prefix.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:  # most often a character cut in two by the end
        return prefix[: error.start].decode("utf-8", "surrogatepass")


def _skip(text: str, at: int) -> int:
    found = _TOKEN.search(text, at)
    return found.start() if found else len(text)


def _after(text: str, at: int, mark: str) -> int:
    """Where the value behind `mark` begins; `mark` must be the next token at `at`."""
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise ValueError(mark)
    return _skip(text, at + len(mark))


def _read_string(text: str, at: int) -> tuple[str, int]:
    if not text.startswith('"', at):
        raise ValueError('"')
    return _read_value(text, at)
