"""The file of a load test: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.loadtest.results import (
    FIGURES,
    FORMAT,
    Percentiles,
    ResultError,
    RunResult,
    describe_machine,
    load,
    real_run,
    save,
)
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.judge import percentile
from extproc.lab.workload.running import PodTotals
from tests.lab.loadtest.builders import record
from tests.lab.loadtest.loads import SLO, records, result, run, suite


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    before = result(run("policy:founding"), run("url:http://127.0.0.1:1"), suite=suite())
    path = tmp_path / "folder" / "result.json"

    save(before, path)
    after = load(path)
    save(after, tmp_path / "again.json")

    assert [r.target for r in after.runs] == ["policy:founding", "url:http://127.0.0.1:1"]
    assert after.suite == before.suite
    assert after.runs[0].errors == before.runs[0].errors
    assert after.runs[0].metrics.ttft_p99_s == pytest.approx(
        before.runs[0].metrics.ttft_p99_s, rel=1e-4
    )
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def measured(records: list[RequestRecord], warm_up_s: float = 0.0) -> RunResult:
    """A run of these requests, whatever else they belong to."""
    return real_run(
        records, target="t", scenario="s", rate_rps=1.0, seed=1, slo=SLO, warm_up_s=warm_up_s
    )


def test_a_run_is_measured() -> None:
    one = run("policy:founding")

    assert one.metrics.num_offered == 60
    assert one.errors == {"http_503": 3}
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


# --- requests -----------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False))
def test_the_order_of_records_of_several_generators_does_not_matter(rng: Random) -> None:
    shuffled = records()
    rng.shuffle(shuffled)

    assert measured(shuffled) == measured(records())


def test_what_came_before_the_warm_up_is_as_if_it_had_not_been() -> None:
    early = [record(n, float(n), error="cut", delay_s=0.1) for n in range(4)]
    late = [record(n, float(n)) for n in range(4, 9)]

    both, alone = measured([*early, *late], warm_up_s=4), measured(late, warm_up_s=4)

    assert both == alone
    assert (both.errors, both.has_lagged, both.metrics.num_offered) == ({}, False, 5)
    with pytest.raises(ValueError, match="no request came after the warm-up"):
        measured(early, warm_up_s=4)


def test_the_warm_up_ends_by_plan_also_where_the_generator_lags() -> None:
    late = [record(n, float(n), delay_s=1.5) for n in range(6)]

    assert measured(late, warm_up_s=4).metrics.num_offered == 2


@given(st.lists(st.floats(0.0, 30.0), min_size=1))
def test_percentiles_are_values_that_were_measured(values: list[float]) -> None:
    ordered = sorted(values)

    assert Percentiles.of(values) == Percentiles(
        percentile(ordered, 0.5), percentile(ordered, 0.99)
    )
    assert Percentiles.of([]) == Percentiles()


@pytest.mark.parametrize(("delay_s", "has_lagged"), [(0.004, False), (0.006, True)])
def test_a_lagging_generator_is_reported(delay_s: float, has_lagged: bool) -> None:
    one = measured([record(n, float(n), delay_s=delay_s) for n in range(3)])

    assert one.has_lagged is has_lagged
    assert f"THE GENERATOR LAGGED: the median request was sent {1e3 * delay_s:.1f} ms late" in (
        one.delay_words
    )


def test_errors_are_said_by_kind() -> None:
    failed = [record(1, 1.0, error="http_503"), record(2, 2.0, error="cut")]

    assert measured([record(0, 0.0), *failed]).error_words == "2 of 3 failed: 1 cut, 1 http_503"
    assert not measured([record(0, 0.0)]).error_words
