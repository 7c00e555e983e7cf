"""A profile is fitted to a record: it has the costs that made it, or is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from extproc.lab.calibration.fromrecord import MIN_SAMPLES, fit_record
from extproc.lab.engine.profiles import A100_8B, H100_8B, EngineProfile
from extproc.lab.trials.whatif import Case, simulate
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.recorded import RecordedRequest
from tests.lab.trials.virtualrecord import SETTINGS, made_record

BATCH = {"num_decoding": 3, "kv_tokens": 600, "num_adapters": 2}
EPSILON_STEP = 0.03
"""Relative: of a step, and of what a prompt of 1,000 tokens adds to it."""
EPSILON_LOAD_S = 0.02


def requests() -> list[RecordedRequest]:
    return list(made_record().requests)


def prompt_s(profile: EngineProfile) -> float:
    with_prompt = profile.forward_s(**BATCH, prefill_tokens=1000)
    return with_prompt - profile.forward_s(**BATCH, prefill_tokens=0)


def test_steps_prompts_and_loads_are_those_that_made_the_record() -> None:
    """Another profile supplies what a record does not have."""
    base = replace(A100_8B, max_num_seqs=77)
    fitted = fit_record(requests(), base, max_loras=2)
    step_s = H100_8B.forward_s(**BATCH, prefill_tokens=0)

    assert fitted.forward_s(**BATCH, prefill_tokens=0) == pytest.approx(step_s, rel=EPSILON_STEP)
    assert prompt_s(fitted) == pytest.approx(prompt_s(H100_8B), rel=EPSILON_STEP)
    found_s = fitted.load_s(16, is_from_disk=True)
    assert found_s == pytest.approx(H100_8B.load_s(16, is_from_disk=True), abs=EPSILON_LOAD_S)
    assert fitted.max_num_seqs == 77
    assert "recorded requests" in fitted.provenance


def test_a_fitted_profile_tells_another_policy_as_the_right_one_does() -> None:
    fitted = fit_record(requests(), A100_8B, max_loras=2)
    case = Case("least_harm", 2, 2)
    right, found = (
        measure(simulate(made_record(), replace(SETTINGS, profile=profile), case), Slo())
        for profile in (H100_8B, fitted)
    )

    assert found.ttft_p50_s == pytest.approx(right.ttft_p50_s, rel=0.1)
    assert found.tpot_mean_s == pytest.approx(right.tpot_mean_s, rel=0.1)
    assert found.attainment == pytest.approx(right.attainment, abs=0.05)


def test_loads_from_the_cpu_and_from_disk_are_told_apart() -> None:
    fitted = fit_record(requests(), A100_8B, max_loras=2, max_cpu_loras=4)
    assert fitted.load_s(64, is_from_disk=True) > fitted.load_s(64, is_from_disk=False) > 0
    assert fitted.gpu_load_per_rank_s == fitted.disk_load_per_rank_s == 0


def test_loads_are_those_of_the_other_profile_where_nobody_knows_the_slots() -> None:
    fitted = fit_record(requests(), A100_8B, max_loras=None)
    assert (fitted.disk_load_s, fitted.gpu_load_s) == (A100_8B.disk_load_s, A100_8B.gpu_load_s)


def test_too_few_requests_and_those_without_a_pod_or_times_are_refused() -> None:
    few = requests()[: MIN_SAMPLES - 1]
    unplaced = [replace(each, pod="") for each in requests()]
    untimed = [replace(each, ttft_s=None) for each in requests()]
    for each in (few, unplaced, untimed):
        with pytest.raises(ValueError, match="too few"):
            fit_record(each, A100_8B, max_loras=2)


def test_times_that_no_costs_explain_are_refused() -> None:
    rng = Random(1)
    times_s = rng.choices((0.001, 0.01, 0.1, 1.0), k=len(requests()))
    wild = [replace(e, tpot_s=t) for e, t in zip(requests(), times_s, strict=True)]
    with pytest.raises(ValueError, match="no costs explain"):
        fit_record(wild, A100_8B, max_loras=2)
