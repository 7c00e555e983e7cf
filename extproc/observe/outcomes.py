"""How a pick ended, for those who read it: plain values, and a sentence.

A sentence gives the client's status, the times to the first token and to the end, the serving pod
and the attempts, as far as the access log has them.
"""

from __future__ import annotations

from typing import Any

from extproc.bounds import (
    MAX_ATTEMPTS,
    MAX_DURATION_S,
    MAX_RESPONSE_BYTES,
    MAX_STATUS,
    MAX_TOTAL_TOKENS,
    between,
    plain,
    whole,
)
from extproc.phrases import duration, short
from extproc.pods.columns import Candidates
from extproc.pods.completion import Completion, DecisionRecord, Ended, first_token_s
from extproc.types import EndpointView, Outcome, Pick

MAX_TEXT_CHARS = 1024
"""Of each text in a decision, and of its end."""


def describe_outcome(end: Ended, number: int) -> dict[str, Any]:
    """Return the fields of `extproc.v1.Outcome` by their names there; absent ones are None.

    `number` is that of this end since the start of the process.
    """
    entry, pick, request = end.completion, end.pick, end.pick.request
    known: dict[str, Any] = {
        "number": number,
        "pick_id": text_field(pick.id),
        "request_id": text_field(request.request_id),
        "model": text_field(request.client_model),
        "outcome": str(end.outcome),
        "status": None,
        "ttft_seconds": None,
        "duration_seconds": None,
        "served_by": "",
        "served_by_name": "",
        "attempts": 0,
        "body_bytes": 0,
        "output_tokens": None,
    }
    if entry is None:
        return known
    return known | {
        "status": whole(entry.status, MAX_STATUS) or None,
        "ttft_seconds": _bounded(first_token_s(entry, request.path)),
        "duration_seconds": _bounded(entry.duration_s),
        "served_by": text_field(entry.address),
        "served_by_name": _name(pick, entry.address),
        "attempts": whole(entry.attempts, MAX_ATTEMPTS),
        "body_bytes": whole(entry.body_bytes, MAX_RESPONSE_BYTES),
        "output_tokens": (
            None if end.output_tokens is None else between(end.output_tokens, MAX_TOTAL_TOKENS)
        ),
    }


def tell_outcome(record: DecisionRecord) -> str:
    """Say how a decision's pick ended, in a sentence; "" where that is not known, or nothing was
    picked."""
    end = record.end
    if end is None:
        return ""
    if end.completion is None:
        return _UNTIMED[end.outcome]
    return f"{_timed(end.pick, end.completion)}."


_UNTIMED = {
    Outcome.COMPLETED: "It was answered; only an access log shows how long that took.",
    Outcome.FAILED: "It failed; only an access log shows more.",
    Outcome.CANCELLED: "Its client left.",
    Outcome.UNKNOWN: "The end of its answer did not pass by: its pod broke off, or its client "
    "left. Only an access log tells which.",
    Outcome.EXPIRED: "Its end was not reported: its pod no longer has such a request, or the "
    "request is too old.",
}


def _timed(pick: Pick, entry: Completion) -> str:
    after = "" if entry.duration_s is None else f" after {duration(entry.duration_s)}"
    status = f" with status {entry.status}" if entry.status else ""
    if entry.outcome is Outcome.CANCELLED:
        said = f"Its client left{after}"
    elif entry.outcome is Outcome.FAILED:
        said = f"It failed{after}{status}"
    else:
        said = f"It ended{after}{status}"
    ttft_s = first_token_s(entry, pick.request.path)
    if ttft_s is not None:
        said += f", its first token after {duration(ttft_s)}"
    elif entry.first_byte_s is None:
        said += ", before the first byte of a response"
    if entry.address:
        name = _name(pick, entry.address)
        said += f"; served by {short(name) or entry.address}"
        if entry.address != pick.address:
            said += ", not the pod that was chosen"
    return f"{said}; {entry.attempts} attempts" if entry.attempts > 1 else said


def candidate(pick: Pick, address: str) -> EndpointView | None:
    """Return the candidate with an address: of many, only that one is looked at."""
    if isinstance(pick.candidates, Candidates):
        return pick.candidates.find(address)
    return next((view for view in pick.candidates if view.address == address), None)


def _name(pick: Pick, address: str) -> str:
    view = candidate(pick, address)
    return "" if view is None else text_field(view.name)


def _bounded(seconds: float | None) -> float | None:
    return None if seconds is None else between(seconds, MAX_DURATION_S)


def text_field(text: str) -> str:
    """Return a text as a field of a message has it."""
    return plain(text, MAX_TEXT_CHARS)
