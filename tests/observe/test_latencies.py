"""How long requests took is counted by model and by endpoint, from the access log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from extproc.observe.attainment import CappedLabel
from extproc.observe.counters import Histogram, Histograms
from extproc.observe.latencies import MAX_PODS_WITH_BUCKETS, MAX_UNCOUNTED, Latencies
from extproc.observe.telemetry import Telemetry
from extproc.paths import RESPONSES_PATH
from extproc.pods.completion import Completion, Ended, first_token_s
from extproc.types import Outcome, Pick
from tests.builders import address, completion, endpoint_view, pick, request, snapshot


def ended(chosen: Pick, **more: Any) -> tuple[Ended, Completion]:
    entry = completion(chosen.id, **more)
    ttft_s = first_token_s(entry, chosen.request.path)
    return Ended(chosen, entry.outcome, entry, ttft_s), entry


class Scene:
    """Two endpoints, and room for `max_models` names."""

    def __init__(self, max_models: int = 10) -> None:
        self.latencies = Latencies(CappedLabel(max_models))
        self.endpoints = {address(1), address(2)}

    def end(
        self, model: str = "a", *, arrived_at_s: float = 5.0, picked_at_s: float = 5.0, **more: Any
    ) -> None:
        """One that was answered after 0.1 s and streamed until 0.2 s."""
        info = request(model, arrived_at_s=arrived_at_s)
        chosen = pick(info=info, picked_at_s=picked_at_s)
        self.latencies.record(*ended(chosen, **more))

    def families(self) -> Sequence[Metric]:
        return [make() for make in self.latencies.families(self.endpoints)]

    def counts(self, name: str, suffix: str = "count") -> dict[str, float]:
        """Of each value of the histogram's label."""
        return {
            next(iter(sample.labels.values())): sample.value
            for family in self.families()
            for sample in family.samples
            if sample.name == f"extproc_{name}_seconds_{suffix}"
        }


def test_a_streamed_response_counts_for_its_model_and_for_its_endpoint() -> None:
    scene = Scene()
    scene.end("a")
    scene.end("b", address=address(2), first_body_byte_s=1.5, duration_s=9.0)

    assert scene.counts("model_ttft", "sum") == {"a": 0.1, "b": 1.5}
    assert scene.counts("model_duration", "sum") == {"a": 0.2, "b": 9.0}
    assert scene.counts("endpoint_ttft", "sum") == pytest.approx({address(1): 0.1, address(2): 1.5})
    assert scene.counts("endpoint_duration", "sum") == pytest.approx(
        {address(1): 0.2, address(2): 9.0}
    )


def test_what_the_router_held_is_the_models_and_not_the_endpoints() -> None:
    scene = Scene()
    scene.end(picked_at_s=7.0, first_body_byte_s=2.5, duration_s=4.0)

    assert scene.counts("model_ttft", "sum") == {"a": 2.5}
    assert scene.counts("endpoint_ttft", "sum") == {address(1): 0.5}
    assert scene.counts("endpoint_duration", "sum") == {address(1): 2.0}


@pytest.mark.parametrize(
    "unlike",
    [
        {"duration_s": 0.1},
        {"first_body_byte_s": None},
        {"shows_first_token": False},
        {"duration_s": None},
        {"status": 500, "outcome": Outcome.FAILED},
    ],
)
def test_only_a_response_that_shows_its_first_token_has_a_time_to_it(
    unlike: dict[str, Any],
) -> None:
    scene = Scene()
    scene.end(**unlike)

    assert scene.counts("model_ttft") == {}
    assert scene.counts("endpoint_ttft") == {}


def test_a_path_that_does_not_begin_with_a_token_has_no_time_to_it() -> None:
    scene = Scene()
    chosen = pick(info=request("a", path=RESPONSES_PATH))
    scene.latencies.record(*ended(chosen))

    assert scene.counts("model_ttft") == {}
    assert scene.counts("model_duration") == {"a": 1}


@pytest.mark.parametrize(
    "unlike",
    [
        {"status": 500, "outcome": Outcome.FAILED},
        {"status": 404},
        {"outcome": Outcome.CANCELLED},
        {"duration_s": None},
    ],
)
def test_what_was_not_answered_to_its_end_has_no_duration(unlike: dict[str, Any]) -> None:
    scene = Scene()
    scene.end(**unlike)

    assert scene.counts("model_duration") == {}


def test_a_client_that_left_in_the_middle_had_a_first_token() -> None:
    scene = Scene()
    scene.end(outcome=Outcome.CANCELLED)

    assert scene.counts("model_ttft") == {"a": 1}


def test_a_request_that_was_tried_twice_counts_for_no_endpoint() -> None:
    scene = Scene()
    scene.end(attempts=2)

    assert scene.counts("model_ttft") == {"a": 1}
    assert scene.counts("endpoint_ttft") == {}
    assert scene.counts("endpoint_duration") == {}


def test_series_end_when_their_endpoint_leaves() -> None:
    scene = Scene()
    scene.end()
    scene.end(address=address(2))
    assert scene.counts("endpoint_ttft").keys() == scene.endpoints
    scene.endpoints = {address(2)}

    assert scene.counts("endpoint_ttft").keys() == {address(2)}
    assert scene.counts("endpoint_duration").keys() == {address(2)}


def test_models_beyond_the_cap_share_a_label() -> None:
    scene = Scene(max_models=2)
    for model in ("a", "b", "c", "d", "a"):
        scene.end(model)

    assert scene.counts("model_ttft") == {"a": 2, "b": 1, "other": 2}


def test_the_name_is_the_one_that_the_client_wrote() -> None:
    scene = Scene()
    chosen = pick(info=request("customer-07-v2", written="customer-07"))
    scene.latencies.record(*ended(chosen))

    assert scene.counts("model_ttft") == {"customer-07": 1}


@pytest.mark.parametrize(
    ("num", "num_series"), [(MAX_PODS_WITH_BUCKETS, 13), (MAX_PODS_WITH_BUCKETS + 1, 3)]
)
def test_of_many_pods_each_has_a_number_and_a_sum_alone(num: int, num_series: int) -> None:
    """Buckets of 2,000 pods would be 40,000 series, and models keep theirs."""
    scene = Scene(max_models=num)
    scene.endpoints = {f"10.0.0.0:{number}" for number in range(num)}
    for number, each in enumerate(sorted(scene.endpoints)):
        scene.end(f"model-{number}", address=each)
    sizes = {family.name: len(family.samples) / num for family in scene.families()}

    assert scene.counts("endpoint_ttft", "sum").keys() == scene.endpoints
    assert {*scene.counts("endpoint_duration").values()} == {1}
    assert sizes == {
        "extproc_model_ttft_seconds": 13,
        "extproc_model_duration_seconds": 13,
        "extproc_endpoint_ttft_seconds": num_series,
        "extproc_endpoint_duration_seconds": num_series,
    }


def test_counting_in_batches_leaves_none_out() -> None:
    scene, rng = Scene(), random.Random(0)
    num = 2 * MAX_UNCOUNTED + 3
    for _ in range(num):
        scene.end(rng.choice("ab"))

    assert sum(scene.counts("model_ttft").values()) == num
    assert sum(scene.counts("endpoint_duration").values()) == num


def test_no_more_wait_than_are_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Histograms] = []
    monkeypatch.setattr(Histograms, "count", lambda histograms: counted.append(histograms))
    scene = Scene()
    for _ in range(MAX_UNCOUNTED - 1):
        scene.end()
    assert counted == []

    scene.end()
    assert len(counted) == 4


def test_the_metrics_have_them_with_buckets() -> None:
    views = snapshot(endpoint_view(1))
    telemetry = Telemetry(snapshot=lambda: views, version="1")
    chosen = pick()
    telemetry.logged(*ended(chosen, first_body_byte_s=0.15))
    telemetry.completed(Outcome.COMPLETED, 0.0)

    def value(bound: str) -> float | None:
        labels = {"model": "a", "le": bound}
        return telemetry.registry.get_sample_value("extproc_model_ttft_seconds_bucket", labels)

    assert (value("0.1"), value("0.2"), value("+Inf")) == (0.0, 1.0, 1.0)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.05, 0.1, 0.11, 1.0, 2.0]), max_size=200))
def test_counting_together_is_counting_one_by_one(seconds: list[float]) -> None:
    bounds = (0.05, 0.1, 1.0)
    together = Histograms("x", "X", bounds, "label")
    one_by_one = Histogram("x", "X", bounds)
    together.waiting("v").extend(seconds)
    for each in seconds:
        one_by_one.observe(max(0.0, each))

    found, expected = (
        [each.value for each in family.samples]
        for family in (together.taken()(), one_by_one.family())
    )
    assert found == (pytest.approx(expected) if seconds else [])
