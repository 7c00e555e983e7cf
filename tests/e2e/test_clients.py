"""What clients ask before they begin, and how: probes, browsers, old proxies, ids of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc import __version__
from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat, free_port, raw_request

PAGE = "https://chat.example.com"


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=list(Mode), ids=str)
async def envoy(
    request: pytest.FixtureRequest, router: RouterProcess, fallback_router: RouterProcess
) -> AsyncIterator[EnvoyProcess]:
    asked = fallback_router if request.param is Mode.OVERRIDE_HOST else router
    options: dict[str, Any] = {"cors_origins": (PAGE,), "keep_request_ids": True}
    async with running_envoy(request.param, asked, **options) as running:
        yield running


@pytest.fixture
def client(envoy: EnvoyProcess, http: aiohttp.ClientSession) -> Client:
    return Client(envoy.url, http)


async def test_probes_and_names_with_slashes_are_answered(
    client: Client, pods: list[RunningPod]
) -> None:
    for pod in pods:
        pod.pod.last_requests.clear()
    paths = ("/health", "/ping", "/version", "/v1/models/", "/v1/models/only-1")
    answers = {path: await client.request("GET", path) for path in paths}
    unknown = await client.request("GET", "/v1/models/org%2Fllama")

    assert {answer.status for answer in answers.values()} == {200}
    assert answers["/version"].json == {"version": f"{__version__}+extproc"}
    assert answers["/v1/models/"].json["object"] == "list"
    assert (unknown.status, unknown.error_code) == (404, "model_not_found")
    assert "`org/llama`" in unknown.json["error"]["message"]
    assert not any(pod.pod.last_requests for pod in pods)


async def test_a_page_of_an_allowed_origin_may_ask_and_read_the_answers(client: Client) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    preflight = await client.request("OPTIONS", "/v1/chat/completions", headers=asks)
    answers = [
        await client.chat("only-1", headers={"origin": PAGE}),
        await client.chat("nobody", headers={"origin": PAGE}),
        await client.request("GET", "/v1/models", headers={"origin": PAGE}),
    ]

    assert preflight.status in (200, 204)
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization, *"
    assert [answer.status for answer in answers] == [200, 404, 200]
    assert {each.headers.get("access-control-allow-origin") for each in answers} == {PAGE}


async def test_a_page_of_another_origin_may_not(client: Client, pods: list[RunningPod]) -> None:
    for pod in pods:
        pod.pod.last_requests.clear()
    asks = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = await client.request("OPTIONS", "/v1/chat/completions", headers=asks)

    assert preflight.status == 405
    assert "access-control-allow-origin" not in preflight.headers
    assert not any(pod.pod.last_requests for pod in pods)


async def test_a_trusted_client_keeps_its_request_id(client: Client) -> None:
    answer = await client.chat("only-1", headers={"x-request-id": "mine"})

    assert answer.headers["x-request-id"] == "mine"


async def test_a_proxy_that_speaks_http_1_0_is_served(envoy: EnvoyProcess) -> None:
    body = chat("only-1")
    head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    answer = await raw_request(
        envoy.port, b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)
    )

    assert (answer.status, answer.served_by) == (200, "pod-1")


async def test_without_a_router_errors_can_be_read_by_pages(http: aiohttp.ClientSession) -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with running_envoy(Mode.ORIGINAL_DST, dead, cors_origins=("*",)) as envoy:
        answer = await Client(envoy.url, http).chat("only-1", headers={"origin": PAGE})

    assert (answer.status, answer.error_code) == (503, "router_unavailable")
    assert answer.headers["access-control-allow-origin"] == PAGE
