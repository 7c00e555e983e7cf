"""A request's control headers: those that are trusted are parsed and checked, the rest ignored.

The names are those of inference gateways' endpoint pickers, each with the older ones that clients
still send (llm-d-router, pkg/epp/metadata). They are for the router alone, so no endpoint sees
them.

A hint has one value. All values under its trusted names, repeated or joined with commas, must be
the same, or the request is refused. A client that may add to a gateway's headers can so have a
request refused, and never have a value of its own count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from extproc.errors import RequestError
from extproc.openai import is_model_name
from extproc.protocol import SERVED_KEY, SUBSET_KEY
from extproc.rejections import invalid_header
from extproc.request.steering import HEADERS
from extproc.types import NO_HINTS, Hints

OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_ID = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
SLO_TTFT_MS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
MODEL_REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
HINT_HEADERS = frozenset((*OBJECTIVE, *FAIRNESS_ID, *SLO_TTFT_MS, *SLO_TPOT_MS, *MODEL_REWRITE))
"""Names in lower case, as ext_proc gives them."""
CONTROL_HEADERS = HINT_HEADERS | {
    *("x-llm-d-video-fps", "x-llm-d-video-duration-seconds", "x-llm-d-video-resolution"),
    *("x-llm-d-audio-duration-seconds", "x-llm-d-inference-ttl"),
    *(SUBSET_KEY, SERVED_KEY),
}
"""Those, and headers that other pickers read or set, which are only removed here."""
REMOVED_HEADERS = CONTROL_HEADERS | HEADERS
"""What no endpoint sees by default."""

MAX_NAME_BYTES = 253
"""Of an objective or a fairness id: the longest name of a Kubernetes object."""

_NUMBER = re.compile(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""Decimal numbers that Go's ParseFloat accepts, with which other pickers read these. Python's
`float` accepts more.
"""
MAX_NUMBER_CHARS = 32
MAX_MILLISECONDS = 1e12
"""Thirty years."""
MIN_MILLISECONDS = 1e-12
"""Far below a clock's tick, and large enough to divide by."""

_NAMES = {
    "objective": OBJECTIVE,
    "fairness_id": FAIRNESS_ID,
    "slo": (*SLO_TTFT_MS, *SLO_TPOT_MS),
    "model_rewrite": MODEL_REWRITE,
}
TRUSTABLE = tuple(_NAMES)
"""The hints that may be trusted under any name; `slo` stands for both times."""


def names_of(trusted: Iterable[str]) -> frozenset[str]:
    """Return the headers that count, given words of `TRUSTABLE` and names of single headers."""
    return frozenset(name for each in trusted for name in _NAMES.get(each, (each,)))


def read_hints(
    headers: Mapping[str, str],
    trusted: Collection[str],
    removed: frozenset[str] = REMOVED_HEADERS,
) -> Hints:
    """Return the request's hints by the `trusted` ones among `HINT_HEADERS`, and what is `removed`.

    Raises:
        RequestError: (400) Trusted headers have values that cannot be used, or several.
    """
    if removed.isdisjoint(headers):
        return NO_HINTS
    said = {name: value for name, value in headers.items() if name in trusted}
    return Hints(
        _name(said, OBJECTIVE),
        _name(said, FAIRNESS_ID),
        _milliseconds(said, SLO_TTFT_MS),
        _milliseconds(said, SLO_TPOT_MS),
        tuple(sorted(removed.intersection(headers))),
        _model(said),
    )


def _only(said: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Return the header that counts and its value, "" where there is none or it is empty."""
    found = [name for name in names if name in said]
    values = {value.strip() for name in found for value in said[name].split(",")}
    if len(values) > 1:
        others = "".join(f" and the same as `{name}`" for name in found[1:])
        raise RequestError(invalid_header(found[0], f"a single value{others}"))
    return found[0] if found else names[0], values.pop() if values else ""


def _name(said: Mapping[str, str], names: tuple[str, ...]) -> str:
    name, value = _only(said, names)
    if len(value) > MAX_NAME_BYTES:
        raise RequestError(invalid_header(name, f"at most {MAX_NAME_BYTES} bytes"))
    return value


def _model(said: Mapping[str, str]) -> str:
    name, value = _only(said, MODEL_REWRITE)
    if value and not (value.isascii() and is_model_name(value)):
        raise RequestError(invalid_header(name, "the name of a model, in ASCII"))
    return value


def _milliseconds(said: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, value = _only(said, names)
    if not value:
        return None
    is_number = len(value) <= MAX_NUMBER_CHARS and _NUMBER.fullmatch(value)
    if not is_number or not MIN_MILLISECONDS <= float(value) <= MAX_MILLISECONDS:
        raise RequestError(invalid_header(name, "a positive number of milliseconds"))
    return float(value)
