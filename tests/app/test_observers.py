"""What only looks on can neither fail a request nor grow without end."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.app.dispatch import ObservedDispatcher
from extproc.app.observers import NAMES, Observers
from extproc.app.traced import new_stream_of
from extproc.core import messages as m
from extproc.core.accounting import Accounting, Completion
from extproc.core.attainment import OTHER, Attainment
from extproc.core.picker import Picker
from extproc.core.policies import Founding
from extproc.core.pool import Pool
from extproc.core.ports import StreamSettings
from extproc.core.rejections import no_endpoints
from extproc.core.router import Router
from extproc.core.types import Outcome, Pick
from extproc.shell.decisions import DecisionsService
from extproc.shell.logs import MAX_REPEATS
from extproc.shell.telemetry import Telemetry
from extproc.shell.tracing import Tracing
from tests.builders import address, body, cards, endpoint, report, request, request_headers
from tests.core.dispatcher import FakeDispatcher

ASKED = request(None, model="a")


class Broken:
    """An observer of any kind, every method of which raises."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{name} is broken")

        return fail


class Scene:
    """A dispatcher over one endpoint; tests break its observers."""

    def __init__(self, **changes: Any) -> None:
        self.now = 0.0
        self.pool = Pool()
        self.pool.set_endpoints([endpoint(1)])
        self.pool.record_report(address(1), report(), taken_at_s=0.0)
        self.pool.record_models(address(1), cards("a"), now=0.0)
        ids = itertools.count()
        picker = Picker(
            Founding(), "founding", rng=random.Random(0), next_id=lambda: f"r-{next(ids)}"
        )
        self.observers = Observers()
        parts: dict[str, Any] = {
            "telemetry": Telemetry(snapshot=lambda: self.pool.snapshot(now=self.now), version="1"),
            "decisions": DecisionsService(),
            "attainment": Attainment(1.0),
        }
        accounting = Accounting(self.pool, "r")
        accounting.record_access_logs(1)
        self.dispatcher = ObservedDispatcher(
            router=Router(self.pool, picker),
            accounting=accounting,
            clock=lambda: self.now,
            wall_clock=lambda: 1_700_000_000.0,
            on_doubt=lambda _: None,
            observers=self.observers,
            **(parts | changes),
        )

    def serve(self) -> None:
        """One request from its question to its end, one more that is refused, one that is lost."""
        pick = self.dispatcher.route(ASKED, now=self.now)
        assert isinstance(pick, Pick)
        assert self.dispatcher.complete(completion(pick.id))
        self.dispatcher.rejected(no_endpoints("a"), {":path": "/v1/completions"})
        lost = self.dispatcher.route(ASKED, now=self.now)
        assert isinstance(lost, Pick)
        self.dispatcher.finish(lost, Outcome.COMPLETED, now=self.now)
        self.dispatcher.route(ASKED, now=self.now)
        self.dispatcher.give_up(self.pool.expire(now=self.now + 99.0, max_age_s=9.0))
        assert self.dispatcher.complete(completion("r-unknown"))
        assert self.pool.num_in_flight == 0


def completion(pick_id: str) -> Completion:
    return Completion(
        pick_id=pick_id, request_id="", address=address(1), status=200, outcome=Outcome.COMPLETED,
        is_from_endpoint=True, first_byte_s=0.1, duration_s=0.2, attempts=1, lag_s=0.0, orca="",
        first_body_byte_s=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("broken", ["telemetry", "decisions", "attainment"])
def test_requests_are_served_and_counted_whichever_observer_raises(broken: str) -> None:
    scene = Scene(**{broken: Broken()})
    scene.serve()

    assert {name for name, count in scene.observers.num_errors.items() if count} == {broken}


def test_a_sound_service_counts_no_failures() -> None:
    scene = Scene()
    scene.serve()

    assert scene.observers.num_errors == dict.fromkeys(NAMES, 0)
    assert scene.dispatcher.decisions.num_published == 4


def test_failures_of_an_observer_do_not_fill_the_log(limited_log: pytest.LogCaptureFixture) -> None:
    observers = Observers()

    def fail() -> None:
        raise OverflowError("too large")

    for _ in range(1_000):
        assert observers.tell("decisions", fail) is None

    assert [record.levelno for record in limited_log.records] == [logging.ERROR] * MAX_REPEATS
    assert observers.num_errors["decisions"] == 1_000


def decide(tracing: Any, observers: Observers, *, num_waits: int = 0) -> FakeDispatcher:
    dispatcher = FakeDispatcher(num_waits=num_waits)
    stream = new_stream_of(dispatcher, StreamSettings(), tracing, observers)({})
    stream.handle(request_headers(body_mode=m.BodyMode.BUFFERED), now=1.0)
    commands = stream.handle(m.RequestBody(body(), True), now=1.0)
    for _ in range(num_waits):
        commands = stream.handle(m.Wakeup(), now=2.0)
    assert isinstance(commands[-1], m.End)
    return dispatcher


@pytest.mark.parametrize("num_waits", [0, 2])
def test_a_request_is_routed_though_its_span_cannot_be_begun(num_waits: int) -> None:
    observers = Observers()

    class CannotBegin:
        def begin(self, _metadata: object) -> Any:
            raise RuntimeError("no span")

    dispatcher = decide(CannotBegin(), observers, num_waits=num_waits)

    assert len(dispatcher.routed) == 1 + num_waits
    assert observers.num_errors["tracing"] == 1


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
    observers = Observers()
    for _ in range(1_000):
        decide(tracing, observers)
    may_go_on.set()
    tracing.close()

    assert 0 < exporter.num_spans <= 16 + 8
    assert observers.num_errors["tracing"] == 0


def test_clients_cannot_fill_the_places_of_paths_that_are_counted() -> None:
    scene = Scene()
    for number in range(200):
        for path in (f"/v1/responses/{number}", f"/v1/%6{number % 10}ompletions?{number}", "//"):
            scene.dispatcher.rejected(no_endpoints("a"), {":path": path})
    scene.dispatcher.rejected(no_endpoints("a"), {":path": "/v1/completions"})
    counted = scene.dispatcher.attainment.recent(now=0.0)

    assert {"/v1/responses/{id}", "/v1/completions", OTHER} <= counted.keys()
    assert len(counted) <= 13


def test_what_is_remembered_of_a_refused_request_is_short() -> None:
    scene = Scene()
    headers = {":path": "/" + "x" * 60_000, "x-request-id": "i" * 60_000}
    scene.dispatcher.rejected(no_endpoints("a"), headers)
    [(_, record)] = scene.dispatcher.decisions.last(1)

    assert (len(record.path), len(record.request_id)) == (200, 128)
