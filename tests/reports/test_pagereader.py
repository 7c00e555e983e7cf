from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.errors import ExpositionError
from extproc.reports import pagereader
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import MAX_LORA_SERIES, parse_report
from extproc.reports.pagereader import PageReader
from extproc.reports.textformat import Lines
from extproc.types import LoadReport
from tests.reports.test_exposition import GOLDEN

VLLM = PROFILES["vllm"]
LORA = "vllm:lora_requests_info"


def result(read: Callable[[bytes], LoadReport], page: bytes) -> LoadReport | str:
    try:
        return read(page)
    except ExpositionError as error:
        return str(error)


def check(pages: list[bytes]) -> None:
    """Pages of one server are read as each is by itself."""
    reader = PageReader(VLLM)
    for page in pages:
        assert result(reader.read, page) == result(lambda p: parse_report(p, VLLM), page)


@contextmanager
def pages_read_whole() -> Iterator[list[bytes]]:
    """The pages that are read as a whole within the block."""
    pages: list[bytes] = []

    def lines(page: bytes) -> Lines:
        pages.append(page)
        return Lines(page)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pagereader, "Lines", lines)
        yield pages


def series(name: object, value: object = "1", slots: object = 2) -> str:
    return f'{LORA}{{max_lora="{slots}",running_lora_adapters="{name}"}} {value}'


def page_of(*lines: str) -> bytes:
    return "\n".join([*lines, ""]).encode()


_VALUES = st.sampled_from(
    [
        *("0", "1", "2", "3.5", "2.0", "1e3", "1.5e+06", "7e8", "NaN", "+Inf", "-1", "1e999"),
        *("x", "1_0", "1-2", "5 1", "5 2", '5 # {a="b"} 1', '5 # {a="b"} 2', "5 }", "5 {} 1"),
    ]
)
_LABELS = ["", '{engine="0"}', '{engine="1"}', '{engine="0",rank="1"}', '{engine="0"']
_STARTS = st.sampled_from(
    [
        *(f"vllm:num_requests_running{labels}" for labels in _LABELS),
        *(f"vllm:num_requests_waiting{labels}" for labels in _LABELS[:2]),
        'vllm:num_requests_waiting_by_reason{reason="deferred"}',
        'vllm:num_requests_waiting_by_reason{reason="capacity"}',
        'vllm:engine_sleep_state{sleep_state="awake"}',
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:max_gpu_lora_adapters",
        "process_start_time_seconds",
        'vllm:lora_adapter_loaded{adapter_name="a",level="gpu"}',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"}',
        "# TYPE vllm:lora_adapter_loaded",
        "# a comment",
        "other",
        f"{LORA}_x",
        f"  {LORA}",
        f'{LORA} {{max_lora="2",waiting_lora_adapters="d"}}',
        f'{LORA}{{max_lora="2",running_lora_adapters="d}}',
        f'{LORA}{{max_lora="2",running_lora_adapters="#"}}',
        *(
            f'{LORA}{{max_lora="{n}",running_lora_adapters="{n}{a}"}}'
            for n in range(3)
            for a in "ab"
        ),
    ]
)
_LINE = st.tuples(_STARTS, _VALUES)


@st.composite
def _pages(draw: st.DrawFn) -> list[bytes]:
    """Pages of a server: on most, a few lines have other values, or there are more."""
    lines = draw(st.lists(_LINE, max_size=8))
    pages = []
    for _ in range(draw(st.integers(1, 5))):
        end = draw(st.sampled_from(["\n", "\n", "\n", "", "\n# EOF", "\n\0\n"]))
        pages.append(("\n".join(f"{start} {value}" for start, value in lines) + end).encode())
        for number in draw(
            st.sets(st.integers(0, len(lines) - 1), max_size=2) if lines else st.just(())
        ):
            lines[number] = lines[number][0], draw(_VALUES)
        at = draw(st.integers(0, len(lines)))
        lines[at:at] = draw(st.lists(_LINE, max_size=2) if draw(st.booleans()) else st.just([]))
    return pages


_RUNNING = "vllm:num_requests_running"
_UNREADABLE = f"{LORA}{{x}} 1"


@given(_pages())
@example([page_of(series("a"), "x 1"), page_of(series("a"), series("b", "2"), "x 1")])
@example([page_of(series("a"), "x 1"), page_of(series("a"), "x 1", "x 2")])
@example([page_of("x 5 1"), page_of("x 5 2")])
@example([page_of(f"{_RUNNING} {value}") for value in ("5 1", "5 2")])
@example([page_of(f"{_RUNNING} {value}") for value in ("1", "1-2")])
@example([page_of(f"{_RUNNING} {value}") for value in ("1", "1_0")])
@example([page_of(f"{_RUNNING} {value}") for value in ("1", "1e999")])
@example([page_of(f'{_RUNNING}{{a="b"}} 5 # {{a="b"}} {value}') for value in "12"])
@example([page_of("  x 1", f"{_RUNNING} {value}") for value in "12"])
@example([page_of("x 1", f"{_RUNNING} 1"), page_of("x 1", "vllm:num_requests_waiting 1")])
@example([page_of(f"{_RUNNING} 1", "x 1"), *(page_of("  x 1", f"{_RUNNING} {n}") for n in "12")])
@example(
    [
        page_of(series("a")),
        page_of("x 1", "y 1", "z 1", _UNREADABLE),
        page_of("x 1", series("a"), "y 1", "z 1", _UNREADABLE),
    ]
)
@example([page_of("x 1", "y 1"), page_of("x 1", f"{_RUNNING} 1")])
@example([page_of(series("a")), page_of(series("a", "0"))])
@example([page_of(series("a")), page_of(series("a"), series("b", "0"))])
@example([page_of(series("a")), page_of(series("a"), series("b", "1-2"))])
@example([page_of(series("a")), page_of(series("a"), series("b\0"))])
@example([page_of(series("a")), page_of(series("a"), _UNREADABLE)])
@example([page_of(series("a")), page_of(series("a"), f"{LORA}7 9")])
@example([page_of(series("a")), page_of(series("a"), series("b").replace("info{", "infx{"))])
@example([page_of("x 1", "x 2", _UNREADABLE), page_of(series("a"), "x 1", "x 2", _UNREADABLE)])
@example(
    [
        page_of(series("a"), f"{_RUNNING} 1"),
        page_of(series("a"), series("b"), f"{_RUNNING} 1"),
        page_of(series("a"), series("b", "3"), f"{_RUNNING} 2"),
    ]
)
@example(
    [
        page_of(series("a")),
        page_of(series("a"), series("b", '5 # {a="b"} 1')),
        page_of(series("a"), series("b", '5 # {a="b"} 2')),
    ]
)
def test_what_is_kept_of_the_pages_before_changes_nothing(pages: list[bytes]) -> None:
    check(pages)


_CHANGES = st.sampled_from(["0", "1", "2.0", "0.5", "1e3", "1.5e+06"])


@given(st.lists(st.lists(_CHANGES, min_size=9, max_size=9), min_size=2, max_size=4), st.data())
def test_values_that_change_and_further_adapters_are_read_alone(
    rows: list[list[str]], data: st.DataObject
) -> None:
    names = [
        *('vllm:num_requests_running{engine="0"}', 'vllm:num_requests_running{engine="1"}'),
        'vllm:num_requests_waiting{engine="0"}',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"}',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"}',
        *("vllm:kv_cache_usage_perc", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        "vllm:time_to_first_token_seconds_count",
    ]
    seen: list[str] = ["a"]
    numbers = count()
    pages = []
    for values in rows:
        at_s = [data.draw(st.sampled_from(["1.5", "2", "3"])) for _ in seen]
        lines = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        lines += [series(name, value) for name, value in zip(seen, at_s, strict=True)]
        pages.append(page_of(*lines, "other 1"))
        seen += [f"b{next(numbers)}" for _ in range(data.draw(st.integers(0, 2)))]
    reader = PageReader(VLLM)
    with pages_read_whole() as whole:
        reports = [reader.read(page) for page in pages]

    assert reports == [parse_report(page, VLLM) for page in pages]
    assert whole == pages[:1]


def test_the_real_page_is_read_once() -> None:
    reader = PageReader(VLLM)
    busy = GOLDEN.replace(
        b'vllm:num_requests_running{engine="0",model_name="base"} 0.0',
        b'vllm:num_requests_running{engine="0",model_name="base"} 3.0',
    )
    with pages_read_whole() as whole:
        reports = [reader.read(page) for page in (GOLDEN, busy, busy, GOLDEN)]

    assert reports == [parse_report(page, VLLM) for page in (GOLDEN, busy, busy, GOLDEN)]
    assert whole == [GOLDEN]


def test_a_page_that_is_none_is_refused_each_time_and_changes_nothing() -> None:
    check([page_of("x 1"), b"nonsense", b"nonsense", page_of("x 1"), page_of("x 2")])


def test_a_server_with_more_series_than_count_is_read_as_a_whole() -> None:
    some = [series(number, number) for number in range(1, MAX_LORA_SERIES + 1)]
    pages = [page_of(*some), page_of(*some, series("x", 5000)), page_of(*some, series("x", 5001))]
    reader = PageReader(VLLM)

    with pages_read_whole() as whole:
        reports = [reader.read(page) for page in pages]

    assert reports == [parse_report(page, VLLM) for page in pages]
    assert whole == pages[:2]  # the last has another value of a series that counts


def test_an_engine_without_adapters_in_its_metrics() -> None:
    reader = PageReader(PROFILES["sglang"])
    pages = [page_of("sglang:num_running_reqs 1", *more) for more in ([], ["x 1"], ["x 2"])]
    for page in pages:
        assert reader.read(page) == parse_report(page, PROFILES["sglang"])
