"""Metrics: what is counted, and what the page says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.costs import Costs, Decode
from extproc.observe.telemetry import Telemetry
from extproc.routing.policies.rows import affinity_of
from extproc.types import (
    EndpointView,
    Outcome,
    Pick,
    Reason,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)
from tests.fleets import columns_of

WITH_A = EndpointView("10.0.0.1:80", gpu_adapters=("a",))
CACHED_A = EndpointView("10.0.0.2:80", cpu_adapters=("a",))
ACTIVE_A = EndpointView("10.0.0.3:80", pending_by_adapter={"a": 1})
BARE = EndpointView("10.0.0.4:80", gpu_adapters=("b",))
FULL = Rejection(429, Reason.SATURATED, "full")


def telemetry(*views: EndpointView, now: float = 0.0, max_adapter_labels: int = 200) -> Telemetry:
    return Telemetry(
        snapshot=lambda: Snapshot(views, now),
        version="1.2.3",
        max_adapter_labels=max_adapter_labels,
    )


def pick(
    chosen: EndpointView = WITH_A,
    *others: EndpointView,
    adapter: str | None = "a",
    reason: str = "affinity",
) -> Pick:
    request, views = RequestInfo(adapter or "base", adapter), (chosen, *others)
    columns = columns_of(views)
    holders = columns.holders(adapter or "")
    affinity = affinity_of(columns, range(len(views)), 0, adapter, holders)
    made = Pick("id", request, (chosen.address,), "founding", reason, views)
    return replace(made, affinity=affinity)


def sample(metrics: Telemetry, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"extproc_{name}", labels)


def test_picks_are_counted_by_policy_and_reason() -> None:
    metrics = telemetry()
    metrics.routed(pick(), None)
    metrics.routed(pick(reason="spill"), None)
    metrics.routed(pick(reason="spill"), None)

    assert sample(metrics, "picks_total", policy="founding", reason="affinity") == 1
    assert sample(metrics, "picks_total", policy="founding", reason="spill") == 2


def test_the_price_of_the_chosen_endpoint_is_counted_by_its_terms() -> None:
    metrics = telemetry()
    prices = {
        WITH_A.address: {"load": 0.0, "batch": 0.25, "odd": -1.0, "endless": math.inf},
        BARE.address: {"load": 9.0},
    }
    picked = replace(
        pick(WITH_A, BARE), terms=lambda snapshot, request, views: [prices[views[0].address]]
    )

    for each in (picked, picked, replace(picked, endpoints=(BARE.address,)), pick()):
        metrics.routed(each, None)

    text = generate_latest(metrics.registry).decode()
    assert [line for line in text.splitlines() if line.startswith("extproc_price_seconds_")] == [
        'extproc_price_seconds_total{policy="founding",term="batch"} 0.5',
        'extproc_price_seconds_total{policy="founding",term="load"} 9.0',
    ]


def test_terms_that_fail_leave_the_pick_counted() -> None:
    metrics = telemetry()

    with pytest.raises(ZeroDivisionError):
        metrics.routed(
            replace(pick(), terms=lambda snapshot, request, views: [{"load": 1 / 0}]), None
        )

    assert sample(metrics, "picks_total", policy="founding", reason="affinity") == 1
    assert sample(metrics, "affinity_total", result="hit") == 1


@pytest.mark.parametrize(
    ("picked", "result"),
    [
        (pick(WITH_A, BARE), "hit"),
        (pick(CACHED_A, WITH_A), "hit"),
        (pick(ACTIVE_A, BARE), "hit"),
        (pick(BARE, WITH_A), "spill"),
        (pick(BARE, ACTIVE_A), "spill"),
        (pick(BARE), "cold"),
        (pick(BARE, EndpointView("10.0.0.9:80")), "cold"),
    ],
)
def test_affinity_is_hit_spill_or_cold(picked: Pick, result: str) -> None:
    metrics = telemetry()
    metrics.routed(picked, None)
    counts = {
        each: sample(metrics, "affinity_total", result=each) for each in ("hit", "spill", "cold")
    }

    assert counts == {"hit": 0, "spill": 0, "cold": 0} | {result: 1}


def test_the_base_model_has_no_affinity_and_is_no_adapter() -> None:
    metrics = telemetry()
    metrics.routed(pick(adapter=None), None)

    assert sample(metrics, "affinity_total", result="cold") == 0
    assert sample(metrics, "picks_by_adapter_total", adapter="base") is None


def test_adapters_beyond_the_limit_share_a_label() -> None:
    metrics = telemetry(max_adapter_labels=2)
    for adapter in ("a", "b", "c", "d", "a", "c"):
        metrics.routed(pick(adapter=adapter), None)
    counts = {each: sample(metrics, "picks_by_adapter_total", adapter=each) for each in "abcd"}

    assert counts == {"a": 2, "b": 1, "c": None, "d": None}
    assert sample(metrics, "picks_by_adapter_total", adapter="other") == 3


def test_a_policy_that_invents_reasons_does_not_grow_the_page_for_ever() -> None:
    metrics = telemetry()
    for number in range(1000):
        metrics.routed(pick(reason=f"reason-{number}"), None)

    assert generate_latest(metrics.registry).count(b"extproc_picks_total{") <= 101


def test_rejections_are_counted_by_reason_and_absent_reasons_are_0() -> None:
    metrics = telemetry()
    metrics.rejections.add((FULL.reason,))

    assert sample(metrics, "rejections_total", reason="saturated") == 1
    assert {sample(metrics, "rejections_total", reason=each) for each in Reason} == {0, 1}


def test_decisions_are_timed() -> None:
    metrics = telemetry()
    metrics.routed(FULL, 3e-5)
    metrics.routed(FULL, 0.2)

    assert sample(metrics, "decision_seconds_count") == 2
    assert sample(metrics, "decision_seconds_sum") == pytest.approx(0.20003)
    assert sample(metrics, "decision_seconds_bucket", le="2e-05") == 0
    assert sample(metrics, "decision_seconds_bucket", le="5e-05") == 1
    assert sample(metrics, "decision_seconds_bucket", le="+Inf") == 2


@given(st.lists(st.floats(min_value=0, max_value=10) | st.sampled_from([1e-5, 0.1, 0.01])))
def test_histograms_agree_with_those_of_the_client_library(observed: list[float]) -> None:
    metrics = telemetry()
    bounds = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
    oracle = CollectorRegistry()
    histogram = Histogram("extproc_decision_seconds", "", buckets=bounds, registry=oracle)
    for seconds in observed:
        metrics.routed(FULL, seconds)
        histogram.observe(seconds)

    for bound in (*map(str, bounds), "+Inf"):
        name, labels = "extproc_decision_seconds_bucket", {"le": bound}
        assert metrics.registry.get_sample_value(name, labels) is not None
        assert metrics.registry.get_sample_value(name, labels) == oracle.get_sample_value(
            name, labels
        )


def test_completions_are_counted_by_outcome_with_their_lag() -> None:
    metrics = telemetry()
    metrics.completed(Outcome.COMPLETED, lag_s=0.03)
    metrics.completed(Outcome.EXPIRED)
    metrics.unmatched.add()
    metrics.expired.add((), 3)

    assert sample(metrics, "completions_total", outcome="completed") == 1
    assert sample(metrics, "completions_total", outcome="expired") == 1
    assert sample(metrics, "completions_total", outcome="failed") == 0
    assert sample(metrics, "access_log_lag_seconds_count") == 1
    assert sample(metrics, "completions_unmatched_total") == 1
    assert sample(metrics, "picks_expired_total") == 3


def test_troubles_are_counted() -> None:
    metrics = telemetry(WITH_A)
    metrics.scrape_s.observe(0.003)
    metrics.scrape_failures.add((WITH_A.address,))
    metrics.eds_refusals.add()
    metrics.full_answers.add()
    metrics.access_log_errors.add()

    assert sample(metrics, "scrape_seconds_count") == 1
    assert sample(metrics, "scrape_failures_total", endpoint=WITH_A.address) == 1
    assert sample(metrics, "eds_refusals_total") == 1
    assert sample(metrics, "full_answers_total") == 1
    assert sample(metrics, "access_log_errors_total") == 1


def test_endpoint_gauges_have_the_values_of_the_snapshot() -> None:
    view = EndpointView(
        "10.0.0.1:80",
        reported_at_s=100.0,
        pending_by_adapter={"a": 2, "b": 1, "c": 1},
        num_pending=5,
        num_in_flight=4,
        num_deferred=3,
        kv_usage_ratio=0.5,
        max_loras=2,
        costs=Costs(
            prompt_s_per_byte=1 / 80_000,
            cold_load_s=0.4,
            cached_load_s=0.02,
            decode=Decode(40, 0.025),
        ),
    )
    metrics = telemetry(view, now=100.25)
    expected = {
        "endpoint_ready": 1,
        "endpoint_known": 1,
        "endpoint_in_flight": 4,
        "endpoint_pending": 5,
        "endpoint_active_adapters_per_slot": 1.5,
        "endpoint_kv_usage_ratio": 0.5,
        "endpoint_report_age_seconds": 0.25,
        "requests_deferred": 3,
        "endpoint_prefill_tokens_per_second": pytest.approx(20_000),
        "endpoint_cold_load_seconds": 0.4,
        "endpoint_cached_load_seconds": 0.02,
        "endpoint_decode_seconds_per_token": 0.025,
    }

    assert {name: sample(metrics, name, endpoint=view.address) for name in expected} == expected


def test_unknown_gauges_of_an_endpoint_are_absent_and_not_0() -> None:
    view = EndpointView(
        "10.0.0.1:80", is_known=False, is_silent=True, is_ready=False, is_ejected=True
    )
    metrics = telemetry(view)

    assert sample(metrics, "endpoint_ejected", endpoint=view.address) == 1
    assert sample(metrics, "endpoint_unreachable", endpoint=view.address) == 0
    assert sample(metrics, "endpoint_known", endpoint=view.address) == 0
    assert sample(metrics, "endpoint_silent", endpoint=view.address) == 1
    assert sample(metrics, "endpoint_ready", endpoint=view.address) == 0
    assert sample(metrics, "endpoint_in_flight", endpoint=view.address) == 0
    for name in (
        "endpoint_active_adapters_per_slot",
        "endpoint_kv_usage_ratio",
        "endpoint_report_age_seconds",
        "requests_deferred",
    ):
        assert sample(metrics, name, endpoint=view.address) is None


def test_labels_of_endpoints_that_left_the_pool_disappear() -> None:
    views = [WITH_A, BARE]
    metrics = Telemetry(snapshot=lambda: Snapshot(tuple(views)), version="1")
    for view in views:
        metrics.scrape_failures.add((view.address,))
    views.remove(BARE)

    assert BARE.address.encode() not in generate_latest(metrics.registry)
    assert sample(metrics, "scrape_failures_total", endpoint=WITH_A.address) == 1


def test_gauges_of_others_are_read_at_each_scrape() -> None:
    metrics = telemetry()
    values = iter([1.0, 2.0])
    metrics.add_gauge("access_log_streams", "Open access log streams", lambda: next(values))

    assert [sample(metrics, "access_log_streams") for _ in range(2)] == [1.0, 2.0]


def test_version_and_process_are_on_the_page() -> None:
    metrics = telemetry()

    assert sample(metrics, "build_info", version="1.2.3") == 1
    assert b"process_cpu_seconds_total" in generate_latest(metrics.registry)


def test_the_page_is_well_formed_and_every_name_is_ours() -> None:
    metrics = telemetry(WITH_A, BARE)
    metrics.routed(pick(adapter='odd"name\\\n'), None)
    page = generate_latest(metrics.registry).decode()
    families = list(text_string_to_metric_families(page))
    names = [each.name for each in families]

    assert len(names) == len(set(names))
    assert all(name.startswith(("extproc_", "process_")) for name in names)
    assert all(each.documentation for each in families)
    assert not any(math.isnan(one.value) for each in families for one in each.samples)


def test_a_given_registry_is_used() -> None:
    registry = CollectorRegistry()
    metrics = Telemetry(snapshot=lambda: Snapshot(()), version="1", registry=registry)

    assert metrics.registry is registry
    assert registry.get_sample_value("extproc_picks_expired_total") == 0


def test_adapter_loads_are_those_that_the_pool_has_seen() -> None:
    metrics = telemetry(EndpointView("10.0.0.1:80", num_adapter_loads=3), BARE)

    assert sample(metrics, "adapter_loads_total", endpoint="10.0.0.1:80") == 3
    assert sample(metrics, "adapter_loads_total", endpoint=BARE.address) == 0


def test_counters_of_others_are_read_at_each_scrape() -> None:
    metrics = telemetry()
    counts = {"a": 1}
    metrics.add_counters("wire_abuse", "Limits passed", "limit", lambda: counts)
    counts["a"] = 5

    assert sample(metrics, "wire_abuse_total", limit="a") == 5


def test_labelled_gauges_of_others_are_read_at_each_scrape() -> None:
    metrics = telemetry()
    ages = {"10.0.0.1:80": 1.5}
    metrics.add_gauges("age_seconds", "Ages", "endpoint", lambda: ages)
    ages["10.0.0.1:80"] = 2.5

    assert sample(metrics, "age_seconds", endpoint="10.0.0.1:80") == 2.5


def test_a_request_that_is_routed_is_counted_with_its_pick_or_its_wait() -> None:
    metrics = telemetry()
    metrics.routed(pick(), 0.001)
    metrics.routed(Wait(until_s=1.0, reason="for-slot"), 0.001)
    labels = {"policy": "founding", "reason": "affinity"}

    assert sample(metrics, "picks_total", **labels) == 1
    assert sample(metrics, "decision_seconds_count") == 2


def test_totals_are_the_counts_so_far() -> None:
    metrics = telemetry()
    metrics.routed(FULL, 0.25)
    metrics.routed(FULL, 0.5)
    metrics.rejections.add((FULL.reason,))

    choices = metrics.decision_s
    assert (choices.count, choices.sum, metrics.rejections.total) == (2, 0.75, 1)


def test_only_picks_that_were_held_have_a_time_of_that() -> None:
    metrics = telemetry()
    for each in (pick(), replace(pick(), held_s=0.0), replace(pick(), held_s=0.3)):
        metrics.routed(each, None)

    assert sample(metrics, "held_seconds_count") == 2
    assert sample(metrics, "held_seconds_sum") == 0.3
    assert sample(metrics, "held_seconds_bucket", le="0.2") == 1


def test_a_page_is_of_one_moment_whatever_happens_while_it_is_made() -> None:
    views, picks = [WITH_A], [1.0]
    metrics = Telemetry(snapshot=lambda: Snapshot(tuple(views), 0.0), version="1")
    metrics.add_gauge("picks_in_flight", "Picks", lambda: picks[0])
    metrics.add_counters("ends", "Ends", "end", lambda: {"left": picks[0]})
    metrics.routed(pick(), None)
    before = list(metrics.collect())
    page = metrics.collect()
    first = next(page)
    metrics.routed(pick(), None)
    metrics.completed(Outcome.COMPLETED, lag_s=1.0)
    metrics.rejections.add((FULL.reason,))
    views[:], picks[0] = [BARE, CACHED_A], 2.0

    assert [first, *page] == before
    assert list(metrics.collect()) != before
