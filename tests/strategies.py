"""Hypothesis strategies: views, snapshots, requests, reports and stream events."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.rejections import model_not_found, no_endpoints, saturated
from extproc.request import messages as m
from extproc.request.messages import BodyMode
from extproc.request.sessions import NO_SOURCES
from extproc.types import EndpointView, LoadReport, Rejection, RequestInfo, Snapshot
from tests.builders import BASE, address, body, endpoint_view, request, request_headers, snapshot
from tests.request.fakerouter import IN_HEADER

ADAPTERS = ("a", "b", "c")
MAX_ENDPOINTS = 5

# --- the pool's nouns -----------------------------------------------------------------------


@st.composite
def endpoint_views(draw: st.DrawFn, number: int) -> EndpointView:
    pending = draw(st.dictionaries(st.sampled_from(ADAPTERS), st.integers(1, 4)))
    cached = draw(st.lists(st.sampled_from(ADAPTERS), unique=True))
    names = st.frozensets(st.sampled_from((BASE, *ADAPTERS)))
    is_known = draw(st.booleans())
    return endpoint_view(
        number,
        is_ready=draw(st.booleans()),
        is_known=is_known,
        is_silent=not is_known and draw(st.booleans()),
        is_unreachable=draw(st.booleans()),
        is_ejected=draw(st.booleans()),
        registered=draw(st.none() | names),
        gpu_adapters=tuple(cached[: draw(st.integers(0, 2))]),
        cpu_adapters=tuple(cached),
        pending_by_adapter=pending,
        num_pending=sum(pending.values()) + draw(st.integers(0, 2)),
        max_loras=draw(st.none() | st.integers(1, 4)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    numbers = draw(st.sets(st.integers(1, MAX_ENDPOINTS)))
    return snapshot(*(draw(endpoint_views(number)) for number in numbers))


def subsets() -> st.SearchStrategy[frozenset[str] | None]:
    """None, or addresses with and without port."""
    addresses = [address(number) for number in range(1, MAX_ENDPOINTS + 1)]
    hosts = [each.partition(":")[0] for each in addresses]
    return st.none() | st.frozensets(st.sampled_from(addresses + hosts))


def requests() -> st.SearchStrategy[RequestInfo]:
    """For an adapter or the base model, with or without subset and session."""
    sessions = st.none() | st.sampled_from(("s", "t"))
    return st.builds(
        lambda adapter, subset, session: request(adapter, subset=subset, session=session),
        st.none() | st.sampled_from(ADAPTERS),
        subsets(),
        sessions,
    )


def reports() -> st.SearchStrategy[LoadReport]:
    adapters = st.sampled_from(ADAPTERS)
    return st.builds(
        LoadReport,
        num_running=st.integers(0, 4),
        num_waiting=st.integers(0, 4),
        num_deferred=st.none() | st.integers(0, 2),
        kv_usage_ratio=st.none() | st.sampled_from((0.0, 0.5)),
        max_loras=st.none() | st.integers(1, 3),
        active_adapters=st.frozensets(adapters),
        adapter_log=st.lists(
            st.tuples(adapters, st.integers(1, 50).map(float)), unique_by=lambda entry: entry[0]
        ).map(lambda log: tuple(sorted(log, key=lambda entry: -entry[1]))),
        process_start_wall_s=st.none() | st.sampled_from((1.0, 1.5, 9.0)),
    )


def rejections() -> st.SearchStrategy[Rejection]:
    return st.sampled_from((model_not_found("a"), saturated("a", 2), no_endpoints("a")))


# --- streams --------------------------------------------------------------------------------


def stream_settings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_body_bytes": st.sampled_from((1000, 20)),
            "early_decision_bytes": st.sampled_from((1, 20, 1000)),
            "allow_mode_override": st.booleans(),
            "uses_response_phases": st.booleans(),
            "assumed_body_mode": st.sampled_from(BodyMode),
            "sessions": st.sampled_from((NO_SOURCES, IN_HEADER)),
        }
    )


PATHS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/audio/transcriptions"),
    ("GET", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("GET", "/v1/responses/r"),
    ("POST", "/v1/responses/r/cancel"),
    ("POST", "/metrics"),
)
ODD_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"content-encoding": "br"},
    {"content-length": "9999"},
    {"x-session": "s"},
)


@st.composite
def header_events(draw: st.DrawFn, is_plain: bool) -> m.RequestHeaders:
    """A completion request, or, unless plain, anything that a table of routes can say."""
    method, path = PATHS[0] if is_plain else draw(st.sampled_from(PATHS))
    event = request_headers(
        method,
        path,
        headers={} if is_plain else draw(st.sampled_from(ODD_HEADERS)),
        end_of_stream=not is_plain and draw(st.booleans()),
        body_mode=draw(st.none() | st.sampled_from(BodyMode)),
        sends_body_early=draw(st.booleans()),
        response_body_mode=draw(st.none() | st.sampled_from(BodyMode)),
        model=draw(st.sampled_from((None, "a") if is_plain else (None, "a", ""))),
    )
    untold = draw(st.sampled_from((None, None, ":path", ":method")))
    told = {name: value for name, value in event.headers.items() if name != untold}
    return replace(event, headers=told)


def bodies() -> st.SearchStrategy[bytes]:
    return st.sampled_from((body(), body(previous_response_id="r"), b"[]", b'{"x": 1}', b"{", b""))


@st.composite
def body_events(draw: st.DrawFn, is_plain: bool) -> list[m.Event]:
    """A body in chunks, ended by its last chunk or by trailers, or not at all."""
    data = body() if is_plain else draw(bodies())
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    ends = [*cuts, len(data)]
    chunks = [data[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    is_last = draw(st.booleans())
    hints = st.none() | subsets()
    events: list[m.Event] = [m.BodyChunk(chunk, subset=draw(hints)) for chunk in chunks[:-1]]
    events.append(m.BodyChunk(chunks[-1], is_last, draw(hints)))
    return events if is_last or draw(st.booleans()) else [*events, m.RequestTrailers()]


def response_events() -> st.SearchStrategy[list[m.Event]]:
    status = st.sampled_from((0, 200, 404, 500))
    headers = st.builds(lambda code: m.ResponseHeaders(code), status)
    rest = st.lists(st.builds(m.ResponseBody, st.binary(max_size=3), st.booleans()), max_size=2)
    return st.builds(lambda first, more: [first, *more, m.ResponseTrailers()], headers, rest)


@st.composite
def event_sequences(draw: st.DrawFn) -> list[m.Event]:
    """Events as data planes send them, and sometimes any events in any order."""
    is_plain = draw(st.sampled_from((True, True, False)))
    events: list[m.Event] = [draw(header_events(is_plain))]
    if is_plain or draw(st.booleans()):
        events += draw(body_events(is_plain))
    events += draw(response_events() | st.just([]))
    events += draw(st.just([]) | st.just([m.StreamEnded()]))
    if draw(st.sampled_from((False, False, False, True))):
        events = draw(st.permutations(events))
    return events
