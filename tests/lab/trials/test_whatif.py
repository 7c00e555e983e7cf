"""What-if answers: a model that tells what happened is asked, and any other promises nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from extproc.lab.engine.profiles import H100_8B, EngineProfile
from extproc.lab.trials.whatif import (
    QUANTILES,
    WARM_UP,
    PredictedTime,
    add,
    advice,
    compare_times,
    missing_s,
    simulate,
    without_times,
)
from extproc.lab.workload.recorded import Record
from tests.lab.trials.virtualrecord import FOUNDING, SETTINGS, made_record


@pytest.fixture(scope="module")
def record() -> Record:
    return made_record()


def test_the_model_that_made_a_record_tells_it(record: Record) -> None:
    compared = compare_times(record, simulate(record, SETTINGS, FOUNDING))

    assert {each.what for each in compared} == {"TTFT", "time per token"}
    assert [each.of for each in compared[: len(QUANTILES)]] == ["p50", "p90", "p99"]
    assert len(compared) > 2 * len(QUANTILES)  # adapters, too
    assert [each.error for each in compared] == [0.0] * len(compared)
    assert advice(compared) == ""


WRONG_STEPS = replace(H100_8B, step_s=2 * H100_8B.step_s)
WRONG_LOADS = replace(H100_8B, disk_load_s=20 * H100_8B.disk_load_s)


@pytest.mark.parametrize(
    ("profile", "added_s"), [(WRONG_STEPS, 0.0), (WRONG_LOADS, 0.0), (H100_8B, 0.05)]
)
def test_a_model_that_is_wrong_promises_nothing(
    record: Record, profile: EngineProfile, added_s: float
) -> None:
    wrong = replace(SETTINGS, profile=profile)
    compared = compare_times(record, add(simulate(record, wrong, FOUNDING), added_s))
    assert "promises nothing" in advice(compared)


@pytest.mark.parametrize(
    ("off", "words"),
    [
        ([("TTFT", "p50"), ("time per token", "p90")], "the steps"),
        ([("TTFT", "p50"), ("TTFT", "p99")], "prompts"),
        ([("TTFT", "p99")], "loads of adapters"),
    ],
)
def test_it_says_what_to_calibrate(off: list[tuple[str, str]], words: str) -> None:
    assert words in advice([PredictedTime(what, of, 1.0, 1.3, 1.0, 1.0) for what, of in off])


@pytest.mark.parametrize(
    ("recorded_s", "predicted_s", "is_off"),
    [(1.0, 1.25, False), (1.0, 1.26, True), (1.0, 0.74, True), (1.0, inf, True), (0.0, 1.0, True)],
)
def test_a_time_is_off_where_it_differs_by_more_than_a_quarter(
    recorded_s: float, predicted_s: float, is_off: bool
) -> None:
    assert (
        PredictedTime("TTFT", "p50", recorded_s, predicted_s, recorded_s, recorded_s).is_off
        == is_off
    )


def test_a_median_of_few_requests_may_differ_by_chance(record: Record) -> None:
    result = simulate(record, SETTINGS, FOUNDING)
    adapters = [each for each in compare_times(record, result) if " of " in each.of]

    assert all(each.low_s <= each.recorded_s <= each.high_s for each in adapters)
    assert any(each.low_s < each.high_s for each in adapters)
    (first, *_) = adapters
    assert not replace(first, predicted_s=1.2 * first.high_s).is_off
    assert replace(first, predicted_s=1.3 * first.high_s).is_off


def test_what_a_model_cannot_be_judged_by_is_said(record: Record) -> None:
    blind = replace(record, requests=tuple(replace(e, ttft_s=None) for e in record.requests))
    nameless = replace(record, requests=tuple(replace(e, policy="") for e in record.requests))

    assert "no times" in without_times(blind)
    assert "which policy" in without_times(nameless)
    assert without_times(record) == ""
    assert missing_s(blind, simulate(blind, SETTINGS, FOUNDING)) == 0.0
    assert {e.what for e in compare_times(blind, simulate(blind, SETTINGS, FOUNDING))} == {
        "time per token"
    }


def test_what_a_model_lacks_is_seen_by_the_fast_requests(record: Record) -> None:
    later = [replace(e, ttft_s=(e.ttft_s or 0.0) + 0.02) for e in record.requests]
    slow = replace(record, requests=tuple(later))
    result = simulate(slow, SETTINGS, FOUNDING)

    assert missing_s(slow, result) == pytest.approx(0.02)
    assert missing_s(record, add(simulate(record, SETTINGS, FOUNDING), 1.0)) == 0.0
    completed = compare_times(slow, add(simulate(slow, SETTINGS, FOUNDING), 0.02))
    assert all(abs(each.error) < 1e-9 for each in completed if each.what == "TTFT")


def test_the_warm_up_does_not_count(record: Record) -> None:
    result = simulate(record, SETTINGS, FOUNDING)
    early = [
        replace(each, ttft_s=9.0)
        if each.arrival.at_s < WARM_UP * record.requests[-1].arrival.at_s
        else each
        for each in record.requests
    ]
    assert early != list(record.requests)
    assert advice(compare_times(replace(record, requests=tuple(early)), result)) == ""
