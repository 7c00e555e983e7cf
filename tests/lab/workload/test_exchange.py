"""Requests as they are written, and streams as they are read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.fakepod.apierrors import engine_dead
from extproc.lab.fakepod.formats import (
    Api,
    ChatApi,
    CompletionApi,
    GeneratedReply,
    chat_tokens,
    prompt_tokens,
    stream_error,
)
from extproc.lab.workload.exchange import (
    CHAT,
    COMPLETIONS,
    RequestForm,
    RequestRecord,
    StreamMeter,
    as_fleet_result,
    code_of,
    encode_body,
    prompt_text,
    save_records,
)
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.requests import Tenant
from extproc.lab.workload.running import FlightState
from tests.lab.lab import arrival, load_records


def record(index: int = 0, **fields: Any) -> RequestRecord:
    times = {"at_s": 0.0, "sent_s": 0.0, "ended_s": 1.0, "prompt_tokens": 8}
    return RequestRecord(**{"index": index, "adapter": "a", "tenant": "", **times, **fields})


# --- requests -------------------------------------------------------------------------------


@given(
    num_tokens=st.integers(1, 3000),
    num_own=st.integers(0, 10) | st.integers(0, 3000),
    index=st.integers(0, 10**6),
)
def test_a_prompt_is_as_long_as_the_workload_says(
    num_tokens: int, num_own: int, index: int
) -> None:
    shared: dict[str, Any] = {
        "prefix": "text",
        "prefix_tokens": max(0, num_tokens - num_own),
    }
    asked = arrival(0.0, prompt_tokens=num_tokens, **shared)
    body = json.loads(encode_body(asked, index, RequestForm(COMPLETIONS)))
    chat = json.loads(encode_body(asked, index, RequestForm(CHAT)))

    assert prompt_tokens(body["prompt"]) == num_tokens
    assert chat_tokens(chat["messages"]) == max(5, num_tokens)


def test_no_two_prompts_begin_alike() -> None:
    prefix_index = {prompt_text(index, 40)[: 16 * 4] for index in range(1000)}

    assert len(prefix_index) == 1000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompts_begin_alike_as_far_as_their_workload_says(path: str) -> None:
    shared = {"prompt_tokens": 100, "prefix": "text", "prefix_tokens": 60}
    texts = []
    for index, fields in enumerate((shared, shared, {**shared, "prefix": "other"})):
        body = json.loads(encode_body(arrival(0.0, "a", **fields), index, RequestForm(path)))
        texts.append(body["prompt"] if path == COMPLETIONS else body["messages"][0]["content"])
    first, second, other = texts

    assert first[:240] == second[:240] != other[:240]
    assert first[240:304] != second[240:304]
    plain = json.loads(encode_body(arrival(0.0, prompt_tokens=100), 0, RequestForm()))["prompt"]
    assert len(plain) == len(first) or path == CHAT


def test_the_same_request_is_written_the_same_way_again() -> None:
    form = RequestForm(base_model="llama", extra=(("ignore_eos", True),))
    base = encode_body(arrival(0.0, None, output_tokens=7), 5, form)
    body = json.loads(base)

    assert base == encode_body(arrival(9.0, None, output_tokens=7), 5, form)
    assert (body["model"], body["max_tokens"], body["stream"]) == ("llama", 7, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert json.loads(encode_body(arrival(0.0, "a"), 5, form))["model"] == "a"


# --- answers --------------------------------------------------------------------------------


def stream(api: Api, num_tokens: int, *, has_usage: bool = True) -> list[bytes]:
    reply = GeneratedReply("1", "pod-1", "a", 0, 10, num_tokens)
    events = [api.token(reply, index) for index in range(num_tokens)]
    return [*events, api.end(reply, has_usage=has_usage)]


@pytest.mark.parametrize("api", [CompletionApi(), ChatApi()])
@pytest.mark.parametrize("has_usage", [True, False])
def test_each_token_is_noted_when_it_arrives(api: Api, has_usage: bool) -> None:
    meter = StreamMeter()
    for number, event in enumerate(stream(api, 3, has_usage=has_usage)):
        assert not meter.is_done
        meter.feed(event, now=number * 0.5)

    assert meter.times_s == [0.0, 0.5, 1.0]
    assert meter.gaps_s == (0.5, 0.5)
    assert (meter.num_tokens, meter.error, meter.is_done) == (3, "", True)


@given(cuts=st.lists(st.integers(0, 2000), max_size=20), num_tokens=st.integers(1, 5))
def test_where_the_network_cuts_a_stream_does_not_matter(cuts: list[int], num_tokens: int) -> None:
    data = b"".join(stream(ChatApi(), num_tokens))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    meter = StreamMeter()
    for start, end in pairwise(places):
        meter.feed(data[start:end], now=1.0)

    assert len(meter.times_s) == meter.num_tokens == num_tokens
    assert meter.is_done
    assert not meter.error


def test_the_servers_count_of_tokens_wins_over_the_pieces() -> None:
    """vLLM sends what has come since the last piece in one."""
    meter = StreamMeter()
    meter.feed(b'data: {"choices":[{"text":" two words"}]}\n\n', now=0.0)
    assert meter.num_tokens == 1

    meter.feed(b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n', now=0.0)
    assert meter.num_tokens == 2


@pytest.mark.parametrize(
    ("choice", "is_token"),
    [
        ('{"text":""}', True),  # half a character
        ('{"text":"","finish_reason":"length"}', False),
        ('{"text":" a","finish_reason":"length"}', True),
        ('{"delta":{"role":"assistant","content":""}}', False),
        ('{"delta":{"content":""}}', True),
        ('{"delta":{"content":" a"},"finish_reason":null}', True),
        ('{"delta":{},"finish_reason":"stop"}', False),
        ("{}", False),
    ],
)
def test_a_token_without_text_counts_and_what_opens_or_closes_does_not(
    choice: str, is_token: bool
) -> None:
    meter = StreamMeter()

    meter.feed(f'data: {{"choices":[{choice}]}}\n\n'.encode(), now=1.5)

    assert meter.times_s == ([1.5] if is_token else [])
    assert meter.num_tokens == is_token


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (stream_error(engine_dead()), "in_stream"),
        (b"data: hello\n\n", "not_a_stream"),
        (b": a comment\nevent: ping\n\n", ""),
        (b"<html></html>\n", ""),
    ],
)
def test_an_incomplete_response_is_an_error(data: bytes, error: str) -> None:
    meter = StreamMeter()
    meter.feed(data, now=0.0)

    assert (meter.error, meter.num_tokens) == (error, 0)


# --- records --------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    records = [
        record(0, first_token_s=0.25, gaps_s=(0.1, 0.2), status=200, served_by="pod-1"),
        record(1, adapter=None, error="http_503", status=503),
    ]
    save_records(records, tmp_path / "records")

    assert load_records(tmp_path / "records") == records


def test_times_count_from_when_a_request_was_sent() -> None:
    late = record(at_s=1.0, sent_s=1.5, first_token_s=1.75)

    assert late.delay_s == 0.5
    assert late.ttft_s == 0.25
    assert record().ttft_s is None


def test_a_replay_is_measured_like_a_virtual_run() -> None:
    """In the order of sending, from sending, less what the network adds."""
    whole = {"first_token_s": 0.75, "ended_s": 1.25, "num_tokens": 11, "served_by": "pod-1"}
    records = [
        record(0, sent_s=0.5, wanted_tokens=500, **whole),  # shorter than it may be
        record(1, sent_s=0.25, error="http_429", status=429, wanted_tokens=1),
    ]
    result = as_fleet_result(records, overhead_s=0.125)
    metrics = measure(result, Slo())

    assert [flight.arrival.at_s for flight in result.flights] == [0.25, 0.5]
    assert metrics.fates == {FlightState.FINISHED: 1, FlightState.SHED: 1}
    assert metrics.attainment == 0.5
    assert metrics.ttft_mean_s == 0.125
    assert metrics.tpot_mean_s == pytest.approx(0.05)
    assert [pod.address for pod in result.pods] == ["pod-1"]
    assert len(as_fleet_result(records, warm_up_s=0.4).counted) == 1


def test_a_replay_is_judged_by_what_its_tenants_want() -> None:
    records = [
        record(n, tenant=name, sent_s=float(n), first_token_s=9.0, ended_s=10.0)
        for n, name in enumerate(["batch", "people"])
    ]
    tenants = {"people": Tenant(), "batch": Tenant(has_objectives=False)}
    metrics = measure(as_fleet_result(records, tenants=tenants), Slo())

    attained = {name: of.attainment for name, of in metrics.tenants.items()}
    assert attained == {"people": 0.0, "batch": 1.0}
    assert metrics.tenants["people"].longest_wait_s == 8.0


def test_refusals_of_a_replay_are_counted_by_their_code() -> None:
    refused = [record(n, error="http_429", status=429, code="late") for n in range(2)]
    failed = record(2, error="http_404", status=404, code="gone", served_by="pod-1")
    result = as_fleet_result([*refused, failed])

    assert measure(result, Slo()).refusals == {"late": 2}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "m", "code": "late"}}', "late"),
        (b'{"error": {"message": "m", "code": 404}}', ""),
        (b'{"error": {"code": null}}', ""),
        (b'{"error": "gone"}', ""),
        (b'{"detail": []}', ""),
        (b"upstream connect error", ""),
        (b'{"error": {"code": "la', ""),
        (b"", ""),
    ],
)
def test_the_code_of_an_error_is_read_where_there_is_one(body: bytes, code: str) -> None:
    assert code_of(body) == code


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, FlightState.FINISHED),
        ({"error": "abandoned"}, FlightState.ABANDONED),
        ({"error": "http_429"}, FlightState.SHED),
        ({"error": "http_500", "served_by": "pod-1"}, FlightState.FAILED),
        ({"error": "reset"}, FlightState.FAILED),
        ({"error": "cut", "served_by": "pod-1"}, FlightState.FAILED),
    ],
)
def test_every_record_has_a_final_state(fields: dict[str, Any], state: FlightState) -> None:
    (flight,) = as_fleet_result([record(**fields)]).flights

    assert flight.state is state
