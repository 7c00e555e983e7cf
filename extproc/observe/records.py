"""A decision as plain values.

The values fit the fields of `extproc.v1.Decision`: numbers are within their range, texts have a
UTF-8 form and a limited length.
"""

from __future__ import annotations

from typing import Any

from extproc.bounds import MAX_DURATION_S, between, plain, whole
from extproc.fleet.accounting import DecisionRecord
from extproc.types import EndpointView, Pick, Rejection

MAX_TEXT_CHARS = 1024
"""Of each text in a decision."""

_MAX_UINT32, _MAX_UINT64 = 2**32 - 1, 2**64 - 1


def describe_result(record: DecisionRecord) -> dict[str, Any]:
    """Return `{"pick": {...}}` or `{"rejection": {...}}`, with the field names of the .proto."""
    if isinstance(record.decision, Rejection):
        return {"rejection": _describe_rejection(record, record.decision)}
    return {"pick": _describe_pick(record.decision)}


def _describe_pick(pick: Pick) -> dict[str, Any]:
    request = pick.request
    return {
        "id": _text(pick.id),
        "request_id": _text(request.request_id),
        "model": _text(request.client_model),
        "adapter": None if request.adapter is None else _text(request.adapter),
        "path": _text(request.path),
        "body_bytes": whole(request.body_bytes, _MAX_UINT64),
        "endpoints": [_text(each) for each in pick.endpoints],
        "policy": _text(pick.policy),
        "reason": _text(pick.reason),
        "held_seconds": None if pick.held_s is None else between(pick.held_s, MAX_DURATION_S),
        "held_for": _text(pick.held_for),
        "served_model": _text(request.model) if request.written else "",
        "candidates": [_describe_candidate(each, request.adapter) for each in pick.candidates],
    }


def _describe_candidate(view: EndpointView, adapter: str | None) -> dict[str, Any]:
    return {
        "address": _text(view.address),
        "name": _text(view.name),
        "num_pending": whole(view.num_pending, _MAX_UINT32),
        "num_adapter_pending": (
            0 if adapter is None else whole(view.pending(adapter), _MAX_UINT32)
        ),
        "num_active_adapters": whole(view.num_active_adapters, _MAX_UINT32),
        "loaded": adapter is not None and view.has_loaded(adapter),
        "on_gpu": adapter is not None and adapter in view.gpu_adapters,
        "known": view.is_known,
        "kv_usage_ratio": between(view.kv_usage_ratio, 1.0),
    }


def _describe_rejection(record: DecisionRecord, rejection: Rejection) -> dict[str, Any]:
    retry_after_s = rejection.retry_after_s
    return {
        "status": whole(rejection.status, _MAX_UINT32),
        "reason": _text(rejection.reason),
        "message": _text(rejection.message),
        "model": _text(rejection.model),
        "retry_after_seconds": (
            None if retry_after_s is None else whole(retry_after_s, _MAX_UINT32)
        ),
        "request_id": _text(record.request_id),
        "path": _text(record.path),
        "why": _text(rejection.why),
    }


def _text(text: str) -> str:
    return plain(text, MAX_TEXT_CHARS)
