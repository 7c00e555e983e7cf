"""A load test's summary: the laboratory's measures, and nothing lost between the groups."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.loadtest.measures import (
    BASE,
    NOBODY,
    GroupSummary,
    Percentiles,
    delay_words,
    error_words,
    fleet_result_of,
    summarize_records,
)
from extproc.lab.workload.exchange import RequestRecord, as_fleet_result
from extproc.lab.workload.judge import Slo, measure, percentile, satisfaction

SLO = Slo(ttft_s=0.5, tpot_s=0.05)
TIMES_S = st.floats(0.0, 30.0)
SHORT_S = st.floats(0.0, 2.0)


@st.composite
def records(draw: st.DrawFn, index: int) -> RequestRecord:
    at_s, delay_s, wait_s = draw(TIMES_S), draw(SHORT_S), draw(SHORT_S)
    error = draw(st.sampled_from(("", "", "", "http_503", "timeout", "cut", "connect")))
    num_tokens = 0 if error in ("http_503", "connect") else draw(st.integers(1, 9))
    first_s = at_s + delay_s + wait_s if num_tokens else None
    gaps_s = tuple(draw(st.lists(SHORT_S, max_size=3)))
    return RequestRecord(
        index=index,
        adapter=draw(st.sampled_from((None, "a", "b", "c"))),
        tenant=draw(st.sampled_from(("", "x", "y"))),
        at_s=at_s,
        sent_s=at_s + delay_s,
        ended_s=at_s + delay_s + wait_s + sum(gaps_s),
        first_token_s=first_s,
        gaps_s=gaps_s if num_tokens else (),
        num_tokens=num_tokens,
        wanted_tokens=9,
        prompt_tokens=draw(st.integers(1, 99)),
        status=503 if error == "http_503" else 200,
        error=error,
        served_by=draw(st.sampled_from(("", "pod-1", "pod-2"))) if num_tokens else "",
    )


@st.composite
def runs(draw: st.DrawFn) -> list[RequestRecord]:
    return [draw(records(index)) for index in range(draw(st.integers(1, 25)))]


def finished(index: int = 0, **changes: object) -> RequestRecord:
    record = RequestRecord(
        index=index,
        adapter="a",
        tenant="",
        at_s=float(index),
        sent_s=float(index),
        ended_s=index + 0.3,
        first_token_s=index + 0.1,
        gaps_s=(0.05,) * 4,
        num_tokens=5,
        wanted_tokens=5,
        prompt_tokens=7,
        status=200,
    )
    return msgspec.structs.replace(record, **changes)


@given(runs())
def test_groups_add_up_to_the_whole(run: list[RequestRecord]) -> None:
    whole = summarize_records(run, slo=SLO)

    for groups in (whole.by_adapter, whole.by_tenant):
        assert sum(group.num_requests for group in groups.values()) == whole.num_requests
        assert sum(group.num_met for group in groups.values()) == whole.num_met
        assert sum(group.num_errors for group in groups.values()) == sum(whole.errors.values())
        assert sum(group.output_tokens for group in groups.values()) == whole.output_tokens
        satisfied = sum(group.satisfaction * group.num_requests for group in groups.values())
        assert satisfied == pytest.approx(whole.satisfaction * whole.num_requests)
    assert whole.num_met == pytest.approx(whole.attainment * whole.num_requests)
    assert sum(whole.by_pod.values()) == sum(bool(record.served_by) for record in run)


@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_records_of_several_generators_does_not_matter(
    run: list[RequestRecord], rng: Random
) -> None:
    one = [record for record in run if rng.random() < 0.5]
    other = [record for record in run if record not in one]
    rng.shuffle(other)

    assert summarize_records(other + one, slo=SLO) == summarize_records(run, slo=SLO)


@given(runs())
def test_halves_hold_what_the_whole_holds(run: list[RequestRecord]) -> None:
    half = len(run) // 2
    parts = [summarize_records(part, slo=SLO) for part in (run[:half], run[half:]) if part]
    whole = summarize_records(run, slo=SLO)

    for name in ("num_requests", "num_met", "prompt_tokens", "output_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    for name in ("ttft_s", "e2e_s", "delay_s", "gap_s"):
        assert max(getattr(part, name).max for part in parts) == getattr(whole, name).max
    for kind, count in whole.errors.items():
        assert sum(part.errors.get(kind, 0) for part in parts) == count


@given(runs(), st.floats(0.0, 20.0))
def test_what_came_before_the_warm_up_is_as_if_it_had_not_been(
    run: list[RequestRecord], warm_up_s: float
) -> None:
    counted = [record for record in run if record.sent_s >= warm_up_s]
    if not counted:
        with pytest.raises(ValueError, match="no request came after the warm-up"):
            summarize_records(run, slo=SLO, warm_up_s=warm_up_s)
        return

    summary = summarize_records(run, slo=SLO, warm_up_s=warm_up_s)

    alone = summarize_records(counted, slo=SLO)
    # Requests of before may well finish after it.
    rates = dict.fromkeys(
        ("duration_s", "offered_rps", "throughput_rps", "output_tokens_per_s"), 0.0
    )
    assert msgspec.structs.replace(summary, **rates) == msgspec.structs.replace(alone, **rates)


@given(runs())
def test_measures_are_the_laboratorys(run: list[RequestRecord]) -> None:
    summary = summarize_records(run, slo=SLO)

    metrics = measure(fleet_result_of(run), SLO)
    assert summary.attainment == metrics.attainment
    assert summary.satisfaction == metrics.slora_satisfaction
    assert summary.ttft_s.p50 == metrics.ttft_p50_s
    assert summary.ttft_s.p99 == metrics.ttft_p99_s
    assert summary.tpot_s.p99 == metrics.tpot_p99_s


@given(runs())
def test_a_missing_response_is_a_miss_without_satisfaction(
    run: list[RequestRecord],
) -> None:
    summary = summarize_records(run, slo=SLO)

    assert summary.num_met <= sum(not record.error for record in run)
    ttfts_s = [record.ttft_s for record in run if record.ttft_s is not None]
    assert summary.satisfaction * len(run) <= sum(map(satisfaction, ttfts_s)) + 1e-9


@given(st.lists(TIMES_S, min_size=1))
def test_percentiles_are_values_that_were_measured(values: list[float]) -> None:
    result = Percentiles.of(values)

    assert [result.p50, result.p90, result.p95, result.p99, result.max] == [
        percentile(sorted(values), part) for part in (0.5, 0.9, 0.95, 0.99, 1.0)
    ]
    assert min(values) <= result.mean * (1 + 1e-12) + 1e-12


def test_figures_without_values_are_0() -> None:
    summary = summarize_records(
        [finished(first_token_s=None, gaps_s=(), num_tokens=0, error="connect")], slo=SLO
    )

    assert summary.ttft_s == summary.gap_s == summary.e2e_s == Percentiles()
    assert summary.offered_rps == summary.throughput_rps == 0.0


def test_a_run_by_hand() -> None:
    summary = summarize_records(
        [finished(0), finished(1, tenant="t"), finished(4, adapter=None, error="cut")], slo=SLO
    )

    assert (summary.num_requests, summary.num_met, summary.duration_s) == (3, 2, 4.0)
    assert summary.offered_rps == pytest.approx(3 / 4)
    assert summary.throughput_rps == pytest.approx(2 / 4)
    assert summary.output_tokens_per_s == pytest.approx(10 / 4)
    assert summary.errors == {"cut": 1}
    assert summary.tpot_s.mean == pytest.approx(0.05)
    assert summary.gap_s.p50 == 0.05
    assert summary.e2e_s.max == pytest.approx(0.3)
    assert list(summary.by_adapter) == ["a", BASE]
    assert {name: group.num_requests for name, group in summary.by_tenant.items()} == {
        NOBODY: 2,
        "t": 1,
    }
    assert summary.by_adapter["a"].attainment == 1


def test_an_answer_that_ends_early_is_measured_by_the_tokens_it_has() -> None:
    summary = summarize_records([finished(wanted_tokens=500)], slo=SLO)

    assert summary.tpot_s.mean == pytest.approx(0.05)


@pytest.mark.parametrize(("delay_s", "has_lagged"), [(0.004, False), (0.006, True)])
def test_a_lagging_generator_is_reported(delay_s: float, has_lagged: bool) -> None:
    run = [finished(n, sent_s=n + delay_s, first_token_s=n + 0.1) for n in range(3)]

    summary = summarize_records(run, slo=SLO)

    assert summary.has_lagged is has_lagged
    shown = delay_words(summary)
    assert ("THE GENERATOR LAGGED" in shown) is has_lagged
    assert f"{1e3 * delay_s:.1f} ms late" in shown


def test_errors_are_said_by_kind() -> None:
    run = [finished(0), finished(1, error="http_503"), finished(2, error="cut")]

    shown = error_words(summarize_records(run, slo=SLO))

    assert shown == "2 of 3 failed: 1 cut, 1 http_503"
    assert error_words(summarize_records([finished()], slo=SLO)) == "no errors"


def test_records_are_measured_as_with_their_workload() -> None:
    run = [finished(n, adapter="ab"[n % 2]) for n in range(5)]
    arrivals = [flight.arrival for flight in fleet_result_of(run).flights]

    assert as_fleet_result(arrivals, run).to_bytes() == fleet_result_of(run).to_bytes()


def test_summaries_go_through_json() -> None:
    summary = summarize_records([finished(0), finished(1)], slo=SLO)

    again = msgspec.json.decode(msgspec.json.encode(summary), type=type(summary))

    assert again == summary
    assert isinstance(again.by_adapter["a"], GroupSummary)
