from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from extproc.lab.loadtest.workloads import make, names, renamed
from extproc.lab.trials.suites import PlanError, find_suite, make_trial_parts, parse_suite
from extproc.lab.workload.requests import Arrival, Workload
from extproc.lab.workload.traces import RANK, read_trace
from tests.lab.lab import write_trace


def small(name: str, **changes: int | float | None) -> Workload:
    asked = {"rate_rps": 5.0, "num_requests": 200, "seed": 1, **changes}
    return make(name, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("num", [60, 500])
def test_a_name_gives_so_many_requests_at_that_rate(name: str, num: int) -> None:
    workload = small(name, num_requests=num)

    assert workload.name == name
    assert len(workload.arrivals) == num
    assert workload.rate_rps == pytest.approx(5.0)


@pytest.mark.parametrize("name", ["zipf", "arena", "drift", "slora-7b-a10g", "quick/zipf-60"])
def test_the_same_arguments_give_the_same_workload_and_another_seed_another(name: str) -> None:
    assert small(name) == small(name)
    assert small(name).arrivals != small(name, seed=2).arrivals


@pytest.mark.parametrize("name", ["zipf", "bursts", "slora-paper-13b-a100-80", "quick/zipf-60"])
def test_another_rate_moves_the_same_requests(name: str) -> None:
    slow, fast = small(name), small(name, rate_rps=10.0)

    assert [replace(a, at_s=0) for a in slow.arrivals] == [
        replace(a, at_s=0) for a in fast.arrivals
    ]


@pytest.mark.parametrize(
    ("row", "num_adapters", "rate_rps", "duration_s"),
    [
        ("7b-a10g", 200, 2, 300),
        ("7b-a100-80", 200, 10, 300),
        ("13b-a100-40", 200, 2, 300),
        ("13b-a100-80", 400, 6, 300),
        ("table-3", 100, 10, 120),
        ("clusters", 32, 2, 120),
    ],
)
def test_s_lora_s_tables_come_with_their_own_rate_number_and_adapters(
    row: str, num_adapters: int, rate_rps: float, duration_s: float
) -> None:
    workload = make(f"slora-{row}", rate_rps=None, num_requests=None, seed=1)

    assert len(workload.arrivals) == rate_rps * duration_s
    assert workload.rate_rps == pytest.approx(rate_rps)
    assert len(workload.adapters) == num_adapters


def test_a_scenario_is_what_the_laboratory_sends_with_its_flash_crowd() -> None:
    suite = parse_suite(find_suite("development").read_text(encoding="utf-8"))
    scenario = next(s for s in suite.scenarios if s.name == "flash-crowd")

    made = make("development/flash-crowd", rate_rps=40.0, num_requests=None, seed=3)

    _, expected, _ = make_trial_parts(suite, scenario, rate_rps=40.0, seed=3)
    assert made == replace(expected, name="development/flash-crowd")


def test_a_scenario_can_be_named_by_its_file_s_path() -> None:
    path = find_suite("quick")

    assert small(f"{path}/zipf-60").arrivals == small("quick/zipf-60").arrivals


def test_a_trace_is_read_cut_and_scaled(tmp_path: Path) -> None:
    path = write_trace(tmp_path, small("zipf"))

    whole = make(str(path), rate_rps=None, num_requests=None, seed=9)
    part = small(str(path), num_requests=50, rate_rps=20.0)
    assert whole == read_trace(path, ranks=(RANK,))
    assert [a.adapter for a in part.arrivals] == [a.adapter for a in whole.arrivals[:50]]
    assert part.rate_rps == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["zipf", "azure", "slora-clusters", "quick/zipf-60"])
def test_the_number_of_adapters_can_be_another(name: str) -> None:
    assert len(small(name, num_adapters=7).adapters) == 7


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("nothing", {}, "no workload 'nothing'"),
        ("nothing/at-all", {}, "suite nothing: no such file"),
        ("quick/at-all", {}, "no scenario at-all: zipf-60"),
        ("zipf", {"rate_rps": 0.0}, "not positive"),
        ("zipf", {"num_requests": 0}, "0 requests"),
        ("zipf", {"num_adapters": 0}, "0 adapters"),
        ("arena", {"num_adapters": 3}, "arena: the number of adapters"),
    ],
)
def test_an_impossible_workload_is_an_error_of_one_line(
    name: str, changes: dict[str, float], says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        small(name, **changes)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no requests"), ("hello", "no requests"), ('{"a": 1}\n[1, 2]', "not a trace")],
)
def test_a_file_that_is_not_a_trace_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)

    with pytest.raises(PlanError, match=says):
        small(str(path))


def test_a_trace_that_comes_at_once_has_no_rate_to_change(tmp_path: Path) -> None:
    path = write_trace(tmp_path, Workload("w", (Arrival(0.0, None, 1, 1),), {}))

    with pytest.raises(PlanError, match="at once"):
        small(str(path))


def test_adapters_take_listed_names_by_popularity() -> None:
    arrivals = tuple(
        Arrival(float(n), adapter, 10, 10)
        for n, adapter in enumerate(["rare", "hot", "hot", None, "hot", "warm", "warm"])
    )
    workload = Workload("w", arrivals, {"rare": 8, "hot": 16, "warm": 32, "never": 64})

    moved = renamed(workload, ["x", "y", "z"])

    assert [a.adapter for a in moved.arrivals] == ["z", "x", "x", None, "x", "y", "y"]
    assert moved.adapters == {"x": 16, "y": 32, "z": 8}
    assert [replace(a, adapter=None) for a in moved.arrivals] == [
        replace(a, adapter=None) for a in arrivals
    ]


def test_with_fewer_names_than_adapters_some_share_one() -> None:
    moved = renamed(small("zipf"), ["a", "b", "c"])

    assert set(moved.shares) == {"a", "b", "c"}
    assert set(moved.adapters) == {"a", "b", "c"}


def test_names_that_are_listed_stay() -> None:
    workload = small("zipf")

    assert renamed(workload, ["other", *sorted(workload.adapters, reverse=True)]) is workload


def test_an_empty_list_of_names_is_an_error() -> None:
    with pytest.raises(PlanError, match="lists nothing"):
        renamed(small("zipf"), [])
