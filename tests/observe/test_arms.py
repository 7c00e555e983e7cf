"""What people are told of a policy on trial."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from prometheus_client import generate_latest

from extproc.observe.arms import ArmRecorder
from extproc.pods.completion import Ended
from extproc.routing.trial import PolicyTrial
from extproc.tenancy import Claim
from extproc.types import Outcome, Pick, RequestInfo
from tests.builders import completion, request
from tests.builders import pick as pick_of
from tests.observe.scene import Scene


class Watched:
    def __init__(self) -> None:
        self.arms = ArmRecorder()
        self.scene = Scene()
        self.arms.add_metrics(self.scene.telemetry)

    def begin(self) -> PolicyTrial:
        worse = partial(self.arms.found_worse, "mine")
        trial = PolicyTrial("mine", 0.5, by_tenant=False, on_worse=worse)
        self.arms.follow(trial)
        return trial

    def series(self) -> dict[str, float]:
        page = generate_latest(self.scene.telemetry.registry).decode()
        lines = [each.rpartition(" ") for each in page.splitlines()]
        return {name: float(value) for name, _, value in lines if name.startswith("extproc_trial_")}


def pick(asked: RequestInfo) -> Pick:
    return pick_of(info=asked, affinity="cold")


def of(arm: str, trial: PolicyTrial, **fields: object) -> RequestInfo:
    made = (request(request_id=str(n), **fields) for n in range(1000))  # type: ignore[arg-type]
    return next(each for each in made if trial.arm_of(each) == arm)


def test_there_are_no_series_without_a_trial() -> None:
    watched = Watched()
    watched.arms.ended(Ended(pick(request()), Outcome.COMPLETED, completion()), 1.0)

    assert not watched.series()
    watched.begin()
    assert watched.series()
    watched.arms.follow(None)
    assert not watched.series()


def test_each_arm_has_its_requests_first_tokens_attainment_and_loads() -> None:
    watched = Watched()
    trial = watched.begin()
    late = completion("id", first_body_byte_s=2.0, duration_s=3.0)
    ended = Ended(pick(of("trial", trial)), Outcome.COMPLETED, late, ttft_s=2.0)
    watched.arms.ended(ended, 1.0)
    patient = of("acting", trial, claim=Claim(ttft_s=5.0))
    watched.arms.ended(Ended(pick(patient), Outcome.COMPLETED, late, ttft_s=2.0), 1.0)
    watched.arms.ended(Ended(pick(of("acting", trial)), Outcome.FAILED, late), None)

    series = watched.series()
    assert series['extproc_trial_requests_total{arm="trial",outcome="completed"}'] == 1
    assert series['extproc_trial_requests_total{arm="acting",outcome="failed"}'] == 1
    assert series['extproc_trial_slo_requests_total{arm="trial",attained="false"}'] == 1
    assert series['extproc_trial_slo_requests_total{arm="acting",attained="true"}'] == 1
    assert series['extproc_trial_affinity_total{arm="trial",result="cold"}'] == 1
    below, above = (
        f'extproc_trial_ttft_seconds_bucket{{arm="trial",le="{each}"}}' for each in (1.5, 2.0)
    )
    assert (series[below], series[above]) == (0, 1)
    assert series['extproc_trial_ttft_seconds_count{arm="trial"}'] == 1
    assert series['extproc_trial_ttft_seconds_sum{arm="trial"}'] == 2.0


def test_a_policy_that_is_worse_is_said_in_log_warnings_and_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    trial = watched.begin()
    assert not watched.arms.warnings()
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            watched.arms.ended(Ended(pick(of("trial", trial)), Outcome.FAILED), None)

    (said,) = watched.arms.warnings()
    assert "mine is worse in failures" in said
    assert caplog.messages == [said]
    worse = {name: n for name, n in watched.series().items() if "trial_worse" in name}
    assert worse == {
        'extproc_trial_worse{measure="failures"}': 1,
        'extproc_trial_worse{measure="first_tokens"}': 0,
        'extproc_trial_worse{measure="lateness"}': 0,
    }
    watched.begin()
    assert not watched.arms.warnings()
