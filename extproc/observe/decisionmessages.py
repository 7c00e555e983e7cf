"""A decision as a message of `extproc.v1.Decisions`, and as plain values of the same shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from extproc.gen import decisions_pb2
from extproc.observe.explanation import describe_result, explain
from extproc.observe.outcomes import describe_outcome, tell_outcome, text_field
from extproc.pods.completion import DecisionRecord


def describe(sequence: int, record: DecisionRecord) -> dict[str, Any]:
    """Return one decision as plain values, in the shape of `extproc.v1.Decision`.

    `{"sequence", "time" (RFC 3339), "decision_seconds", "explanation", "pick": {...} or
    "rejection": {...}, "outcome": {...}, "shadow": {...}}`, with the fields of
    protos/extproc/v1/decisions.proto by their names there; absent ones are None, as the outcome is
    of what has not ended.
    """
    return {
        "sequence": sequence,
        "time": time_text(record.wall_s),
        "decision_seconds": record.seconds,
        "explanation": _explanation(record, ends=True),
        **describe_result(record),
        "outcome": _outcome(record),
        "shadow": _shadow(record),
    }


def encode(
    sequence: int,
    record: DecisionRecord,
    *,
    explains: bool = False,
    ends: bool = True,
    last_outcome: int = 0,
    all_candidates: bool = True,
) -> bytes:
    """Return one decision as an encoded `extproc.v1.Decision`, in words where it `explains`.

    With `ends` it has its outcome, if that is known. Without `all_candidates` a pick has the chosen
    one alone.
    """
    return decisions_pb2.Decision(
        sequence=sequence,
        last_outcome=last_outcome,
        time=_utc(record.wall_s),
        decision_seconds=record.seconds,
        explanation=_explanation(record, ends=ends) if explains else "",
        outcome=_outcome(record) if ends else None,
        shadow=_shadow(record),
        **describe_result(record, all_candidates=all_candidates),
    ).SerializeToString()


def encode_end(record: DecisionRecord, *, explains: bool = False) -> bytes:
    """Return the news of how a pick ended as an encoded `extproc.v1.Decision`."""
    return decisions_pb2.Decision(
        last_outcome=record.end_number,
        time=_utc(record.end_wall_s),
        explanation=tell_outcome(record) if explains else "",
        outcome=_outcome(record),
        shadow=_shadow(record),
    ).SerializeToString()


def _outcome(record: DecisionRecord) -> dict[str, Any] | None:
    return None if record.end is None else describe_outcome(record.end, record.end_number)


def _shadow(record: DecisionRecord) -> dict[str, Any] | None:
    found = record.shadowed
    if found is None:
        return None
    return {
        "policy": found.policy,
        "result": found.result,
        "endpoint": found.address,
        "endpoint_name": text_field(found.name),
        "error": found.error,
        "harm_seconds": found.harm_s,
        "choose_seconds": found.seconds,
        "num_asked": found.num_asked,
        "num_agreed": found.num_agreed,
    }


def _explanation(record: DecisionRecord, *, ends: bool) -> str:
    how = tell_outcome(record) if ends else ""
    return f"{explain(record.decision)} {how}" if how else explain(record.decision)


def time_text(wall_s: float) -> str:
    """Return a time by RFC 3339, in UTC."""
    return _utc(wall_s).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _utc(wall_s: float) -> datetime:
    return datetime.fromtimestamp(wall_s, UTC)
