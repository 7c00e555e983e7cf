"""Envoy's own errors are in OpenAI's shape, also for bytes that are not HTTP, from either side."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import router_config, running_envoy, server_that_says
from tests.e2e.harness import (
    Answer,
    EnvoyProcess,
    RouterProcess,
    connection_manager,
    free_port,
    raw_request,
)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
NOT_HTTP = {
    "words": (b"GARBAGE\r\n\r\n", 400, "bad_request"),
    "bytes": (b"\x00\x01\x02\xff\r\n\r\n", 400, "bad_request"),
    "tls": (bytes.fromhex("160301020001000001fc0303") + b"x" * 60, 400, "bad_request"),
    "no host": (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", 400, "bad_request"),
    "header without colon": (POST + b"nothing\r\n\r\n", 400, "bad_request"),
    "control character": (POST + b"a: b\x00c\r\n\r\n", 400, "bad_request"),
    "length not a number": (POST + b"content-length: abc\r\n\r\n", 400, "bad_request"),
    "length twice": (
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "bad_request",
    ),
    "chunk not a number": (POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n", 400, "bad_request"),
    "unknown encoding": (POST + b"transfer-encoding: gzip\r\n\r\n", 501, "bad_request"),
    "unknown method": (b"FOO /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request"),
    "upgrade": (POST + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 403, "bad_request"),
    "websocket of responses": (
        POST.replace(b"chat/completions", b"responses", 1)
        + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        426,
        "no_websockets",
    ),
    "large headers": (POST + b"a: " + b"x" * 80_000 + b"\r\n\r\n", 431, "headers_too_large"),
    "many headers": (POST + b"a: b\r\n" * 200 + b"\r\n", 431, "headers_too_large"),
}
"""What a client sends, and the status and code of the error."""

NOT_A_RESPONSE = {
    "words": b"garbage garbage\r\n\r\n",
    "header without colon": b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n",
    "large headers": b"HTTP/1.1 200 OK\r\na: " + b"x" * 100_000 + b"\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "cut in the headers": b"HTTP/1.1 200 OK\r\ncontent-le",
}
"""What a pod sends instead of a response."""


@pytest.mark.parametrize("mode", list(Mode))
async def test_bytes_that_are_no_request_get_an_error_in_openai_shape(mode: Mode) -> None:
    """In full duplex only until the router is asked: after that, responses pass through it."""
    sent = {name: each[0] for name, each in NOT_HTTP.items()}
    if mode is Mode.FULL_DUPLEX:
        del sent["chunk not a number"], sent["upgrade"], sent["websocket of responses"]
    options: dict[str, Any] = {}
    if mode is Mode.OVERRIDE_HOST:  # then without a router, too
        options = {"static_pods": ("127.0.0.1:1",), "failure_mode_allow": True}
    async with running_envoy(mode, f"127.0.0.1:{free_port()}", num_pods=1, **options) as envoy:
        answers = {name: await raw_request(envoy.port, data) for name, data in sent.items()}

    found = {name: (answer.status, answer.error_code) for name, answer in answers.items()}
    assert found == {name: NOT_HTTP[name][1:] for name in sent}


@pytest.mark.parametrize("mode", list(Mode))
async def test_where_upgrades_pass_the_router_refuses_a_websocket_of_responses(
    mode: Mode, pods: list[RunningPod]
) -> None:
    """Envoy Gateway and Istio let websockets pass; the client goes on by POST after a 426."""
    path = "GET /v1/{} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with RouterProcess(router_config(pods)) as router:
        options = BootstrapOptions(mode=mode, routers=(router.address,))
        bootstrap = yaml.safe_load(render(options))
        connection_manager(bootstrap)["upgrade_configs"] = [{"upgrade_type": "websocket"}]
        async with EnvoyProcess(yaml.safe_dump(bootstrap)) as envoy:
            responses = await raw_request(envoy.port, path.format("responses").encode())
            realtime = await raw_request(envoy.port, path.format("realtime").encode())

    assert (responses.status, responses.error_code) == (426, "no_websockets")
    assert "upgrade" not in responses.headers
    assert realtime.status == 404


async def answer_from(words: bytes) -> Answer:
    router = f"127.0.0.1:{free_port()}"
    async with (
        server_that_says(words) as pod,
        running_envoy(
            Mode.OVERRIDE_HOST,
            router,
            num_pods=1,
            static_pods=(pod,),
            failure_mode_allow=True,
        ) as envoy,
    ):
        return await raw_request(envoy.port, POST + b"content-length: 2\r\n\r\n{}")


@pytest.mark.parametrize("words", NOT_A_RESPONSE.values(), ids=NOT_A_RESPONSE)
async def test_a_pods_bytes_that_are_not_http_are_a_502_in_openai_shape(words: bytes) -> None:
    answer = await answer_from(words)

    assert (answer.status, answer.error_code) == (502, "bad_endpoint_answer")


async def test_a_502_of_a_pod_passes_unchanged() -> None:
    answer = await answer_from(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nours")

    assert (answer.status, answer.body) == (502, b"ours")
