"""Recorded traces: the two of the repository, and files in their formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.lab.workload.requests import Workload
from extproc.lab.workload.traces import (
    Half,
    halved,
    labelled,
    lengths_of,
    read_trace,
    rescaled,
)
from tests.lab.workload.gaps import gap_cv

DATA = Path(__file__).parents[3] / "loadtest" / "data"


@pytest.fixture(scope="module")
def arena() -> Workload:
    return read_trace(DATA / "arena27.csv")


@pytest.fixture(scope="module")
def azure() -> Workload:
    return read_trace(DATA / "azure_conv_2023.csv")


def test_the_arena_trace_is_the_one_described(arena: Workload) -> None:
    assert (len(arena.arrivals), len(arena.adapters)) == (1500, 27)
    assert arena.duration_s == 600.0
    assert list(arena.shares.values())[:4] == pytest.approx([0.197, 0.175, 0.133, 0.08], abs=6e-4)
    assert [arena.adapters[f"arena-0{index}"] for index in range(5)] == [64, 32, 16, 8, 64]


def test_the_azure_trace_is_the_one_described(azure: Workload) -> None:
    """Of its 19,366 requests one is longer than 8,192 tokens."""
    assert len(azure.arrivals) == 19_365
    assert azure.rate_rps == pytest.approx(5.53, abs=0.005)
    assert gap_cv([a.at_s for a in azure.arrivals]) == pytest.approx(1.09, abs=0.01)
    assert azure.shares == {None: 1.0}
    assert len(azure.arrivals) == 19_365


def test_the_halves_share_no_request_and_lose_none(azure: Workload) -> None:
    first, second = (halved(azure, half) for half in Half)

    assert len(first.arrivals) + len(second.arrivals) == len(azure.arrivals)
    assert first.duration_s < azure.duration_s / 2
    assert second.arrivals[0].at_s >= 0
    assert (first.name, second.name) == (
        "azure_conv_2023-development",
        "azure_conv_2023-evaluation",
    )


def test_a_rescaled_trace_has_the_rate_asked_for_and_the_traces_shares(arena: Workload) -> None:
    workload = rescaled(arena, rate_rps=4, duration_s=300, seed=1)

    assert len(workload.arrivals) == 1200
    assert (workload.arrivals[0].at_s, workload.duration_s) == (0.0, 300.0)
    for adapter, share in arena.shares.items():
        assert workload.shares.get(adapter, 0.0) == pytest.approx(share, abs=0.02)


def test_sampling_repeats_no_request_within_a_pass(arena: Workload) -> None:
    """1,500 of 1,500 are all of them, with their times stretched."""
    workload = rescaled(arena, rate_rps=15, duration_s=100, seed=2)

    assert lengths_of(workload) == lengths_of(arena)
    assert [a.at_s for a in workload.arrivals] == pytest.approx(
        [a.at_s / 6 for a in arena.arrivals]
    )


def test_more_requests_than_there_are_come_in_passes(arena: Workload) -> None:
    workload = rescaled(arena, rate_rps=20, duration_s=1000, seed=3)
    counts = [len(workload.window(100.0 * i, 100.0 * (i + 1)).arrivals) for i in range(10)]

    assert len(workload.arrivals) == 20_000
    assert counts == pytest.approx([2000] * 10, rel=0.1)
    assert workload == rescaled(arena, rate_rps=20, duration_s=1000, seed=3)


def test_one_request_comes_at_the_beginning(arena: Workload) -> None:
    workload = rescaled(arena, rate_rps=1, duration_s=1, seed=4)

    assert [a.at_s for a in workload.arrivals] == [0.0]


def test_a_trace_without_adapters_gets_some_and_keeps_times_and_lengths(azure: Workload) -> None:
    workload = labelled(azure, shares={None: 0.25, "a": 0.75}, ranks={"a": 16}, seed=5)

    assert workload.shares["a"] == pytest.approx(0.75, abs=0.01)  # 3 standard deviations
    assert lengths_of(workload) == lengths_of(azure)


def test_azures_own_format_is_read_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "week.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.5000000,396,109\n"
        "2023-11-16 18:15:46.0000000,374,44\n"
        "2023-11-16 18:15:47.0000000,0,44\n"
        "2023-11-16 18:15:48.0000000,9000,1\n"
    )
    workload = read_trace(path)

    assert [(a.at_s, a.prompt_tokens, a.output_tokens) for a in workload.arrivals] == [
        (0.0, 374, 44),
        (4.5, 396, 109),
    ]
    assert workload.name == "week"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "arrival_s,prompt_tokens,output_tokens\n1,0,1\n",
        "arrival_s\nx\n",
        f"arrival_s\n{200_000 * '1'}\n",
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"bad.csv|could not convert|not CSV"):
        read_trace(path)


def test_nothing_cannot_be_rescaled(arena: Workload) -> None:
    with pytest.raises(ValueError, match="0 requests wanted"):
        rescaled(arena, rate_rps=0.1, duration_s=1, seed=1)
