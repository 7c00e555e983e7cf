"""Every way in which Envoy can send a body, in every configuration: requests go by adapter."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import NUM_PODS, PATIENCE_S, running_envoy
from tests.e2e.harness import (
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    h2_request,
    peak_memory_bytes,
)
from tests.waiting import eventually

MODELS = [f"only-{number}" for number in range(NUM_PODS)]
SERVERS = [f"pod-{number}" for number in range(NUM_PODS)]


@dataclass(frozen=True)
class Case:
    """One configuration of Envoy."""

    mode: Mode
    body: BodyDelivery
    response_phases: bool = False

    def __str__(self) -> str:
        return f"{self.mode}-{self.body}" + ("-and-responses" if self.response_phases else "")


WITH_RESPONSES = (BodyDelivery.BUFFERED, BodyDelivery.STREAMED, BodyDelivery.FULL_DUPLEX)
CASES = [
    *(Case(mode, body) for mode, body in product(Mode, BodyDelivery)),
    *(Case(mode, body, response_phases=True) for mode, body in product(Mode, WITH_RESPONSES)),
]
AS_SHIPPED = [
    Case(Mode.ORIGINAL_DST, BodyDelivery.BUFFERED),
    Case(Mode.OVERRIDE_HOST, BodyDelivery.BUFFERED),
    Case(Mode.FULL_DUPLEX, BodyDelivery.FULL_DUPLEX),
]
"""The configurations in envoy/."""


PLAIN = b'{"model":"only-1","max_tokens":2,"messages":[{"role":"user","content":"Hello"}]}'
MAX_ENVOY_BYTES = 400 * 2**20
ZSTD_HEADER, ZSTD_LAST_BLOCK = bytes.fromhex("28b52ffd20"), 8 * len(PLAIN) + 1
COMPRESSED = {
    "gzip": gzip.compress(PLAIN),
    "br": bytes.fromhex(
        "1b4f00502c0aec36e21ca106832e6bbefb5a84056f6fc684b5b54e5f17cb1491d96a9196af"
        "b9e0901381ec2d90e6491e63ebb9ca65b02f1d05f091db96e79478f90a802146327e2ce801"
    ),
    "zstd": ZSTD_HEADER + bytes((len(PLAIN),)) + ZSTD_LAST_BLOCK.to_bytes(3, "little") + PLAIN,
}
"""The same body; zstd's has one block, as it is."""


def parameters() -> list[Any]:
    """All cases; those as shipped are smoke tests."""
    return [
        pytest.param(case, marks=pytest.mark.smoke if case in AS_SHIPPED else ()) for case in CASES
    ]


@dataclass(frozen=True)
class Gateway:
    """A running Envoy, its configuration, and the router that it asks."""

    case: Case
    envoy: EnvoyProcess
    client: Client
    router: RouterProcess


def may_be_sent_twice(case: Case) -> bool:
    """Whether a body with trailers comes in parts where Envoy may retry."""
    whole = (BodyDelivery.BUFFERED, BodyDelivery.HEADERS_ONLY)
    return case.mode is not Mode.FULL_DUPLEX and case.body not in whole


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=parameters(), ids=str)
async def gateway(
    request: pytest.FixtureRequest,
    router: RouterProcess,
    fallback_router: RouterProcess,
    asking_router: RouterProcess,
    http: aiohttp.ClientSession,
) -> AsyncIterator[Gateway]:
    case: Case = request.param
    asked = fallback_router if case.mode is Mode.OVERRIDE_HOST else router
    asks_for_body = case.body is BodyDelivery.STREAMED_STRICT
    if asks_for_body:
        asked = asking_router
    async with running_envoy(
        case.mode,
        asked,
        request_body=case.body,
        response_phases=case.response_phases,
        allow_mode_override=asks_for_body,
    ) as envoy:
        yield Gateway(case, envoy, Client(envoy.url, http), asked)


@pytest.mark.parametrize("padding_bytes", [0, 107_000, 1_500_000])
@pytest.mark.parametrize("is_model_last", [False, True], ids=["model-first", "model-last"])
async def test_a_request_goes_where_its_adapter_is(
    gateway: Gateway, padding_bytes: int, is_model_last: bool
) -> None:
    answers = [
        await gateway.client.chat(model, padding_bytes=padding_bytes, is_model_last=is_model_last)
        for model in MODELS
    ]

    assert [answer.status for answer in answers] == [200] * NUM_PODS
    assert [answer.served_by for answer in answers] == SERVERS
    assert [answer.json["model"] for answer in answers] == MODELS


async def test_control_headers_stay_with_the_router(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    headers = {"x-llm-d-inference-objective": "o", "x-slo-ttft-ms": "5", "x-other": "kept"}
    answer = await gateway.client.chat("only-1", headers=headers)

    seen = pods[1].pod.last_requests[-1]["headers"]
    assert isinstance(seen, list)
    assert answer.served_by == "pod-1"
    assert {name for name, _ in seen} & headers.keys() == {"x-other"}


async def test_a_response_streams_back(gateway: Gateway) -> None:
    answer = await gateway.client.chat("only-1", stream=True, max_tokens=3)

    events = answer.body.decode().strip().split("\n\n")
    assert answer.served_by == "pod-1"
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(events) >= 4
    assert events[-1] == "data: [DONE]"


async def test_every_pick_ends_with_its_request(gateway: Gateway) -> None:
    router, name = gateway.router, "extproc_picks_expired_total"
    await eventually(router.has_none_in_flight, within_s=PATIENCE_S)
    before = await router.counter(name)  # of an Envoy before this one
    answers = [await gateway.client.chat(model) for model in MODELS]
    await eventually(router.has_none_in_flight, within_s=PATIENCE_S)

    assert [answer.status for answer in answers] == [200] * NUM_PODS
    assert await router.counter(name) == before


async def test_a_body_that_comes_in_two_parts_is_routed(gateway: Gateway) -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        body = chat("only-2", is_model_last=True)
        yield body[:-20]
        await asyncio.sleep(0.5)
        yield body[-20:]

    answer = await gateway.client.request("POST", "/v1/chat/completions", slow_body())

    assert answer.status == 200, answer.body
    assert answer.served_by == "pod-2"


@pytest.mark.parametrize("encoding", COMPRESSED)
async def test_a_compressed_body_is_routed_by_its_adapter(gateway: Gateway, encoding: str) -> None:
    answer = await gateway.client.request(
        "POST",
        "/v1/chat/completions",
        COMPRESSED[encoding],
        headers={"content-encoding": encoding},
    )
    if may_be_sent_twice(gateway.case):
        assert (answer.status, answer.error_code) == (415, "unsupported_content_encoding")
        return

    assert answer.status == 200, answer.body
    assert (answer.served_by, answer.json["model"]) == ("pod-1", "only-1")


async def test_a_body_that_inflates_without_end_is_refused(gateway: Gateway) -> None:
    """By what Envoy buffers, or what the router reads of one message (503), or as Envoy stops
    inflating: what is left is no JSON."""
    answer = await gateway.client.request(
        "POST",
        "/v1/chat/completions",
        gzip.compress(PLAIN[:-1] + b" " * 100_000_000 + b"}"),
        headers={"content-encoding": "gzip"},
    )

    assert answer.status in (400, 413, 415, 503), answer.body
    assert peak_memory_bytes(gateway.envoy) < MAX_ENVOY_BYTES


async def test_a_request_with_trailers_is_routed(gateway: Gateway) -> None:
    if may_be_sent_twice(gateway.case):
        pytest.skip("Envoy 1.40 sends the body twice, where the router may retry (issue 45470)")

    answer = await h2_request(gateway.envoy.port, chat("only-1"), has_trailers=True)

    assert answer.status == 200, answer.body
    assert answer.served_by == "pod-1"


async def test_trailers_without_a_body_are_an_error_at_once(gateway: Gateway) -> None:
    if gateway.case.body is BodyDelivery.STREAMED:
        pytest.skip("Envoy keeps the trailers until the reply to the headers: 504 in the end")
    if gateway.case.body is BodyDelivery.HEADERS_ONLY:
        pytest.skip("Envoy does not ask the router about them: there is no body")

    answer = await h2_request(gateway.envoy.port, b"", has_trailers=True)

    assert (answer.status, answer.error_code) == (400, "invalid_json")


async def test_an_inference_path_without_a_body_is_an_error_at_once(gateway: Gateway) -> None:
    got = await gateway.client.request("GET", "/v1/chat/completions")
    posted = await gateway.client.request("POST", "/v1/chat/completions")

    assert (got.status, got.error_code) == (405, "method_not_allowed")
    assert got.headers["allow"] == "POST"
    assert (posted.status, posted.error_code) == (400, "invalid_json")


async def test_the_models_of_the_whole_pool_are_listed(gateway: Gateway) -> None:
    answer = await gateway.client.request("GET", "/v1/models")

    parents = {card["id"]: card["parent"] for card in answer.json["data"]}
    assert answer.status == 200
    assert parents == {"base": None, "shared": "base", **dict.fromkeys(MODELS, "base")}


async def test_an_unknown_model_is_refused_in_openai_shape(gateway: Gateway) -> None:
    answer = await gateway.client.chat("nobody")

    assert (answer.status, answer.error_code) == (404, "model_not_found")
    assert answer.served_by == ""


async def test_a_body_that_is_not_json_is_refused(gateway: Gateway) -> None:
    answer = await gateway.client.request("POST", "/v1/chat/completions", b'{"model": "only-1"')

    assert answer.status == 400
    assert answer.error_code in ("invalid_json", "missing_model")


@pytest.mark.parametrize("mode", list(Mode))
async def test_without_the_body_in_time_the_error_names_the_setting(
    mode: Mode, router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    """STREAMED alone cannot route, and asking for the body is not allowed here."""
    async with running_envoy(mode, router, request_body=BodyDelivery.STREAMED_STRICT) as envoy:
        answer = await Client(envoy.url, http).chat("only-1")

    assert (answer.status, answer.error_code) == (500, "body_not_sent")
    assert "allow_mode_override" in answer.json["error"]["message"]


async def served(pods: list[RunningPod], http: aiohttp.ClientSession) -> list[str]:
    """The pods' counters of finished requests."""
    lines = []
    for pod in pods:
        async with http.get(f"http://{pod.address}/metrics") as page:
            lines += [each for each in (await page.text()).splitlines() if "success_total{" in each]
    return lines


async def test_a_body_that_names_a_second_model_reaches_no_pod_whole(
    gateway: Gateway, pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    """Engines use the last name: no request may be routed by the first and served by the last."""
    if gateway.case.body in (BodyDelivery.HEADERS_ONLY, BodyDelivery.BUFFERED_PARTIAL):
        pytest.skip("the router does not see the rest of the body")
    before = await served(pods, http)

    async def two_names() -> AsyncIterator[bytes]:
        yield chat("only-1", padding_bytes=400_000)[:-1]
        await asyncio.sleep(0.3)
        yield b', "model": "only-2"}'

    answer = await gateway.client.request("POST", "/v1/chat/completions", two_names())

    if gateway.case.body is BodyDelivery.STREAMED:
        assert (answer.status, answer.error_code) == (400, "invalid_body")
        assert await served(pods, http) == before
    else:
        assert answer.status == 200, answer.body
        assert (answer.served_by, answer.json["model"]) == ("pod-2", "only-2")
