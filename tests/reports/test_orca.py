"""The load report in a response header."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_COUNT
from extproc.reports.orca import parse_orca

RATIOS = st.floats(min_value=0, max_value=1)
COUNTS = st.integers(min_value=0, max_value=10**6)


@given(RATIOS, COUNTS)
def test_json_as_vllm_writes_it(kv_usage: float, waiting: int) -> None:
    report = {
        "named_metrics": {
            "kv_cache_usage_perc": kv_usage,
            "num_requests_waiting": float(waiting),
        }
    }

    assert parse_orca(f"JSON {json.dumps(report)}") == (kv_usage, waiting)


@given(RATIOS, COUNTS)
def test_text_as_vllm_writes_it(kv_usage: float, waiting: int) -> None:
    value = (
        f"TEXT named_metrics.kv_cache_usage_perc={kv_usage}, "
        f"named_metrics.num_requests_waiting={float(waiting)}"
    )

    assert parse_orca(value) == (kv_usage, waiting)


def test_other_metrics_beside_the_two_are_passed_over() -> None:
    text = "TEXT cpu=oops, named_metrics.num_requests_waiting=3, kv_cache_usage_perc=0.5, x"
    body = {"cpu": [1], "named_metrics": {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 3}}

    assert parse_orca(text) == (0.5, 3)
    assert parse_orca("JSON " + json.dumps(body)) == (0.5, 3)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "TEXT",
        "JSON",
        "JSON {",
        "JSON []",
        'JSON {"named_metrics": {"kv_cache_usage_perc": "high", "num_requests_waiting": 3}}',
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.5}}',
        'JSON {"named_metrics": {}, "deep": ' + "[" * 50_000,
        "JSON \ud800",
        "BIN kv_cache_usage_perc=0.5, num_requests_waiting=3",
        "TEXT num_requests_waiting=3",
        "TEXT kv_cache_usage_perc=nan, num_requests_waiting=3",
        "TEXT kv_cache_usage_perc=1.5, num_requests_waiting=3",
        "TEXT kv_cache_usage_perc=-0.1, num_requests_waiting=3",
        "TEXT kv_cache_usage_perc=0.5, num_requests_waiting=-1",
        "TEXT kv_cache_usage_perc=0.5, num_requests_waiting=inf",
        "TEXT kv_cache_usage_perc=0.5, num_requests_waiting=nan",
    ],
)  # fmt: skip
def test_what_does_not_state_both_in_range_says_nothing(value: str) -> None:
    assert parse_orca(value) is None


@pytest.mark.parametrize("huge", ["1e308", "5e9"])
def test_more_requests_than_can_be_are_taken_up_to_the_bound(huge: str) -> None:
    text = f"TEXT kv_cache_usage_perc=0.5, num_requests_waiting={huge}"

    assert parse_orca(text) == (0.5, MAX_COUNT)


@given(st.sampled_from(["", "TEXT ", "JSON "]), st.text())
def test_no_header_raises(form: str, rest: str) -> None:
    parsed = parse_orca(form + rest)

    assert parsed is None or (0 <= parsed[0] <= 1 and parsed[1] >= 0)
