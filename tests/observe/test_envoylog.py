"""A log of an Envoy without a router gives a record's columns; what is no entry is counted."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from extproc.observe.envoylog import FIELDS, decisions_of
from extproc.observe.recording import COLUMNS, Recording, RecordNames

ENTRY: dict[str, Any] = {
    "start_s": "1714557600.250000",
    "model": "sql",
    "tenant": "acme",
    "pod": "10.0.0.1:8000",
    "status": 200,
    "type": "text/event-stream; charset=utf-8",
    "prompt_bytes": 400,
    "output_bytes": 1600,
    "first_byte_us": 250000,
    "duration_us": 1_500_000,
}


def recorded(*lines: str, base_model: str = "") -> tuple[list[dict[str, str]], str]:
    """Return the rows of a log, and what is said of it."""
    recording = Recording(RecordNames(b"k" * 16, is_plain=True))
    decisions = decisions_of(lines, base_model)
    text = "".join(row for each in decisions for row in recording.lines(0, each))
    return list(csv.DictReader(text.splitlines(), COLUMNS)), recording.says()


def entry(**fields: object) -> str:
    return json.dumps(ENTRY | fields)


def test_an_entry_is_a_request_with_the_columns_of_any_record() -> None:
    (row,), _ = recorded(entry())

    assert ENTRY.keys() == set(FIELDS)
    assert row | {"tenant": ""} == {
        **dict.fromkeys(COLUMNS, ""),
        "arrival_s": "0.0",
        "adapter": "sql",
        "prompt_tokens": "100",
        "output_tokens": "10",
        "prompt_bytes": "400",
        "output_bytes": "1600",
        "router": "0",
        "pod": "10.0.0.1:8000",
        "ttft_s": "0.25",
        "duration_s": "1.5",
        "outcome": "completed",
        "status": "200",
    }
    assert row["tenant"] not in ("", "acme")


@pytest.mark.parametrize("nothing", [None, "-", ""])
def test_what_envoy_had_nothing_for_is_absent(nothing: object) -> None:
    (row,), _ = recorded(entry(model=nothing, tenant=nothing, first_byte_us=nothing))
    assert (row["adapter"], row["tenant"], row["ttft_s"]) == ("", "", "")


def test_a_response_that_is_no_stream_has_no_first_token() -> None:
    (row,), _ = recorded(entry(type="application/json", output_bytes=400))
    assert (row["ttft_s"], row["output_tokens"]) == ("", "100")


def test_the_base_model_is_no_adapter() -> None:
    rows, _ = recorded(entry(model="llama"), entry(), base_model="llama")
    assert [row["adapter"] for row in rows] == ["", "sql"]


def test_a_request_that_reached_no_pod_is_refused_and_its_model_hashed() -> None:
    (row,), _ = recorded(entry(pod=None, status=503))
    assert (row["outcome"], row["status"], row["pod"]) == ("refused", "503", "")
    assert row["adapter"] not in ("", "sql")


def test_a_failed_one_is_failed() -> None:
    (row,), _ = recorded(entry(status=500))
    assert row["outcome"] == "failed"


def test_requests_without_a_body_are_left_out_and_lines_that_are_no_entries_counted() -> None:
    bad = "{", "[]", "7", "{}", entry(start_s="now"), entry(duration_us=None), entry(start_s=1e300)
    rows, said = recorded(entry(), entry(prompt_bytes=0), *bad, entry())

    assert len(rows) == 2
    assert f"missing: {len(bad)} decisions" in said
