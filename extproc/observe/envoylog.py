"""Requests of an Envoy that has no router yet: its access log in JSON, as a router's decisions.

So a record of them has the columns of any other (`recording`). A log has no policy, no slots, and
pods only where a request went to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from extproc.gen.client.extproc.v1 import Candidate, Decision, Outcome, Pick, Rejection

STREAM = "text/event-stream"
FIELDS = (
    *("start_s", "model", "tenant", "pod", "status", "type"),
    *("prompt_bytes", "output_bytes", "first_byte_us", "duration_us"),
)
"""Of an entry. docs/what-if.md has what Envoy is to write there."""
COMPLETED, FAILED = "completed", "failed"
_OK = 200


def decisions_of(lines: Iterable[str], base_model: str = "") -> Iterator[Decision]:
    """Yield a decision for each line that is an entry, with its pick if the request has a body.

    Decisions have the numbers of the lines, so those that are no entries are missing decisions.

    Args:
        lines: Of the log.
        base_model: The model of requests without an adapter.
    """
    for number, text in enumerate(lines, start=1):
        try:
            entry = json.loads(text)
            yield _decision(number, {name: _of(entry, name) for name in FIELDS}, base_model)
        except (ValueError, TypeError, AttributeError, OverflowError):
            continue


def _of(entry: Any, name: str) -> str:
    """Return a field's text; "" where Envoy had nothing for it."""
    value = entry.get(name)
    return "" if value in (None, "-") else str(value)


def _decision(number: int, entry: Mapping[str, str], base_model: str) -> Decision:
    decision = Decision(
        sequence=number, time=datetime.fromtimestamp(float(entry["start_s"]), tz=UTC)
    )
    num_bytes, status = int(entry["prompt_bytes"]), int(entry["status"])
    model, pod = entry["model"], entry["pod"]
    if num_bytes and not pod:
        decision.rejection = Rejection(status=status, model=model)
    elif num_bytes:
        first_s = float(entry["first_byte_us"] or 0.0) / 1e6
        decision.pick = Pick(
            id=str(number),
            adapter=None if model in ("", base_model) else model,
            tenant=entry["tenant"],
            body_bytes=num_bytes,
            endpoints=[pod],
            candidates=[Candidate(address=pod)],
        )
        decision.outcome = Outcome(
            pick_id=str(number),
            outcome=COMPLETED if status == _OK else FAILED,
            status=status,
            ttft_seconds=first_s if first_s and entry["type"].startswith(STREAM) else None,
            duration_seconds=float(entry["duration_us"]) / 1e6,
            body_bytes=int(entry["output_bytes"]),
        )
    return decision
