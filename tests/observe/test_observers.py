"""What only looks on can neither fail a request nor grow without end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.learned.evidence import StreamEnd
from extproc.observe.attainment import OTHER
from extproc.observe.logs import MAX_REPEATS
from extproc.observe.observers import NAMES, Observers
from extproc.observe.tracing import Tracing
from extproc.pods.completion import Ended
from extproc.rejections import no_endpoints
from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.stream import Stream
from extproc.service.services import tracer
from extproc.tenancy import Claim
from extproc.types import Outcome
from tests.builders import body, completion, request_headers
from tests.observe.scene import Scene
from tests.routing.scene import routed


class Broken:
    """An observer of any kind, every method of which raises, and of its parts."""

    def __getattr__(self, name: str) -> Broken:
        return Broken()

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("it is broken")


def serve(scene: Scene) -> None:
    """One request from its question to its end, one more that is refused, one that is lost."""
    recorder, endings = scene.recorder, scene.endings
    pick = routed(scene.route(drawn_target=1))
    assert endings.complete(completion(pick.id))
    recorder.rejected(no_endpoints("a"), {":path": "/v1/completions"})
    lost = routed(scene.route())
    assert scene.accounting.finish(lost, StreamEnd(Outcome.COMPLETED), now=0.0)
    recorder.ended(lost, Outcome.COMPLETED)
    scene.route()
    endings.tick(now=9999.0)
    assert endings.complete(completion("r-unknown"))
    assert len(scene.pool.flights) == 0


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        *((name, name) for name in ("telemetry", "decisions", "attainment")),
        ("rewrites", "canaries"),
        ("arms", "arms"),
    ],
)
def test_requests_are_served_and_counted_whichever_observer_raises(part: str, broken: str) -> None:
    parts: dict[str, Any] = {part: Broken()}
    scene = Scene(**parts)
    serve(scene)

    assert {name for name, count in scene.observers.num_errors.items() if count} == {broken}


class Judge:
    """Hears how requests end whose target was drawn."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Outcome, bool | None]] = []

    def ended(self, ended: Ended, is_attained: bool | None) -> None:
        self.heard.append((ended.pick.request.drawn_target, ended.outcome, is_attained))


def test_the_end_of_a_request_whose_target_was_drawn_is_judged_by_its_objective() -> None:
    """Whoever tells of it. The access log alone has times."""
    judge = Judge()
    scene = Scene(rewrites=judge)
    for number, ttft_s in ((1, 9.0), (2, 0.001), (3, None), (0, 9.0)):
        claim = Claim(ttft_s=ttft_s)
        pick = routed(scene.route(drawn_target=number, claim=claim))
        assert scene.endings.complete(completion(pick.id))
    for number in (4, 0):
        scene.recorder.ended(routed(scene.route(drawn_target=number)), Outcome.FAILED)

    completed = Outcome.COMPLETED
    assert judge.heard == [
        *((1, completed, True), (2, completed, False), (3, completed, None)),
        (4, Outcome.FAILED, None),
    ]


def test_a_sound_service_counts_no_failures() -> None:
    scene = Scene()
    serve(scene)

    assert scene.observers.num_errors == dict.fromkeys(NAMES, 0)
    assert scene.decisions.num_published == 4


def test_failures_of_an_observer_do_not_fill_the_log(limited_log: pytest.LogCaptureFixture) -> None:
    observers = Observers()

    def fail() -> None:
        raise OverflowError("too large")

    for _ in range(1_000):
        assert observers.call("decisions", fail) is None

    assert [record.levelno for record in limited_log.records] == [logging.ERROR] * MAX_REPEATS
    assert observers.num_errors["decisions"] == 1_000


def decide(tracing: Any, *, num_waits: int = 0) -> Scene:
    scene = Scene(num_waits=num_waits)
    parts = replace(scene.parts, observer=tracer(scene.recorder, tracing)({}))
    stream = Stream(parts, StreamSettings(), lambda: None)
    stream.handle(request_headers(body_mode=m.BodyMode.BUFFERED), now=1.0)
    commands = stream.handle(m.BodyChunk(body(), True), now=1.0)
    for number in range(num_waits):
        scene.router.offer(now=2.0 + number)
        commands = stream.handle(m.Wakeup(), now=2.0 + number)
    assert isinstance(commands[-1], m.EndStream)
    assert stream.pick is not None
    return scene


@pytest.mark.parametrize("num_waits", [0, 2])
def test_a_request_is_routed_though_its_span_cannot_be_begun(num_waits: int) -> None:
    class CannotBegin:
        def begin(self, _metadata: object) -> Any:
            raise RuntimeError("no span")

    scene = decide(CannotBegin(), num_waits=num_waits)

    assert scene.waiting is not None
    assert scene.waiting.num_asked == 1 + num_waits
    assert scene.observers.num_errors["tracing"] == 1


def test_an_exporter_that_blocks_holds_no_request_up_and_spans_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue is bounded: far more decisions than it takes are made while it stands still."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    may_go_on = threading.Event()

    class Stuck(SpanExporter):
        num_spans = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            may_go_on.wait(60)
            self.num_spans += len(spans)
            return SpanExportResult.SUCCESS

    exporter = Stuck()
    tracing = Tracing(sample_ratio=1.0, version="1", exporter=exporter)
    scenes = [decide(tracing) for _ in range(200)]
    may_go_on.set()
    tracing.close()

    assert 0 < exporter.num_spans <= 16 + 8
    assert not any(scene.observers.num_errors["tracing"] for scene in scenes)


def test_clients_cannot_fill_the_places_of_paths_that_are_counted() -> None:
    scene = Scene()
    for number in range(200):
        for path in (f"/v1/responses/{number}", f"/v1/%6{number % 10}ompletions?{number}", "//"):
            scene.recorder.rejected(no_endpoints("a"), {":path": path})
    scene.recorder.rejected(no_endpoints("a"), {":path": "/v1/completions"})
    counted = scene.attainment.recent(now=0.0)

    assert {"/v1/responses/{id}", "/v1/completions", OTHER} <= counted.keys()
    assert len(counted) <= 13


def test_what_is_remembered_of_a_refused_request_is_short() -> None:
    scene = Scene()
    headers = {":path": "/" + "x" * 60_000, "x-request-id": "i" * 60_000}
    scene.recorder.rejected(no_endpoints("a"), headers)
    [(_, record)] = scene.decisions.last(1)

    assert (len(record.path), len(record.request_id)) == (200, 128)
