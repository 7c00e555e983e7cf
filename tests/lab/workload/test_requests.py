"""Workloads as values: order, checks, scaling."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.records import EngineRequest
from extproc.lab.workload.requests import Arrival, Workload

_RANKS = {"a": 8, "b": 64}


@st.composite
def _arrivals(draw: st.DrawFn) -> Arrival:
    return Arrival(
        draw(st.floats(0, 1e6)),
        draw(st.sampled_from([None, *_RANKS])),
        draw(st.integers(1, 10_000)),
        draw(st.integers(0, 10_000)),
        draw(st.text(max_size=3)),
        draw(st.text(max_size=3)),
        draw(st.integers(0, 1)),
    )


_WORKLOADS = st.builds(
    lambda name, arrivals: Workload(name, tuple(sorted(arrivals, key=lambda a: a.at_s)), _RANKS),
    st.text(max_size=5),
    st.lists(_arrivals(), max_size=20),
)


def _workload(*arrivals: Arrival) -> Workload:
    return Workload("w", arrivals, _RANKS)


@given(_WORKLOADS)
def test_another_process_gets_the_same_workload(workload: Workload) -> None:
    assert pickle.loads(pickle.dumps(workload)) == workload


@given(_WORKLOADS, st.floats(0.01, 100))
def test_scaling_the_rate_changes_nothing_but_times(workload: Workload, factor: float) -> None:
    scaled = workload.scaled(factor)

    assert [a.at_s for a in scaled.arrivals] == [a.at_s / factor for a in workload.arrivals]
    assert [(a.adapter, a.prompt_tokens) for a in scaled.arrivals] == [
        (a.adapter, a.prompt_tokens) for a in workload.arrivals
    ]


def test_rate_duration_and_shares_are_those_of_the_arrivals() -> None:
    workload = _workload(
        Arrival(0.0, "b", 1, 1), Arrival(1.0, "a", 1, 1), Arrival(1.0, "b", 1, 1),
        Arrival(2.0, None, 1, 1),
    )  # fmt: skip

    assert (workload.duration_s, workload.rate_rps) == (2.0, 2.0)
    assert list(workload.shares.items()) == [("b", 0.5), (None, 0.25), ("a", 0.25)]
    assert (_workload().duration_s, _workload().rate_rps, _workload().shares) == (0.0, 0.0, {})


def test_a_window_has_its_own_time() -> None:
    workload = _workload(*(Arrival(float(at_s), None, 1, 1) for at_s in range(5)))

    assert [a.at_s for a in workload.window(1.0, 3.0).arrivals] == [0.0, 1.0]


def test_an_engine_gets_everything_but_time_and_tenant() -> None:
    arrival = Arrival(1.0, "a", 30, 4, "tenant", "begin", 20)

    assert EngineRequest.of(arrival, "7") == EngineRequest("7", 30, 4, "a", "begin", 20)


@pytest.mark.parametrize(
    "arrivals",
    [
        (Arrival(1.0, None, 1, 1), Arrival(0.5, None, 1, 1)),
        (Arrival(0.0, "unknown", 1, 1),),
        (Arrival(-1.0, None, 1, 1),),
        (Arrival(0.0, None, 0, 1),),
        (Arrival(0.0, None, 1, -1),),
        (Arrival(0.0, None, 5, 1, prefix="p", prefix_tokens=6),),
        (Arrival(0.0, None, 5, 1, prefix="p", prefix_tokens=-1),),
    ],
)
def test_impossible_workloads_are_refused(arrivals: tuple[Arrival, ...]) -> None:
    with pytest.raises(ValueError, match="workload 'w'"):
        _workload(*arrivals)


def test_a_rate_factor_must_be_positive() -> None:
    with pytest.raises(ValueError, match="not positive"):
        _workload().scaled(0.0)
