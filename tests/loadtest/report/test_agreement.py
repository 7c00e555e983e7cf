"""Whether real runs come out in the order that virtual ones predict."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.loadtest.figures import FIGURES
from extproc.loadtest.report.agreement import Agreement, agreement, distance
from extproc.loadtest.results import Kind, RunResult
from tests.loadtest.loads import run

TTFT, LOADS = FIGURES["ttft_mean_s"], FIGURES["loads_per_1000"]
BASE = run("policy:a")


def made(target: str, kind: Kind, value: float, *, seed: int = 1) -> RunResult:
    metrics = replace(BASE.metrics, ttft_mean_s=value)
    return msgspec.structs.replace(BASE, target=target, kind=kind, seed=seed, metrics=metrics)


def both(real: dict[str, float], virtual: dict[str, float]) -> list[RunResult]:
    return [
        *(made(target, "real", value) for target, value in real.items()),
        *(made(target, "virtual", value) for target, value in virtual.items()),
    ]


def test_the_same_order_agrees() -> None:
    runs = both(
        {"policy:a": 1.1, "policy:b": 2.9, "policy:c": 5},
        {"policy:a": 1, "policy:b": 2, "policy:c": 9},
    )

    assert agreement(runs, TTFT) == Agreement(3)
    assert agreement(runs, TTFT).words == "yes"


def test_another_order_says_which_pair() -> None:
    runs = both({"policy:a": 3, "policy:b": 2.9}, {"policy:a": 1, "policy:b": 2})

    assert agreement(runs, TTFT) == Agreement(1, (("b", "a"),))
    assert agreement(runs, TTFT).words == "no: b is not above a"


def test_what_differs_by_less_than_a_tie_is_no_prediction() -> None:
    runs = both({"policy:a": 3, "policy:b": 2}, {"policy:a": 1, "policy:b": 1.015})

    assert agreement(runs, TTFT).words == "no difference predicted"


@pytest.mark.parametrize(("others", "num_pairs"), [((2, 2.1, 2.2), 1), ((0.5, 2, 4), 0)])
def test_a_difference_that_seeds_do_not_bear_out_is_no_prediction(
    others: tuple[float, ...], num_pairs: int
) -> None:
    runs = both({"policy:a": 1, "policy:b": 2}, {})
    for seed, value in enumerate(others):
        runs += [
            made("policy:a", "virtual", 1, seed=seed),
            made("policy:b", "virtual", value, seed=seed),
        ]

    assert agreement(runs, TTFT).num_pairs == num_pairs


def test_targets_without_a_twin_are_not_predicted() -> None:
    runs = both({"policy:a": 1, "envoy:round_robin": 2}, {"policy:a": 1})

    assert agreement(runs, TTFT) == Agreement(0)


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1))
def test_a_run_agrees_with_itself(values: dict[str, float]) -> None:
    runs = both(values, values)

    assert agreement(runs, TTFT).wrong == ()
    assert distance(runs, TTFT) == 0


def test_the_distance_is_from_the_same_requests() -> None:
    runs = [*both({"policy:a": 1.1, "policy:b": 3}, {"policy:a": 1, "policy:b": 2})]
    runs.append(made("policy:a", "virtual", 50, seed=2))

    assert distance(runs, TTFT) == pytest.approx(0.3)
    assert distance(both({"policy:a": 1}, {}), TTFT) is None


def test_an_unknown_figure_of_pods_is_none() -> None:
    unknown = msgspec.structs.replace(BASE, knows_pods=False)

    assert LOADS.of(unknown) is None
    assert FIGURES["attainment"].of(unknown) == BASE.metrics.attainment
