"""A request's control headers: those that are trusted are parsed and checked, the rest ignored.

The names are those of inference gateways' endpoint pickers, each with the older ones that clients
still send (llm-d-router, pkg/epp/metadata). Of several names of one hint the first counts. They
are for the router alone, so no endpoint sees them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from extproc.core.errors import RequestError
from extproc.core.openai import is_model_name
from extproc.core.protocol import SERVED_KEY, SUBSET_KEY
from extproc.core.rejections import invalid_header
from extproc.core.types import NO_HINTS, Hints

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

MAX_NAME_BYTES = 253
"""Of an objective or a fairness id: the longest name of a Kubernetes object."""

_MILLISECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


TRUSTABLE = ("objective", "fairness_id", "slo", "model_rewrite")
"""What may be trusted; `slo` stands for both times."""


def read_hints(headers: Mapping[str, str], trusted: Collection[str]) -> Hints:
    """Return the request's hints by the `trusted` ones among `TRUSTABLE`.

    Raises:
        RequestError: (400) A trusted header has a value that cannot be used.
    """
    if CONTROL_HEADERS.isdisjoint(headers):
        return NO_HINTS
    with_slo = "slo" in trusted
    return Hints(
        _name(headers, OBJECTIVE) if "objective" in trusted else "",
        _name(headers, FAIRNESS_ID) if "fairness_id" in trusted else "",
        _milliseconds(headers, SLO_TTFT_MS) if with_slo else None,
        _milliseconds(headers, SLO_TPOT_MS) if with_slo else None,
        tuple(sorted(CONTROL_HEADERS.intersection(headers))),
        _model(headers) if "model_rewrite" in trusted else "",
    )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Return the header that counts and its value, "" where there is none."""
    for name in names:
        value = headers.get(name, "").strip()
        if value:
            return name, value
    return names[0], ""


def _name(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    name, value = _first(headers, names)
    if len(value) > MAX_NAME_BYTES:
        raise RequestError(invalid_header(name, f"at most {MAX_NAME_BYTES} bytes"))
    return value


def _model(headers: Mapping[str, str]) -> str:
    name, value = _first(headers, MODEL_REWRITE)
    if value and not (value.isascii() and is_model_name(value)):
        raise RequestError(invalid_header(name, "the name of a model, in ASCII"))
    return value


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, value = _first(headers, names)
    if not value:
        return None
    if not _MILLISECONDS.fullmatch(value) or not float(value):
        raise RequestError(invalid_header(name, "a positive number of milliseconds"))
    return float(value)
