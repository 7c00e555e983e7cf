"""What the benchmark makes of raw measurements. Nothing is measured here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench import envoys, figures, processes, report, soak
from bench.empty_grpcio import KEY
from bench.holdrule import Hold
from bench.load import chat_body, parse_wrk
from bench.processes import BenchError, Memory
from bench.report import Results
from bench.run import CELLS, LARGE_BYTES, SMALL_BYTES
from extproc.core.engines import PROFILES
from extproc.core.exposition import parse_report
from extproc.core.protocol import DESTINATION_KEY
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from extproc.shell.vllm import decode_models

PODS = ("127.0.0.1:8001", "127.0.0.1:8002")

# --- figures ---------------------------------------------------------------------------------


def test_an_h2load_log_gives_start_status_and_duration() -> None:
    text = "1700000000000001\t200\t1500\n1700000000000002\t-1\t7\n1700000000000003\t503\t20\n"

    requests = figures.parse_h2load_log(text)

    assert requests == [
        figures.LoggedRequest(1700000000000001, 200, 1500),
        figures.LoggedRequest(1700000000000002, -1, 7),
        figures.LoggedRequest(1700000000000003, 503, 20),
    ]
    assert figures.count_statuses(requests) == {-1: 1, 200: 1, 503: 1}


def test_a_line_cut_off_at_the_end_of_the_log_is_left_out() -> None:
    assert len(figures.parse_h2load_log("1\t200\t5\n2\t20")) == 1


def test_more_columns_of_later_h2loads_are_ignored() -> None:
    assert figures.parse_h2load_log("1\t200\t5\tmore") == [figures.LoggedRequest(1, 200, 5)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    found = figures.percentile(values, percent)

    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-9


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        figures.percentile([], 50)


def test_the_idle_cost_is_taken_off_a_request() -> None:
    """3 s of CPU in 10 s of load, of which 10 % of a core would have been used anyway."""
    assert figures.net_us_per_request(3.0, 0.1, 10.0, 20_000) == pytest.approx(100.0)
    assert figures.net_us_per_request(3.0, 0.1, 10.0, 0) is None


def test_medians_are_taken_name_by_name_over_the_rounds_that_have_one() -> None:
    rounds: list[dict[str, float | None]] = [
        {"a": 1.0, "b": None},
        {"a": 9.0, "b": None},
        {"a": 2.0, "c": 5.0},
    ]

    assert figures.medians(rounds) == {"a": 2.0, "b": None, "c": 5.0}


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [(50.0, 200.0, 0.25), (None, 200.0, None), (50.0, None, None), (50.0, 0.0, None)],
)
def test_a_ratio_needs_both_and_something_to_divide_by(
    value: float | None, reference: float | None, expected: float | None
) -> None:
    assert figures.ratio(value, reference) == expected


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_the_slope_of_a_line_is_its_slope(slope: float, start: float) -> None:
    points = [(x, start + slope * x) for x in (0.0, 1.0, 2.5, 7.0)]

    assert figures.slope_per_s(points) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("points", [[], [(1.0, 5.0)], [(1.0, 5.0), (1.0, 6.0)]])
def test_there_is_no_slope_without_two_moments(points: list[tuple[float, float]]) -> None:
    assert figures.slope_per_s(points) == 0.0


def test_samples_of_a_metric_are_summed_over_its_labels_alone() -> None:
    page = '# TYPE x counter\nx{a="1 2"} 3.0\nx{a="3"} 4.0\nxy 100.0\nx_total 7.0\n'
    samples = figures.parse_counters(page)

    assert figures.total(samples, "x") == 7.0
    assert figures.total(samples, "xy") == 100.0


# --- /proc -----------------------------------------------------------------------------------


def test_cpu_time_is_read_behind_a_name_with_brackets_and_spaces() -> None:
    after_name = "S 1 2 3 4 5 6 7 8 9 10 150 50 0 0"

    assert processes.parse_cpu_s(f"42 (a) b) (c) {after_name}", ticks_per_s=100) == 2.0


def test_memory_is_read_in_bytes() -> None:
    status = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t1\n"

    assert processes.parse_memory(status) == Memory(1024 * 1024, 2048 * 1024)


def test_this_process_has_used_cpu_and_holds_memory() -> None:
    held = processes.memory(os.getpid())

    assert processes.cpu_s(os.getpid()) > 0
    assert 0 < held.now_bytes <= held.peak_bytes


def test_a_missing_load_generator_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(BenchError, match=r"wrk, h2load \(.*install wrk nghttp2-client\)"):
        processes.require("wrk", "h2load")


def test_free_ports_are_distinct() -> None:
    ports = processes.free_ports(20)

    assert len(set(ports)) == 20


# --- loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body_bytes", [SMALL_BYTES, LARGE_BYTES])
def test_a_body_has_the_length_that_was_asked_for(body_bytes: int) -> None:
    body = chat_body("adapter-07", body_bytes)

    assert len(body) == body_bytes
    assert json.loads(body)["model"] == "adapter-07"


def test_what_wrk_saw_is_found_among_what_it_prints() -> None:
    line = (
        'BENCH {"requests":300,"duration_us":1500000,"bad_statuses":2,"socket_errors":1,'
        '"p50_us":700,"p90_us":900,"p99_us":1900,"max_us":5000}'
    )

    result = parse_wrk(f"Running 1s test\n\n{line}\n")

    assert (result.num_requests, result.num_errors, result.p99_us) == (300, 3, 1900)
    assert result.requests_per_s == 200.0


def test_a_wrk_without_a_result_is_an_error() -> None:
    with pytest.raises(BenchError, match="no result"):
        parse_wrk("unable to connect")


def test_cells_have_names_of_their_own() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 6


# --- Envoy -----------------------------------------------------------------------------------


def test_the_pods_register_every_adapter() -> None:
    cards = decode_models(envoys.models_page(envoys.adapter_names(64)).encode())

    assert [card.id for card in cards if card.parent] == envoys.adapter_names(64)


def test_the_pods_metrics_are_what_the_picker_reads() -> None:
    page = envoys.metrics_page(["a", "b"], now_wall_s=1.7e9)

    report_read = parse_report(page.encode(), PROFILES["vllm"])

    assert [name for name, _ in report_read.adapter_log] == ["a", "b"]
    assert (report_read.max_loras, report_read.num_deferred) == (4, 0)


def _gateway(picker: str | None, **options: bool) -> dict[str, object]:
    is_ours = options.pop("is_ours", True)
    text = envoys.gateway_config(
        port=8080, admin_port=9901, pods=PODS, picker=picker, is_ours=is_ours, **options
    )
    found: dict[str, object] = yaml.safe_load(text)
    return found


def test_without_ext_proc_envoy_knows_the_pods_and_no_picker() -> None:
    text = yaml.safe_dump(_gateway(None, is_ours=False))

    assert "envoy.filters.http.ext_proc" not in text
    assert "cluster_name: picker" not in text
    assert all(f"port_value: {pod.rpartition(':')[2]}" in text for pod in PODS)


def test_the_empty_server_gets_neither_access_log_nor_health_checks() -> None:
    text = yaml.safe_dump(_gateway("127.0.0.1:9002", is_ours=False))

    assert "envoy.filters.http.ext_proc" in text
    assert "http_grpc" not in text
    assert "grpc_health_check" not in text


def test_our_picker_gets_both() -> None:
    text = yaml.safe_dump(_gateway("127.0.0.1:9002"))

    assert "http_grpc" in text
    assert "grpc_health_check" in text


def test_a_fresh_traceparent_is_as_long_as_a_real_one() -> None:
    text = yaml.safe_dump(_gateway("127.0.0.1:9002", has_traceparent=True))
    value = text.partition("key: traceparent\n")[2].partition("value: ")[2].splitlines()[0]
    microseconds = "1700000000123456"

    assert len(value.replace("%START_TIME(%s%6f)%", microseconds)) == 55


def test_the_empty_server_names_the_destination_as_we_do() -> None:
    assert KEY == DESTINATION_KEY


# --- report ----------------------------------------------------------------------------------


def _results() -> Results:
    def figures_of(cpu_us: float | None, p99_ms: float) -> dict[str, float | None]:
        return {"308B@300/server_us_per_request": cpu_us, "308B@300/p99_ms": p99_ms}

    variants = {
        "none": figures_of(None, 1.0),
        "empty": figures_of(200.0, 9.0),
        "wire": figures_of(50.0, 3.0),
    }
    return Results({"cpu": "Test CPU", "cores": 2}, {}, ["308B@300"], variants, [variants])


def test_ratios_are_to_the_empty_server_and_latencies_less_those_without_ext_proc() -> None:
    assert _results().ratios == {
        "wire": {"308B@300/server_us_per_request": 0.25, "308B@300/p99_ms": 0.25}
    }


def test_the_table_shows_figures_and_ratios() -> None:
    table = report.render(_results())

    assert "50 (0.25)" in table  # CPU
    assert "2.00 (0.25)" in table  # added p99
    assert "Test CPU" in table


def test_the_json_holds_the_ratios_beside_the_rounds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"

    report.write_json(_results(), path)

    written = json.loads(path.read_text())
    assert written["ratios"]["wire"]["308B@300/p99_ms"] == 0.25
    assert written["rounds"][0]["empty"]["308B@300/p99_ms"] == 9.0


def test_a_kept_result_gives_the_same_tables_again(tmp_path: Path) -> None:
    report.write_json(_results(), tmp_path / "results.json")

    assert report.render(report.read_json(tmp_path / "results.json")) == report.render(_results())


def test_tables_replace_what_stands_between_the_marks_alone() -> None:
    page = "before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n"

    new = report.replace_between_marks(page, "new")

    assert new == "before\n<!-- bench -->\nnew\n<!-- /bench -->\nafter\n"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="bench"):
        report.replace_between_marks("no marks", "new")


def test_the_page_on_performance_has_the_marks() -> None:
    page = Path(__file__).parents[1] / "docs" / "performance.md"

    assert "new" in report.replace_between_marks(page.read_text(encoding="utf-8"), "new")


# --- holding ---------------------------------------------------------------------------------


def test_the_holding_rule_waits_its_time_from_the_arrival_on_and_then_chooses() -> None:
    rule, rng = Hold(hold_s=15), Random(1)
    request = RequestInfo("adapter-00", arrived_at_s=100.0)
    views = (EndpointView(PODS[0], num_pending=2), EndpointView(PODS[1], num_pending=1))

    early = rule.choose(Snapshot(views, now=114.9), request, rng=rng)
    late = rule.choose(Snapshot(views, now=115.0), request, rng=rng)

    assert isinstance(early, Wait)
    assert early.until_s == 115.0
    assert isinstance(late, Choice)
    assert late.endpoints[0].address == PODS[1]


# --- soaking ---------------------------------------------------------------------------------

_PAGE = """
extproc_picks_total{policy="founding",reason="affinity"} 6.0
extproc_picks_total{policy="founding",reason="cold"} 4.0
extproc_completions_total{outcome="completed"} 8.0
extproc_completions_total{outcome="failed"} 0.0
extproc_completions_total{outcome="cancelled"} 2.0
extproc_completions_total{outcome="expired"} 0.0
extproc_picks_in_flight 0.0
extproc_streams_active 0.0
extproc_rejections_total{reason="saturated"} 0.0
extproc_completions_unmatched_total 0.0
extproc_wire_streams_total{end="answered"} 10.0
extproc_wire_streams_total{end="reset_by_peer"} 3.0
extproc_wire_streams_total{end="refused"} 0.0
extproc_wire_abuse_total{limit="rapid_reset"} 0.0
"""
_ENVOY = {
    "http.openai.ext_proc.streams_started": 11,
    "http.openai.ext_proc.streams_closed": 11,
}


def test_a_run_on_grpcio_has_no_counts_of_the_wire() -> None:
    sample = soak.read_sample(_PAGE, at_s=10.0, rss_bytes=1)
    none = dict.fromkeys(sample.wire, 0)

    assert soak.find_faults(replace(sample, wire=none), _ENVOY, 0) == []


def test_a_run_in_which_everything_adds_up_has_no_faults() -> None:
    sample = soak.read_sample(_PAGE, at_s=10.0, rss_bytes=1)

    assert (sample.picks, sample.completions["cancelled"]) == (10, 2)
    assert soak.find_faults(sample, _ENVOY, 0) == []


def _broken() -> Iterator[tuple[str, soak.Sample, dict[str, int], int]]:
    good = soak.read_sample(_PAGE, at_s=10.0, rss_bytes=1)
    completions = good.completions
    yield "still open", replace(good, in_flight=1), _ENVOY, 0
    yield "still open", replace(good, streams=1), _ENVOY, 0
    yield "11 picks, but 10 ended", replace(good, picks=11), _ENVOY, 0
    yield "8 picks failed", replace(good, completions={**completions, "failed": 8}), _ENVOY, 0
    yield "2 picks expired", replace(good, completions={**completions, "expired": 2}), _ENVOY, 0
    yield "1 rejections", replace(good, rejections=1), _ENVOY, 0
    yield "1 unmatched", replace(good, unmatched=1), _ENVOY, 0
    yield "closed 11", good, {**_ENVOY, "http.openai.ext_proc.streams_started": 12}, 0
    yield "10 picks from 0 streams", good, {}, 0
    yield "5 requests", good, _ENVOY, 5
    yield "ended here", replace(good, wire={"answered": 10}), _ENVOY, 0
    yield "1 streams refused", replace(good, wire={**good.wire, "refused": 1}), _ENVOY, 0
    yield "limit slow_reader passed 2", replace(good, abuse={"slow_reader": 2}), _ENVOY, 0


@pytest.mark.parametrize(("message", "sample", "envoy", "load_errors"), list(_broken()))
def test_what_does_not_add_up_is_named(
    message: str, sample: soak.Sample, envoy: dict[str, int], load_errors: int
) -> None:
    assert any(message in fault for fault in soak.find_faults(sample, envoy, load_errors))


def test_memory_that_grows_during_the_warm_up_alone_is_flat() -> None:
    first = soak.read_sample(_PAGE, at_s=0.0, rss_bytes=50_000_000)
    later = [replace(first, at_s=float(at_s), rss_bytes=80_000_000) for at_s in (10, 20, 30)]

    assert soak.rss_slope_kb_per_min([first, *later]) == pytest.approx(0.0)


def test_memory_that_grows_is_seen() -> None:
    first = soak.read_sample(_PAGE, at_s=0.0, rss_bytes=0)
    samples = [replace(first, at_s=t, rss_bytes=int(t * 1000)) for t in (0.0, 10.0, 20.0, 30.0)]

    assert soak.rss_slope_kb_per_min(samples) == pytest.approx(60.0)
