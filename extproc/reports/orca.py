"""Parse the load report that vLLM puts into a response header on request (ORCA).

The header `endpoint-load-metrics` carries waiting requests and KV cache use, nothing on LoRA, and
only on non-streaming responses. Forms written by vLLM 0.11.1 and later:

    TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0
    JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}}

Source: github.com/envoyproxy/envoy, api/xds/data/orca/v3/orca_load_report.proto, and vLLM's
entrypoints/openai/orca_metrics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from extproc.bounds import MAX_COUNT, whole

_KV_USAGE = "kv_cache_usage_perc"
_WAITING = "num_requests_waiting"


class _Report(msgspec.Struct):
    named_metrics: dict[str, float] = {}


_decoder = msgspec.json.Decoder(_Report)


def parse_orca(value: str) -> tuple[float, int] | None:
    """Return the KV cache's used part (0 to 1) and the number of waiting requests.

    Return None for anything without both: the header comes from a pod and is advice only.
    """
    form, _, rest = value.strip().partition(" ")
    if form == "JSON":
        return _read(_from_json(rest))
    if form == "TEXT":
        return _read(_from_text(rest))
    return None


def _from_json(text: str) -> Mapping[str, float]:
    try:
        return _decoder.decode(text).named_metrics
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}


def _from_text(text: str) -> Mapping[str, float]:
    metrics: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = pair.strip().partition("=")
        try:
            metrics[name.removeprefix("named_metrics.")] = float(number)
        except ValueError:
            continue
    return metrics


def _read(metrics: Mapping[str, float]) -> tuple[float, int] | None:
    kv_usage, waiting = metrics.get(_KV_USAGE), metrics.get(_WAITING)
    if kv_usage is None or waiting is None:
        return None
    if not (0 <= kv_usage <= 1 and waiting >= 0 and math.isfinite(waiting)):
        return None
    return kv_usage, whole(waiting, MAX_COUNT)
