"""The file of a load test: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from extproc.lab.loadtest.measures import summarize_records
from extproc.lab.loadtest.results import (
    FIGURES,
    FORMAT,
    ResultError,
    describe_machine,
    load,
    real_run,
    save,
)
from extproc.lab.workload.flights import PodTotals
from tests.lab.loadtest.loads import SLO, records, result, run, suite


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    before = result(run("policy:founding"), run("url:http://127.0.0.1:1"), suite=suite())
    path = tmp_path / "folder" / "result.json"

    save(before, path)
    after = load(path)
    save(after, tmp_path / "again.json")

    assert [r.target for r in after.runs] == ["policy:founding", "url:http://127.0.0.1:1"]
    assert after.suite == before.suite
    assert after.runs[0].summary.errors == before.runs[0].summary.errors
    assert after.runs[0].metrics.ttft_p99_s == pytest.approx(
        before.runs[0].metrics.ttft_p99_s, rel=1e-4
    )
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_run_is_measured_by_both() -> None:
    one = run("policy:founding")

    assert one.summary == summarize_records(records(), slo=SLO)
    assert one.metrics.attainment == one.summary.attainment
    assert one.metrics.loads_per_1000 == pytest.approx(1000 * 8 / 60)
    assert one.knows_pods
    assert one.policy == "founding"


def test_a_pod_that_answered_without_being_known_counts_with_no_loads() -> None:
    pods = [PodTotals("pod-0", 6, 0)]

    one = real_run(records(), target="t", scenario="s", rate_rps=20.0, seed=1, slo=SLO, pods=pods)

    assert one.metrics.loads_per_1000 == pytest.approx(100)
    assert one.metrics.max_over_mean_load == pytest.approx(1, abs=0.2)


def test_adapter_loads_of_unknown_pods_are_unknown_and_not_none() -> None:
    unknown = msgspec.structs.replace(run("url:http://h"), knows_pods=False)

    assert FIGURES["loads_per_1000"].of(unknown) is None
    assert FIGURES["attainment"].of(unknown) == unknown.metrics.attainment


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a load test's result"),
        ("[]", "not a load test's result"),
        ("{}", f"its format is '', not '{FORMAT}'"),
        ('{"format": "extproc-lab-2"}', "its format is 'extproc-lab-2'"),
        (f'{{"format": "{FORMAT}", "name": 1}}', r"not a load test's result: .*name"),
    ],
)
def test_another_file_is_refused_with_a_reason(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)

    with pytest.raises(ResultError, match=says):
        load(path)


def test_a_machine_is_described_without_its_name() -> None:
    assert "Python 3." in describe_machine()
