"""Benchmark Reports, by the very models that llm-d-benchmark publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llmd_benchmark_report import load_benchmark_report

from extproc.commands.twins import virtual_run
from extproc.loadtest.llmd import VERSION, as_benchmark_report, save_benchmark_reports
from extproc.loadtest.results import single_run
from tests.loadtest.loads import SLO, records, result, run, suite


def accepted(report: Mapping[str, Any]) -> dict[str, Any]:
    """What their model keeps of it: it forbids fields that it does not know, and checks units."""
    through_json = json.loads(json.dumps(report))
    kept: dict[str, Any] = load_benchmark_report(through_json).dump()
    return kept


def test_their_model_takes_a_run_and_loses_nothing() -> None:
    one = run("rule:founding")
    report = as_benchmark_report(one, result(one, suite=suite()))

    kept = accepted(report)

    assert kept["version"] == VERSION == "0.2.1"
    assert kept["run"]["uid"] == report["run"]["uid"]
    assert kept["results"] == json.loads(json.dumps(report["results"]))
    assert kept["scenario"]["load"]["native"] == report["scenario"]["load"]["native"]
    assert [part["metadata"]["label"] for part in kept["scenario"]["stack"]] == ["router", "pods"]


@pytest.mark.parametrize(
    ("field", "units", "value"),
    [
        ("time_to_first_token", "s", "ttft_s"),
        ("time_per_output_token", "s/token", "tpot_s"),
        ("inter_token_latency", "s/token", "gap_s"),
        ("request_latency", "s", "e2e_s"),
    ],
)
def test_latencies_are_in_their_fields_and_units(field: str, units: str, value: str) -> None:
    one = run("rule:founding")

    kept = accepted(as_benchmark_report(one, result(one)))

    statistics = kept["results"]["request_performance"]["aggregate"]["latency"][field]
    assert statistics.pop("units") == units
    assert statistics == msgspec.structs.asdict(getattr(one.summary, value))


def test_counts_and_rates_are_in_their_fields_and_units() -> None:
    one = run("rule:founding")

    aggregate = accepted(as_benchmark_report(one, result(one)))["results"]["request_performance"][
        "aggregate"
    ]

    requests, throughput = aggregate["requests"], aggregate["throughput"]
    assert (requests["total"], requests["failures"]) == (60, 3)
    assert requests["input_length"] == {"units": "count", "mean": 30}
    assert requests["output_length"] == {"units": "count", "mean": 5}
    assert throughput["request_rate"] == {
        "units": "queries/s",
        "mean": one.summary.throughput_rps,
    }
    assert throughput["output_token_rate"]["units"] == "tokens/s"


def test_adapters_are_where_the_schema_allows_keys_of_ones_own() -> None:
    one = run("rule:founding")

    own = accepted(as_benchmark_report(one, result(one)))["results"]["observability"]["extproc"]

    assert own["adapters"].keys() == one.summary.by_adapter.keys()
    assert own["tenants"]["tenant-0"]["num_requests"] == 20
    assert own["errors"] == {"http_503": 3}
    assert own["attainment"] == one.summary.attainment
    assert own["loads_per_1000"] == one.metrics.loads_per_1000
    assert own["generator"]["has_lagged"] is False


def test_an_endpoint_without_suite_or_pods_has_a_report() -> None:
    made = single_run(records(), name="x", target="url:http://h", slo=SLO, date="d")

    kept = accepted(as_benchmark_report(made.runs[0], made))

    assert "loads_per_1000" not in kept["results"]["observability"]["extproc"]
    assert kept["scenario"]["load"]["standardized"]["rate_qps"] == pytest.approx(20, rel=0.1)


def test_nothing_answered_is_a_report_without_latencies() -> None:
    made = single_run(
        [
            msgspec.structs.replace(r, error="connect", first_token_s=None, num_tokens=0, gaps_s=())
            for r in records(num=1)
        ],
        name="x",
        target="url:http://h",
        slo=SLO,
        date="d",
    )

    aggregate = accepted(as_benchmark_report(made.runs[0], made))["results"]["request_performance"][
        "aggregate"
    ]

    assert aggregate["latency"] == {}
    assert aggregate["throughput"] == {}


def test_a_virtual_run_says_that_it_is_simulated() -> None:
    small = suite()
    one = virtual_run(small, small.scenarios[0], "founding", rate_rps=20.0, seed=1)

    kept = accepted(as_benchmark_report(one, result(one, suite=small)))

    assert "simulated" in kept["run"]["keywords"]
    latency = kept["results"]["request_performance"]["aggregate"]["latency"]
    assert "inter_token_latency" not in latency


def test_every_real_run_gets_a_file_of_its_own(tmp_path: Path) -> None:
    one, other = run("rule:founding"), run("rule:round_robin")
    virtual = msgspec.structs.replace(one, kind="virtual")

    paths = save_benchmark_reports(result(one, virtual, other), tmp_path / "reports")

    reports = [accepted(json.loads(path.read_text())) for path in paths]
    assert [r["scenario"]["load"]["metadata"]["treatment"] for r in reports] == [
        "rule:founding",
        "rule:round_robin",
    ]
    assert len({r["run"]["uid"] for r in reports}) == 2
    assert len({r["run"]["eid"] for r in reports}) == 1
