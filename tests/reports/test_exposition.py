from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.bounds import MAX_COUNT, MAX_WALL_S
from extproc.errors import ExpositionError
from extproc.reports.engines import PROFILES, EngineMetrics
from extproc.reports.exposition import MAX_ADAPTERS, MAX_NAMES, MAX_SERIES, parse_report
from extproc.reports.textformat import MAX_LINE_BYTES, Lines
from extproc.types import LoadReport

GOLDEN = (Path(__file__).parents[1] / "golden" / "vllm-0.32-metrics.txt").read_bytes()
VLLM = PROFILES["vllm"]
SGLANG = PROFILES["sglang"]

START_S = 1.7952585e9


def info_line(running: str, waiting: str, at_s: float, slots: str = "4") -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{slots}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} {at_s!r}\n'
    )


def read(*lines: str, profile: EngineMetrics = VLLM) -> LoadReport:
    return parse_report("".join(lines).encode(), profile)


@pytest.mark.parametrize(
    ("values", "is_asleep"),
    [([], False), ([1.0], False), ([0.0], True), ([1.0, 0.0], True), ([1.0, 1.0], False)],
)
def test_a_server_sleeps_if_one_of_its_engines_does(values: list[float], is_asleep: bool) -> None:
    def line(engine: int, state: str, value: float) -> str:
        labels = f'engine="{engine}",model_name="base",sleep_state="{state}"'
        return f"vllm:engine_sleep_state{{{labels}}} {value}\n"

    lines = [line(engine, "awake", value) for engine, value in enumerate(values)]
    lines += [line(engine, "discard_all", 0.0) for engine, _ in enumerate(values)]

    assert read("vllm:num_requests_running 0\n", *lines).is_asleep is is_asleep


# --- the real page ------------------------------------------------------------------------------


def test_the_real_page_is_read_as_its_lines_say() -> None:
    report = parse_report(GOLDEN, VLLM)

    assert report == LoadReport(
        num_running=0,
        num_waiting=0,
        num_deferred=0,
        kv_usage_ratio=0.0,
        max_loras=2,
        active_adapters=frozenset(),
        adapter_log=(
            ("a1", 1.7952585587086234e9),
            ("a2", 1.7952585583948927e9),
            ("a0", 1.7952585575363722e9),
            ("a3", 1.7952585567302058e9),
        ),
        process_start_wall_s=1.79525852154e9,
        kv_cache_tokens=524_288,
        generated_tokens=1_493,
        work_tokens=1_541,
        num_first_tokens=24,
    )


def test_a_page_filtered_to_the_families_says_the_same_as_the_whole_page() -> None:
    lines = GOLDEN.decode().splitlines(keepends=True)
    wanted = [line for line in lines if any(family in line for family in VLLM.families)]

    assert parse_report("".join(wanted).encode(), VLLM) == parse_report(GOLDEN, VLLM)


# --- counts and ratios --------------------------------------------------------------------------


def test_counts_of_several_engines_add_up_and_their_cache_use_is_averaged() -> None:
    report = read(
        'vllm:num_requests_running{engine="0",model_name="m"} 3\n',
        'vllm:num_requests_running{engine="1",model_name="m"} 4\n',
        'vllm:num_requests_waiting{engine="0"} 1\n',
        'vllm:num_requests_waiting{engine="1"} 2\n',
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\n',
        'vllm:kv_cache_usage_perc{engine="1"} 0.6\n',
    )

    assert (report.num_running, report.num_waiting) == (7, 3)
    assert report.kv_usage_ratio == pytest.approx(0.4)


def test_ranks_of_one_engine_are_counted_once() -> None:
    report = read(
        'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 5\n',
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4\n',
        'sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 2\n',
        profile=SGLANG,
    )

    assert report.num_running == 7


def test_only_deferred_requests_count_as_deferred() -> None:
    report = read(
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9\n',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 5\n',
    )

    assert (report.num_deferred, report.num_waiting) == (5, 0)


def test_the_older_name_of_the_cache_gauge_is_read_where_the_newer_is_missing() -> None:
    assert read("vllm:gpu_cache_usage_perc 0.25\n").kv_usage_ratio == 0.25


def test_the_newer_name_of_the_cache_gauge_wins_where_both_are_there() -> None:
    report = read("vllm:gpu_cache_usage_perc 0.25\n", "vllm:kv_cache_usage_perc 0.5\n")

    assert report.kv_usage_ratio == 0.5


def test_cache_use_above_one_counts_as_full() -> None:
    assert read("vllm:kv_cache_usage_perc 1.02\n").kv_usage_ratio == 1.0


@pytest.mark.parametrize("absurd", ["NaN", "+Inf", "-Inf", "-1"])
def test_absurd_values_say_nothing(absurd: str) -> None:
    report = read(
        f"vllm:num_requests_running {absurd}\n",
        f"vllm:kv_cache_usage_perc {absurd}\n",
        f"process_start_time_seconds {absurd}\n",
        info_line("a", "a", 5.0).replace("5.0", absurd),
    )

    assert report == LoadReport(has_counts=False)


@pytest.mark.parametrize("huge", ["1e308", "5e9", "9" * 400])
def test_huge_values_are_taken_up_to_the_bound(huge: str) -> None:
    report = read(
        *(f'vllm:num_requests_running{{engine="{engine}"}} {huge}\n' for engine in "01"),
        *(f'vllm:num_requests_waiting{{engine="{engine}"}} 600000\n' for engine in "01"),
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} {huge}\n',
        *(f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {huge}\n' for engine in "01"),
        f"process_start_time_seconds {huge}\n",
        info_line("a", "", START_S, slots="9" * 400),
    )

    # A number that is infinite as a float is left out.
    is_number = float(huge) < math.inf
    assert report.num_running == (MAX_COUNT if is_number else 0)
    assert report.num_waiting == MAX_COUNT
    assert report.num_deferred == (MAX_COUNT if is_number else None)
    assert report.kv_usage_ratio == (1.0 if is_number else None)
    assert report.process_start_wall_s == (MAX_WALL_S if is_number else None)
    assert report.max_loras == MAX_COUNT


@pytest.mark.parametrize("slots", ["-5", "0", "-" + "9" * 50])
def test_slots_below_one_are_none(slots: str) -> None:
    assert read(info_line("a", "", START_S, slots=slots)).max_loras is None


def test_names_that_no_request_can_have_are_left_out() -> None:
    level = 'vllm:lora_adapter_loaded{{adapter_name="{}",level="gpu"}} 1\n'
    report = read(
        info_line(f"a,{'x' * 257}", "", START_S), level.format("b"), level.format("y" * 257)
    )

    assert report.active_adapters == {"a"}
    assert report.gpu_adapters == frozenset({"b"})


def test_of_a_label_with_many_names_the_first_are_taken() -> None:
    names = [f"a{number}" for number in range(20_000)]
    report = read(info_line("old", "", START_S - 1), info_line(",".join(names), "", START_S))

    assert report.active_adapters == set(names[:MAX_NAMES])
    assert len(report.adapter_log) == MAX_NAMES + 1
    assert not report.unreadable


def test_no_more_adapters_are_taken_than_a_server_can_have() -> None:
    def line(begin: int, at_s: float) -> str:
        return info_line(",".join(f"a{begin + number}" for number in range(1000)), "", at_s)

    report = read(*(line(1000 * number, START_S + number) for number in range(20)))

    assert report.active_adapters == {f"a{number}" for number in range(19_000, 20_000)}
    assert len(report.adapter_log) == MAX_ADAPTERS
    assert report.adapter_log[-1][1] == START_S + 15, "the newest of them"


def test_a_series_longer_than_any_engine_writes_is_left_out() -> None:
    longest = MAX_LINE_BYTES - len(info_line("", "", START_S)) + len("vllm:lora_requests_info")
    fits = read(info_line("a," + "x" * (longest - 2), "", START_S), info_line("b", "", 1.0))
    too_long = read(info_line("a," + "x" * longest, "", START_S), info_line("b", "", 1.0))

    assert fits.active_adapters == {"a"}
    assert not fits.unreadable
    assert too_long.active_adapters == {"b"}
    assert f"over {MAX_LINE_BYTES} bytes" in too_long.unreadable


def test_a_sum_of_more_series_than_any_server_has_engines_is_unknown() -> None:
    def page(num: int) -> LoadReport:
        lines = [f'vllm:num_requests_running{{engine="{each}"}} 1\n' for each in range(num)]
        return read(*lines, "vllm:num_requests_waiting 0\n")

    assert (page(MAX_SERIES).num_running, page(MAX_SERIES).has_counts) == (MAX_SERIES, True)
    assert (page(MAX_SERIES + 1).num_running, page(MAX_SERIES + 1).has_counts) == (0, False)


def test_a_page_of_binary_lines_or_of_lines_that_say_nothing_is_none() -> None:
    line = "vllm:num_requests_running 1\n"

    assert read("a\0b\n" * 63, line).num_running == 1
    with pytest.raises(ExpositionError, match="64 lines of binary data"):
        read("a\0b\n" * 64, line)
    assert read("{}\n" * 4095, line).num_running == 1
    with pytest.raises(ExpositionError, match="not a metrics page"):
        read("{}\n" * 4096, line)


def test_blanks_before_lines_are_left_out_of_pages_of_any_length() -> None:
    lines = [f"  other{number} 1\n" for number in range(5000)]

    assert read(*lines, "\t vllm:num_requests_running 3\n", *lines).num_running == 3
    assert read("\t vllm:num_requests_running 3\n").num_running == 3


def test_the_first_line_may_be_a_series_and_a_line_that_begins_as_its_name_does_is_none() -> None:
    line = "vllm:num_requests_running 3\n"

    assert read(line).num_running == 3
    assert read("vllm:num_requests_running_too 4\n", line).num_running == 3


def test_of_a_page_of_usual_lines_there_is_no_copy() -> None:
    page = b"# a comment\nvllm:num_requests_running 3\n"

    assert Lines(page).page is page


@pytest.mark.parametrize("num_bytes", [0, 2**18 - 30, 2**18 - 1, 2**18, 2**18 + 1, 10**6])
def test_a_family_is_found_wherever_it_stands(num_bytes: int) -> None:
    before = "# " + num_bytes * "x" + "\n"

    assert read(before, "vllm:num_requests_running 3\n").num_running == 3


def test_who_reads_a_long_page_may_rest_again_and_again() -> None:
    num_rests = 0

    def rest() -> None:
        nonlocal num_rests
        num_rests += 1

    lines = [info_line(f"a{number}", "", START_S + number) for number in range(10_000)]
    page = "".join(["vllm:num_requests_running 3\n", *lines]).encode()
    report = parse_report(page, VLLM, rest)

    assert report == parse_report(page, VLLM)
    assert num_rests > 10_000  # at each series, and where none is found


def test_no_more_adapters_of_a_level_are_taken() -> None:
    lines = [
        f'vllm:lora_adapter_loaded{{adapter_name="a{number}",level="cpu"}} 1\n'
        for number in range(MAX_ADAPTERS + 10)
    ]

    assert read(*lines).cpu_adapters == frozenset(f"a{n}" for n in range(MAX_ADAPTERS))


def test_a_page_of_an_engine_that_has_said_nothing_yet_is_an_empty_report() -> None:
    assert read("# HELP python_info x\n# TYPE python_info gauge\npython_info 1\n") == LoadReport()
    assert parse_report(b"", VLLM) == parse_report(b"\n\n", VLLM) == LoadReport()


def cache_info(engine: int, **labels: object) -> str:
    said = {"block_size": 16, "enable_prefix_caching": True, "engine": engine, **labels}
    pairs = ",".join(f'{name}="{value}"' for name, value in said.items())
    return f"vllm:cache_config_info{{{pairs}}} 1.0\n"


def test_the_kv_caches_of_all_engines_add_up() -> None:
    lines = cache_info(0, num_gpu_blocks=100), cache_info(1, num_gpu_blocks=50)
    assert read(*lines).kv_cache_tokens == 2400


@pytest.mark.parametrize("num_blocks", ["None", "-4", "0", "", "4e3"])
def test_a_kv_cache_of_no_known_size_is_unknown(num_blocks: str) -> None:
    assert read(cache_info(0, num_gpu_blocks=num_blocks)).kv_cache_tokens is None
    assert read(cache_info(0)).kv_cache_tokens is None


def test_a_kv_cache_without_prefix_caching_keeps_nothing() -> None:
    line = cache_info(0, num_gpu_blocks=100, enable_prefix_caching=False)
    assert read(line).kv_cache_tokens == 0


def test_sglang_has_its_own_names() -> None:
    report = read(
        'sglang:num_running_reqs{model_name="m"} 8.0\n',
        'sglang:num_queue_reqs{model_name="m"} 4.0\n',
        'sglang:token_usage{model_name="m"} 0.52\n',
        'sglang:lora_pool_slots_total{model_name="m"} 8.0\n',
        'vllm:num_requests_running{model_name="m"} 99\n',
        profile=SGLANG,
    )

    assert report == LoadReport(num_running=8, num_waiting=4, kv_usage_ratio=0.52, max_loras=8)


# --- adapters -----------------------------------------------------------------------------------


def test_the_newest_series_says_what_is_active_and_all_together_are_the_log() -> None:
    report = read(
        info_line("a,b", "a,b", START_S + 1),
        info_line("c", "c", START_S + 3),
        info_line("b", "b", START_S + 2),
    )

    assert report.active_adapters == {"c"}
    assert report.adapter_log == (("c", START_S + 3), ("b", START_S + 2), ("a", START_S + 1))
    assert report.max_loras == 4


def test_an_idle_engine_has_a_log_but_nothing_active() -> None:
    report = read(info_line("a", "a", START_S + 1), info_line("", "", START_S + 2))

    assert report.active_adapters == frozenset()
    assert report.adapter_log == (("a", START_S + 1),)


def test_running_and_waiting_adapters_are_both_active() -> None:
    """Versions up to 0.11.0 tell the two apart."""
    assert read(info_line("a,b", "c", START_S)).active_adapters == {"a", "b", "c"}


def test_equally_new_series_are_taken_together_and_the_log_orders_them_by_name() -> None:
    report = read(info_line("b", "", START_S), info_line("", "a", START_S))

    assert report.active_adapters == {"a", "b"}
    assert report.adapter_log == (("a", START_S), ("b", START_S))


def test_times_summed_over_processes_do_not_pass_for_the_newest() -> None:
    report = read(
        info_line("old", "old", 2 * START_S),
        info_line("new", "new", START_S),
    )

    assert report.active_adapters == {"new"}
    assert report.adapter_log == (("new", START_S),)


@pytest.mark.parametrize("slots", ["0", "", "many"])
def test_slots_that_the_page_does_not_say_are_unknown(slots: str) -> None:
    assert read(info_line("", "", START_S, slots)).max_loras is None


def test_slots_come_from_their_own_gauge_where_no_series_says_them() -> None:
    assert read('vllm:max_gpu_lora_adapters{engine="0"} 6\n').max_loras == 6


def test_blanks_and_empty_names_in_a_label_are_no_adapters() -> None:
    assert read(info_line("a, b,", ",", START_S)).active_adapters == {"a", "b"}


def test_escapes_in_a_label_are_undone() -> None:
    report = read(info_line(r"a\"b}\\n,c\nd", "", START_S))

    assert report.active_adapters == {'a"b}\\n', "c\nd"}


def test_an_adapter_that_is_named_like_a_metric_changes_nothing() -> None:
    name = r"x\nvllm:num_requests_running 7"
    report = read(info_line(name, "", START_S), "vllm:num_requests_running 2\n")

    assert report.num_running == 2


def test_only_the_newest_thousands_of_series_make_the_log() -> None:
    lines = [info_line(f"a{i}", f"a{i}", START_S + i) for i in range(3000)]

    log = read(*lines).adapter_log

    assert log[:2] == (("a2999", START_S + 2999), ("a2998", START_S + 2998))
    assert len(log) == 2048


# --- residency ----------------------------------------------------------------------------------


def test_residency_is_read_where_the_engine_says_it() -> None:
    report = read(
        'vllm:lora_adapter_loaded{adapter_name="a",engine="0",level="gpu"} 1\n',
        'vllm:lora_adapter_loaded{adapter_name="a",engine="0",level="cpu"} 1\n',
        'vllm:lora_adapter_loaded{adapter_name="b",engine="0",level="cpu"} 1\n',
        'vllm:lora_adapter_loaded{adapter_name="c",engine="0",level="gpu"} 0\n',
        'vllm:lora_adapter_loaded{adapter_name="d",engine="0",level="disk"} 1\n',
        'vllm:lora_adapter_loaded{engine="0",level="gpu"} 1\n',
    )

    assert report.gpu_adapters == frozenset("a")
    assert report.cpu_adapters == frozenset("ab")


def test_a_residency_family_without_series_says_that_nothing_is_loaded() -> None:
    report = read("# TYPE vllm:lora_adapter_loaded gauge\n")

    assert (report.gpu_adapters, report.cpu_adapters) == (frozenset(), frozenset())


def test_a_mere_mention_of_the_residency_family_says_nothing() -> None:
    report = read("# HELP x Replaced by vllm:lora_adapter_loaded.\n", "x 1\n")

    assert (report.gpu_adapters, report.cpu_adapters) == (None, None)


# --- the format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running 3\n",
        "vllm:num_requests_running\t3\r\n",
        " \tvllm:num_requests_running 3 \n",
        "vllm:num_requests_running 3 1795258552000\n",
        "vllm:num_requests_running{} 3\n",
        'vllm:num_requests_running { engine = "0" , } 3e0\n',
    ],
)
def test_blanks_timestamps_and_trailing_commas_are_part_of_the_format(line: str) -> None:
    assert read("# HELP x y\n", line).num_running == 3


def test_longer_names_and_comments_are_not_mistaken_for_the_metric() -> None:
    report = read(
        "# HELP vllm:num_requests_running about vllm:num_requests_running 5\n",
        "x_vllm:num_requests_running 6\n",
        "vllm:num_requests_running_total 7\n",
        "vllm:num_requests_running 1\n",
        "vllm:num_requests_running_max 8\n",
    )

    assert report.num_running == 1


@pytest.mark.parametrize(
    "page",
    [
        b"<!DOCTYPE html>\n<html></html>\n",
        b'{"detail":"Not Found"}\n',
        b"Not Found\n",
        b"upstream connect error or disconnect/reset before headers\n",
        b"\x00\x01\n",
        b"vllm:num_requests_running 1\x00\n",
        b"\x1f\x8b\x08gzip\n",
        b"vllm:num_requests_running 1",
        b"vllm:num_requests_running \n",
        b"vllm:num_requests_running one\n",
        b"vllm:num_requests_running 1_0\n",
        b"vllm:num_requests_running 1 2 3\n",
        b'vllm:num_requests_running{engine="0" 1\n',
        b'vllm:num_requests_running{engine="0"} \n',
        b'vllm:num_requests_running engine="0"} 1\n',
        b'vllm:num_requests_running{engine="0} 1\n',
        b"vllm:num_requests_running{engine=0} 1\n",
        b'vllm:num_requests_running{engine="\xff"} 1\n',
        b"x" * 5000 + b" 1\n",
    ],
)
def test_garbage_is_an_error(page: bytes) -> None:
    with pytest.raises(ExpositionError):
        parse_report(page, VLLM)


# --- lines that cannot be read ------------------------------------------------------------------

OPENMETRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="base",engine="0"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="base",engine="0"} 2 1795258552.5
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="b#}",engine="0"} 345 # {trace_id="abc"} 1.0 1795258552.5
vllm:generation_tokens_created{model_name="b#}",engine="0"} 1795258552.5
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total 55 # {} 1
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 8 # {} 0.5
vllm:time_to_first_token_seconds_count 9
vllm:time_to_first_token_seconds_sum 2.5
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{running_lora_adapters="sql",waiting_lora_adapters="chat",max_lora="4"} 9.25
# UNIT process_start_time_seconds seconds
process_start_time_seconds 7
"""


@pytest.mark.parametrize("end", ["# EOF\n", "# EOF", "# EOF \r", ""])
def test_openmetrics_is_read_with_exemplars_timestamps_and_any_end(end: str) -> None:
    assert read(OPENMETRICS, end) == LoadReport(
        num_running=3,
        num_waiting=2,
        max_loras=4,
        active_adapters=frozenset({"sql", "chat"}),
        adapter_log=(("chat", 9.25), ("sql", 9.25)),
        process_start_wall_s=7.0,
        generated_tokens=345,
        work_tokens=400,
        num_first_tokens=9,
    )


def test_a_page_that_is_cut_off_loses_its_last_line_and_knows_nothing_of_the_rest() -> None:
    report = read("vllm:num_requests_running 3\n", "vllm:kv_cache_usage_perc 0.5")

    assert (report.num_running, report.kv_usage_ratio) == (3, None)
    assert not report.has_counts  # those that wait may have been in the rest
    assert "incomplete" in report.unreadable


def test_binary_data_in_a_line_is_no_part_of_a_name() -> None:
    report = read("vllm:num_requests_running 3\n", info_line("a\0b", "", START_S))

    assert (report.num_running, report.active_adapters) == (3, frozenset())
    assert "binary" in report.unreadable


@pytest.mark.parametrize(
    "damaged",
    [
        'vllm:num_requests_running{engine="1"} 1_0\n',
        'vllm:num_requests_running{engine="1"} NaN\n',
        'vllm:num_requests_running{engine="1} 4\n',
        "vllm:num_requests_running{engine=1} 4\n",
        "vllm:num_requests_running \n",
        'vllm:num_requests_running{engine="#} 4\n',
    ],
)
def test_a_sum_of_which_a_part_cannot_be_read_is_unknown_not_lower(damaged: str) -> None:
    report = read(
        'vllm:num_requests_running{engine="0"} 3\n',
        damaged,
        'vllm:num_requests_running{engine="2"} 2\n',
        'vllm:num_requests_waiting{engine="0"} 7\n',
    )

    assert not report.has_counts
    assert (report.num_running, report.num_waiting) == (0, 7)


@pytest.mark.parametrize("damaged", ["", "#\n", "vllm:num_re\n"])
def test_a_line_of_a_group_may_be_anything(damaged: str) -> None:
    report = read(
        'vllm:num_requests_running{engine="0"} 3\n',
        damaged,
        'vllm:num_requests_running{engine="2"} 2\n',
    )

    assert report.num_running == 5


def test_a_kv_cache_of_which_a_part_cannot_be_read_is_unknown() -> None:
    lines = cache_info(0, num_gpu_blocks=100), "vllm:cache_config_info{block_size=16} 1\n"
    assert read(*lines).kv_cache_tokens is None


# What each line of this page says: the fields that may change if it is damaged.
FACTS: tuple[tuple[str, frozenset[str]], ...] = (
    ("# HELP vllm:num_requests_running x\n", frozenset()),
    *(
        (f'vllm:num_requests_running{{engine="{n}"}} {n + 3}\n', frozenset({"num_running"}))
        for n in range(3)
    ),
    ('vllm:num_requests_waiting{engine="0"} 2\n', frozenset({"num_waiting"})),
    ("# TYPE vllm:kv_cache_usage_perc gauge\n", frozenset()),
    ('vllm:kv_cache_usage_perc{engine="0"} 0.25\n', frozenset({"kv_usage_ratio"})),
    (
        'vllm:generation_tokens_total{engine="0"} 5 # {a="b"} 1\n',
        frozenset({"generated_tokens", "work_tokens"}),
    ),
    ("vllm:prompt_tokens_total 55\n", frozenset({"work_tokens"})),
    ("vllm:time_to_first_token_seconds_count 7\n", frozenset({"num_first_tokens"})),
    (
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1\n',
        frozenset({"num_deferred"}),
    ),
    *(
        (info_line(name, name, at_s), frozenset({"active_adapters", "adapter_log", "max_loras"}))
        for name, at_s in (("a", 5.0), ("b", 7.0), ("c", 6.0))
    ),
    ("# TYPE vllm:lora_adapter_loaded gauge\n", frozenset()),
    (
        'vllm:lora_adapter_loaded{adapter_name="a",level="gpu"} 1\n',
        frozenset({"gpu_adapters", "cpu_adapters"}),
    ),
    (
        'vllm:cache_config_info{num_gpu_blocks="100",block_size="16"} 1\n',
        frozenset({"kv_cache_tokens"}),
    ),
    ("process_start_time_seconds 7\n", frozenset({"process_start_wall_s"})),
)
WHOLE = read(*(line for line, _ in FACTS))
damages = st.one_of(
    st.binary(max_size=40).map(lambda damage: damage.replace(b"\n", b"")),
    st.sampled_from([b"", b"#", b"# {", b"NaN", b"}", b'"', b"\0", b"\xff", b" 1 2 3", b"\\"]),
)


def test_a_series_of_adapters_that_cannot_be_read_is_left_out() -> None:
    report = read(
        info_line("a", "", START_S), info_line("b", "", START_S + 1).replace('="b"', '="b')
    )

    assert (report.active_adapters, report.max_loras) == (frozenset("a"), 4)
    assert report.has_counts


@given(st.data())
def test_damage_to_one_line_changes_only_what_that_line_says(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(FACTS) - 1))
    line, facts = FACTS[at]
    raw = line.encode()[:-1]
    first = data.draw(st.integers(0, len(raw)))
    last = data.draw(st.integers(first, len(raw)))
    damaged = raw[:first] + data.draw(damages) + raw[last:] + b"\n"
    lines = [each.encode() for each, _ in FACTS]

    report = parse_report(b"".join([*lines[:at], damaged, *lines[at + 1 :]]), VLLM)

    changed = {f for f in LoadReport.__struct_fields__ if getattr(report, f) != getattr(WHOLE, f)}
    assert changed - {"has_counts", "unreadable"} <= facts
    assert report.has_counts or facts & {"num_running", "num_waiting"}


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    """No other exception than the documented one, whatever a server sends."""
    for text in (page, b"vllm:lora_requests_info" + page + b"\n"):
        try:
            report = parse_report(text, VLLM)
        except ExpositionError:
            continue
        assert report.num_running >= 0


# --- against another parser ---------------------------------------------------------------------

Sample = tuple[str, dict[str, str], float]


def escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write_page(samples: Iterable[Sample]) -> str:
    """The samples as a server writes them: one group per family."""
    groups: dict[str, list[str]] = {}
    for name, labels, value in samples:
        pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
        groups.setdefault(name, []).append(f"{name}{{{pairs}}} {value!r}\n")
    return "".join(
        f"# HELP {name} See vllm:num_requests_running.\n# TYPE {name} gauge\n{''.join(lines)}"
        for name, lines in groups.items()
    )


def oracle_samples(page: str) -> list[Sample]:
    return [
        (sample.name, sample.labels, float(sample.value))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]


def per_engine(samples: Sequence[Sample], name: str, **where: str) -> list[float] | None:
    """One value for each engine; None if any is absurd."""
    engines: dict[str, list[float]] = {}
    for family, labels, value in samples:
        if family == name and where.items() <= labels.items():
            engines.setdefault(labels.get("engine", ""), []).append(value)
    found = [max(values) for values in engines.values()]
    is_absurd = any(not 0 <= each < math.inf for values in engines.values() for each in values)
    return None if is_absurd else found


def oracle_report(page: str) -> LoadReport:
    """The same report by the official client's parser and plain set operations."""
    samples = oracle_samples(page)
    infos = [
        (
            value,
            {
                name.strip()
                for key in ("running_lora_adapters", "waiting_lora_adapters")
                for name in labels.get(key, "").split(",")
                if name.strip()
            },
            labels.get("max_lora", ""),
        )
        for family, labels, value in samples
        if family == "vllm:lora_requests_info" and 0 < value < 3e9
    ]
    newest = max((at_s for at_s, _, _ in infos), default=0)
    names = set[str]().union(*(adapters for _, adapters, _ in infos))
    last = {name: max(at for at, adapters, _ in infos if name in adapters) for name in names}
    running = per_engine(samples, "vllm:num_requests_running")
    waiting = per_engine(samples, "vllm:num_requests_waiting")
    kv = per_engine(samples, "vllm:kv_cache_usage_perc")
    deferred = per_engine(samples, "vllm:num_requests_waiting_by_reason", reason="deferred")
    starts = per_engine(samples, "process_start_time_seconds")
    tokens = per_engine(samples, "vllm:generation_tokens_total")
    prompts = per_engine(samples, "vllm:prompt_tokens_total")
    first = per_engine(samples, "vllm:time_to_first_token_seconds_count")
    caches = [
        int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        for family, labels, _ in samples
        if family == "vllm:cache_config_info"
    ]
    return LoadReport(
        num_running=int(sum(running or ())),
        num_waiting=int(sum(waiting or ())),
        has_counts=running is not None and waiting is not None,
        num_deferred=int(sum(deferred)) if deferred else None,
        kv_usage_ratio=min(1.0, sum(kv) / len(kv)) if kv else None,
        max_loras=max((int(slots) for _, _, slots in infos if slots.isdecimal()), default=0)
        or None,
        active_adapters=frozenset().union(*(who for at_s, who, _ in infos if at_s == newest)),
        adapter_log=tuple(sorted(last.items(), key=lambda item: (-item[1], item[0]))),
        process_start_wall_s=starts[0] if starts else None,
        kv_cache_tokens=sum(caches) or None,
        generated_tokens=int(sum(tokens)) if tokens else None,
        work_tokens=int(sum(tokens + prompts)) if tokens and prompts is not None else None,
        num_first_tokens=int(sum(first)) if first else None,
    )


adapter_names = st.text(st.sampled_from('ab1-_/. \\"n{}=é\n'), min_size=1, max_size=5)
adapter_lists = st.lists(adapter_names, max_size=4).map(",".join)
counts = st.one_of(st.integers(0, 500).map(float), st.just(math.nan), st.just(math.inf))
wall_times = st.one_of(
    st.floats(START_S, START_S + 100, allow_nan=False),
    st.integers(int(START_S), int(START_S) + 2).map(float),  # ties
    st.just(2 * START_S),
    st.just(math.nan),
)
engine_labels = st.fixed_dictionaries(
    {"engine": st.sampled_from("012"), "model_name": adapter_names}
)
gauges = st.tuples(
    st.sampled_from(
        [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:generation_tokens_total",
            "vllm:prompt_tokens_total",
            "vllm:time_to_first_token_seconds_count",
            "vllm:num_requests_running_total",
            "other:metric",
        ]
    ),
    engine_labels,
    counts,
)
by_reason = st.tuples(
    st.just("vllm:num_requests_waiting_by_reason"),
    st.fixed_dictionaries({"reason": st.sampled_from(["capacity", "deferred"])}),
    counts,
)
lora_infos = st.tuples(
    st.just("vllm:lora_requests_info"),
    st.fixed_dictionaries(
        {
            "max_lora": st.sampled_from(["0", "2", "4", ""]),
            "running_lora_adapters": adapter_lists,
            "waiting_lora_adapters": adapter_lists,
        }
    ),
    wall_times,
)
starts = st.tuples(
    st.just("process_start_time_seconds"), st.just(dict[str, str]()), st.just(START_S)
)
pages = st.lists(st.one_of(gauges, by_reason, lora_infos, starts), max_size=25).map(write_page)


@given(pages)
def test_agrees_with_the_official_parser_on_generated_pages(page: str) -> None:
    assert parse_report(page.encode(), VLLM) == oracle_report(page)


def test_agrees_with_the_official_parser_on_the_real_page() -> None:
    assert parse_report(GOLDEN, VLLM) == oracle_report(GOLDEN.decode())
