"""Comparing targets: pairs, what counts, what is printed."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.lab.loadtest import compare
from extproc.lab.loadtest.compare import (
    Round,
    Watch,
    counted,
    fitted,
    mean_of,
    ratio_of,
)
from extproc.lab.loadtest.loads import Block
from extproc.lab.loadtest.results import FIGURES, RunResult
from extproc.lab.loadtest.runs import BlockRun
from extproc.lab.loadtest.screen import line_of, print_comparison, ratio_words, remarks
from extproc.lab.loadtest.targets import RunningTarget, TargetSpec
from extproc.lab.workload.intervals import Interval
from tests.lab.loadtest.builders import block, run

TTFT = FIGURES["ttft_mean_s"]
LOADS = FIGURES["loads_per_1000"]
SIX = [
    *("founding", "least_harm", "llmd-in-flight", "llmd-default"),
    "envoy's least_request",
    "url",
]


def shown(
    labels: list[str], rounds: list[Round], twins: Sequence[RunResult] = (), width: int = 120
) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_comparison(console, labels, rounds, twins)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=6))
def test_a_ratio_is_paired_by_block_and_turned_round_it_is_its_inverse(
    ttfts_s: list[tuple[float, float]],
) -> None:
    rounds: list[Round] = [[run("a", ttft_s=a), run("b", ttft_s=b)] for a, b in ttfts_s]

    ratio, back = ratio_of(rounds, "a", "b", TTFT), ratio_of(rounds, "b", "a", TTFT)

    assert ratio
    assert back
    assert ratio.mean == pytest.approx(1 / back.mean)
    low = min(a / b for a, b in ttfts_s)
    high = max(a / b for a, b in ttfts_s)
    assert low * (1 - 1e-6) <= ratio.mean <= high * (1 + 1e-6)


def test_what_all_blocks_have_in_common_cancels_out() -> None:
    """Blocks differ tenfold, targets by a tenth: pairing tells, means alone would not."""
    rounds: list[Round] = [
        [run("a", ttft_s=1.1 * ttft_s), run("b", ttft_s=ttft_s)] for ttft_s in (0.1, 0.3, 1.0)
    ]

    ratio = ratio_of(rounds, "a", "b", TTFT)

    assert ratio
    assert ratio.low
    assert ratio.low > 1.09


def test_a_block_in_which_the_generator_lagged_counts_for_no_target() -> None:
    rounds: list[Round] = [
        [run("a", ttft_s=0.1), run("b", ttft_s=0.1)],
        [run("a", ttft_s=0.1), run("b", ttft_s=9.0, delay_s=0.1)],
    ]

    ratio = ratio_of(rounds, "a", "b", TTFT)

    assert len(counted(rounds)) == 1
    assert ratio
    assert ratio.mean == pytest.approx(1)
    assert "not counted: made up at 1/s, seed 1: the generator lagged" in shown(["a", "b"], rounds)
    assert "DOES NOT COUNT" in line_of(rounds[1][1])


def test_targets_are_compared_on_the_blocks_that_both_got() -> None:
    gone = BlockRun("b", block(), trouble="b: envoy ended with status -9", is_gone=True)
    rounds: list[Round] = [
        [run("a", ttft_s=0.1), run("b", ttft_s=0.2)],
        [run("a", ttft_s=5.0), gone],
        [run("a", ttft_s=5.0)],
    ]

    ratio, mean = ratio_of(rounds, "a", "b", TTFT), mean_of(rounds, "a", TTFT)

    assert ratio
    assert ratio.mean == pytest.approx(0.5)
    assert mean
    assert mean.mean == pytest.approx((0.1 + 5 + 5) / 3)
    assert remarks(["a", "b"], rounds) == [
        "gone since made up at 1/s, seed 1: b: envoy ended with status -9"
    ]


def test_there_is_no_ratio_of_what_is_not_known_or_nothing() -> None:
    rounds: list[Round] = [[run("a", num_loads=3), run("b"), run("c", num_loads=0)]]

    assert mean_of(rounds, "a", LOADS) == Interval(750.0)
    assert mean_of(rounds, "b", LOADS) is None
    assert ratio_of(rounds, "a", "b", LOADS) is None
    assert ratio_of(rounds, "a", "c", LOADS) is None
    assert ratio_of(rounds, "a", "nobody", TTFT) is None


def test_figures_and_ratios_are_printed_with_their_units() -> None:
    rounds: list[Round] = [
        [run("founding", ttft_s=0.1, num_loads=1), run("other", ttft_s=0.2, num_loads=2)],
        [run("founding", ttft_s=0.11, num_loads=1), run("other", ttft_s=0.2, num_loads=2)],
    ]

    text = shown(["founding", "other"], rounds)

    assert "Means over 2 blocks" in text
    assert "TTFT mean, ms" in text
    assert "105.0" in text
    assert "served well" in text
    assert "0.52 (" in text


def test_figures_of_the_same_requests_in_virtual_time_are_in_brackets() -> None:
    twin, other = run("founding", ttft_s=0.2).result, run("other", ttft_s=0.3).result
    assert twin
    assert other

    text = shown(["founding", "third"], [[run("founding"), run("third")]], [twin, other])

    line = next(line for line in text.splitlines() if "TTFT p50" in line)
    assert line.split()[3:] == ["100.0", "(200.0)", "100.0"]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (None, "-"),
        (Interval(0.5), "0.50"),
        (Interval(0.5, 0.4, 0.6), "0.50 (0.40-0.60) *"),
        (Interval(1.5, 0.9, 2.4), "1.50 (0.90-2.40)  "),
        (Interval(1.5, 1.0, 2.4), "1.50 (1.00-2.40)  "),
    ],
)
def test_a_ratio_says_how_sure_it_is(ratio: Interval | None, words: str) -> None:
    assert ratio_words(ratio) == words


def test_a_target_that_never_came_to_anything_is_named() -> None:
    assert "b: nothing was measured" in shown(["a", "b"], [[run("a")]])


def test_a_machine_that_had_other_things_to_do_is_named() -> None:
    busy = run("a")
    busy = BlockRun("a", busy.block, busy.result, added_s=0.08)

    assert "took 80 ms from pod to client" in shown(["a"], [[busy]])


async def test_workloads_take_the_adapters_that_all_endpoints_list() -> None:
    pods = [await start_pod(PodConfig(adapters=names)) for names in (["x", "y"], ["y", "z"])]
    specs = [TargetSpec("url", pod.url, pod.name) for pod in pods]
    try:
        (fit,) = await fitted([block(adapters=("a", "b"))], specs, {})
        (same,) = await fitted([block()], [TargetSpec("policy", "founding", "founding")], {})
    finally:
        for pod in pods:
            await pod.stop()

    assert fit.workload.adapters == {"y": 8}
    assert same == block()


# --- turns --------------------------------------------------------------------------------------


class FakeFleet:
    """Targets without processes; `outcome` says what comes of the n-th run of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Callable[[str, int], str]) -> None:
        self.turns: list[str] = []
        self.starts: list[list[str]] = []
        self._outcome = outcome
        monkeypatch.setattr(compare, "running_targets", self._running)
        monkeypatch.setattr(compare, "run_block", self._run)

    @asynccontextmanager
    async def _running(
        self, specs: Sequence[TargetSpec], *_: object
    ) -> AsyncIterator[list[RunningTarget]]:
        self.starts.append([spec.label for spec in specs])
        yield [RunningTarget(spec, "http://nowhere") for spec in specs]

    async def _run(self, target: RunningTarget, block: Block, **_: object) -> BlockRun:
        number = self.turns.count(target.label)
        self.turns.append(target.label)
        match self._outcome(target.label, number):
            case "dies":
                return BlockRun(target.label, block, trouble="it died", is_gone=True)
            case "lags":
                return run(target.label, of=block, delay_s=0.1)
        return run(target.label, of=block)

    async def rounds(self, labels: str, blocks: Sequence[Block]) -> list[Round]:
        rounds: list[Round] = []
        specs = [TargetSpec("policy", label, label) for label in labels]
        await compare.run_rounds(specs, blocks, rounds, headers={}, watch=Watch())
        return rounds


async def test_targets_take_turns_and_who_begins_goes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet(monkeypatch, lambda *_: "ok")

    await fleet.rounds("abc", [block(), block(seed=2), block(seed=3)])

    assert "".join(fleet.turns) == "abcbcacab"
    assert fleet.starts == [["a", "b", "c"]]


async def test_another_fleet_is_started_for_other_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet(monkeypatch, lambda *_: "ok")

    await fleet.rounds("ab", [block(), block(adapters=("x",))])

    assert fleet.starts == [["a", "b"], ["a", "b"]]
    assert "".join(fleet.turns) == "abba"


async def test_who_is_gone_gets_no_more_turns_and_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet(monkeypatch, lambda label, n: "dies" if (label, n) == ("b", 1) else "ok")

    rounds = await fleet.rounds("ab", [block(), block(seed=2), block(seed=3), block(adapters="x")])

    assert "".join(fleet.turns) == "abbaaa"
    assert fleet.starts == [["a", "b"], ["a"]]
    assert [len(round_) for round_ in rounds] == [2, 2, 1, 1]


async def test_it_ends_when_no_target_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet(monkeypatch, lambda *_: "dies")

    rounds = await fleet.rounds("ab", [block(), block(seed=2)])

    assert "".join(fleet.turns) == "ab"
    assert len(rounds) == 1


async def test_a_block_in_which_the_generator_lagged_counts_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = FakeFleet(monkeypatch, lambda label, n: "lags" if (label, n) == ("a", 0) else "ok")

    rounds = await fleet.rounds("ab", [block(), block(seed=2)])

    assert "".join(fleet.turns) == "abba"
    assert counted(rounds) == rounds[1:]


def test_the_figures_of_six_targets_can_be_read_in_a_narrow_terminal() -> None:
    rounds: list[Round] = [[run(label, ttft_s=0.1 * n) for label in SIX] for n in (1, 2)]

    text = shown(SIX, rounds, width=80).partition("Paired ratios")[0]

    lines = text.splitlines()
    heads = [head for head in lines if any(label in head for label in SIX)]
    assert sum(len(re.split(r"  +", head.strip())) for head in heads) == len(SIX)
    for figure in FIGURES.values():
        assert sum(line.strip().startswith(figure.head) for line in lines) == len(heads)
    assert max(map(len, lines)) <= 80


def test_the_ratios_of_six_targets_can_be_read_in_a_narrow_terminal() -> None:
    labels = SIX
    rounds: list[Round] = [[run(label, ttft_s=0.1 * n) for label in labels] for n in (1, 2)]

    text = shown(labels, rounds, width=80).partition("Paired ratios")[2]

    lines = text.splitlines()
    heads = [f"{above} {line}" for above, line in pairwise(lines) if "/ " in line]
    for label, other in combinations(labels, 2):
        assert any(label in head and f"/ {other}" in head for head in heads)
    assert max(map(len, lines)) <= 80
    assert text.count("1.00 (1.00-1.00)") >= len([*combinations(labels, 2)])
