"""Decisions as spans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from extproc.config.configfile import ConfigError, parse_config
from extproc.observe.tracing import DEFAULT_SERVICE_NAME, Tracing
from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.stream import Stream
from extproc.service.services import tracer
from extproc.service.startup import make_tracing
from tests.builders import address, body, request_headers
from tests.observe.scene import Scene

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


class Spans:
    """Tracing into memory."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(sample_ratio=sample_ratio, version="1.2", exporter=self.exporter)

    def finished(self) -> tuple[ReadableSpan, ...]:
        """Every span that was sent; nothing more can be sent after that."""
        self.tracing.close()
        return self.exporter.get_finished_spans()


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.tracing.close()


def begin(scene: Scene, tracing: Tracing | None, metadata: dict[str, str]) -> Stream:
    """A stream over the scene's router."""
    parts = scene.parts
    if tracing is not None:
        parts = replace(parts, observer=tracer(scene.recorder, tracing)(metadata))
    return Stream(parts, StreamSettings(), lambda: None)


def decide(
    tracing: Tracing | None,
    metadata: dict[str, str],
    *,
    model: str = "a",
    num_waits: int = 0,
    path: str = "/v1/chat/completions",
) -> Stream:
    """One request, through the stream, from headers to the answer and the end."""
    scene = Scene(num_waits=num_waits)
    stream = begin(scene, tracing, metadata)
    headers = {":method": "POST", ":path": path, "content-type": "application/json"}
    list(stream.handle(m.RequestHeaders(headers, body_mode=m.BodyMode.BUFFERED), now=1.0))
    if path.startswith("/v1"):
        list(stream.handle(m.BodyChunk(body(model), end_of_stream=True), now=2.0))
        for number in range(num_waits):
            scene.router.offer(now=3.0 + number)
            list(stream.handle(m.Wakeup(), now=3.0 + number))
    list(stream.handle(m.StreamEnded(), now=9.0))
    return stream


def test_a_decision_is_a_span_in_the_trace_that_it_was_asked_for_in(spans: Spans) -> None:
    pick = decide(spans.tracing, TRACED).pick
    (span,) = spans.finished()

    assert pick is not None
    assert span.name == "extproc.decision"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.attributes is not None
    assert span.attributes["extproc.endpoint"] == pick.address == address(1)
    assert span.attributes["extproc.reason"] == pick.reason == "at-last"
    assert span.attributes["extproc.pick_id"] == pick.id
    assert span.attributes["extproc.wait_s"] == 0
    assert span.attributes["gen_ai.request.model"] == "a"
    assert span.resource.attributes["service.name"] == DEFAULT_SERVICE_NAME


def test_time_held_is_part_of_the_span_and_said_in_seconds(spans: Spans) -> None:
    decide(spans.tracing, TRACED, num_waits=2)
    (span,) = spans.finished()

    assert [event.name for event in span.events] == ["held"]
    assert span.attributes is not None
    assert span.attributes["extproc.wait_s"] == pytest.approx(2.0)


def test_the_span_of_a_request_whose_client_leaves_while_it_is_held_ends_then(
    spans: Spans,
) -> None:
    scene = Scene(num_waits=9)
    stream = begin(scene, spans.tracing, TRACED)
    stream.handle(request_headers(body_mode=m.BodyMode.NONE, model="a"), now=1.0)
    stream.handle(m.StreamEnded(), now=3.0)
    (span,) = spans.finished()

    assert span.attributes == {"extproc.reason": "gone"}
    assert [event.name for event in span.events] == ["held"]


def test_an_error_of_ours_is_an_error_in_the_trace(spans: Spans) -> None:
    decide(spans.tracing, TRACED, model="unknown")
    decide(spans.tracing, TRACED, path="/nowhere")
    unknown_model, unknown_path = spans.finished()

    for span in (unknown_model, unknown_path):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == 404
    assert unknown_model.attributes is not None
    assert unknown_model.attributes["extproc.reason"] == "model_not_found"


def test_a_request_that_is_not_sampled_has_no_span(spans: Spans) -> None:
    decide(spans.tracing, UNSAMPLED)

    assert not spans.finished()


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 1)])
def test_without_a_trace_the_ratio_decides(ratio: float, count: int) -> None:
    spans = Spans(ratio)
    decide(spans.tracing, {"traceparent": "no trace at all"})

    assert len(spans.finished()) == count


def test_nothing_is_traced_unless_asked_for() -> None:
    assert make_tracing(parse_config("discovery: {static: []}")) is None
    assert decide(None, TRACED).pick is not None


def test_without_opentelemetry_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match=r"\[otel\]"):
        make_tracing(parse_config("{discovery: {static: []}, tracing: {enabled: true}}"))


def test_the_service_name_is_opentelemetrys_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-eu")
    spans = Spans()
    decide(spans.tracing, TRACED)
    (span,) = spans.finished()

    assert span.resource.attributes["service.name"] == "router-eu"
