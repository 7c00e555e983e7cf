"""No client reaches an address, or a path of a pod, that the router did not choose.

In every configuration, with the router alive, dead, and ending its RPCs without a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import Mode, RequestBody
from extproc.lab.fakepod.pod import RunningPod
from extproc.wire.rpc import Method
from extproc.wire.server import serve
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess, chat, raw_request
from tests.servers import tcp_server
from tests.wire.fake_call import Idle

DESTINATION = "x-gateway-destination-endpoint"
STEERING_HEADERS = (
    DESTINATION,
    DESTINATION.upper(),
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-envoy-original-dst-host",
    "x-envoy-original-url",
    "x-extproc-dial",
    "x-extproc-dial-next",
    "x-forwarded-host",
    "x-host",
)
"""Headers with which a client might name the address that it wants to reach."""

FORBIDDEN_PATHS = (
    "/",
    "/metrics",
    "/metrics/",
    "/metrics/?name[]=vllm:num_requests_running",
    "/health/",
    "/health/../metrics",
    "/health%2f..%2fmetrics",
    "/v1/realtime",
    "/inference/v1/abort_requests",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/server_info",
    "/reset_prefix_cache",
    "/invocations",
    "/docs",
    "/openapi.json",
    "/debug/engine",
    "/v1",
    "/v1/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/load_lora_adapter?x=/v1/completions",
    "/v1/completions/",
    "/v1/completions/../load_lora_adapter",
    "/v1/completions/../../metrics",
    "/v1/models/../load_lora_adapter",
    "/v1/models/..%2fload_lora_adapter",
    "/v1/models/..%2F..%2Fmetrics",
    "/v1/models/%2e%2e%2fload_lora_adapter",
    "/v1/models/%2e%2e/load_lora_adapter",
    "/v1/models/a%2F..%2F..%2F..%2Fmetrics",
    "/v1/models/..%5cload_lora_adapter",
    "/v1/models/%252e%252e%252fload_lora_adapter",
    "/v1/models%2f..%2f..%2fmetrics",
    "/v1/responses/../load_lora_adapter",
    "/v1/responses/..;/load_lora_adapter",
    "/v1/completions;/../load_lora_adapter",
    "/v1/completions%2f..%2fload_lora_adapter",
    "/v1/%2e%2e/metrics",
    "/v1/%2E%2E/metrics",
    "/v1/%252e%252e/metrics",
    "/v1%2fload_lora_adapter",
    "/v1%5cload_lora_adapter",
    "/v1\\load_lora_adapter",
    "//metrics",
    "/v1//load_lora_adapter",
    "/v1/./load_lora_adapter",
    "/%76%31/load_lora_adapter",
    "/V1/load_lora_adapter",
    "/v1/load_lora_adapter#/v1/completions",
    "/v1/load_lora_adapter%3f/v1/completions",
    "/v1/load_lora_adapter%00/v1/completions",
)
"""Written as a client would: none may reach a pod."""

ANSWERED_PATHS = ("/health", "/ping", "/version")
"""What the router says about itself."""


@dataclass
class Victim:
    """An address in the network that must not be reached through the gateway."""

    address: str
    num_connections: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def victim() -> AsyncIterator[Victim]:
    async def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.num_connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret")
        writer.close()

    async with tcp_server(on_connection) as address:
        found = Victim(address)
        yield found


@dataclass(frozen=True)
class Gateway:
    """A running Envoy."""

    mode: Mode
    envoy: EnvoyProcess
    client: Client
    chooses: bool = False


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=list(Mode), ids=str)
async def gateway(
    request: pytest.FixtureRequest,
    router: RouterProcess,
    fallback_router: RouterProcess,
    http: aiohttp.ClientSession,
) -> AsyncIterator[Gateway]:
    """Each configuration with a router that responds."""
    mode: Mode = request.param
    asked = fallback_router if mode is Mode.OVERRIDE_HOST else router
    async with running_envoy(mode, asked) as envoy:
        yield Gateway(mode, envoy, Client(envoy.url, http))


UNDECIDED = [
    pytest.param((mode, router_state, fails_open), id=f"{mode}-{router_state}-{fails_open}")
    for mode in Mode
    for router_state in ("dead", "silent")
    for fails_open in ("as-configured", "fails-open")
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=UNDECIDED)
async def undecided_gateway(
    request: pytest.FixtureRequest, pods: list[RunningPod], http: aiohttp.ClientSession
) -> AsyncIterator[Gateway]:
    """Each configuration without a choice: nobody listens, or RPCs end with OK and no message."""
    mode, state, fails_open = request.param
    server = await serve([SILENT])
    if state == "dead":
        await server.close()
    options: dict[str, Any] = {}
    if fails_open == "fails-open":
        options["failure_mode_allow"] = True
    if mode is Mode.OVERRIDE_HOST:
        options["static_pods"] = tuple(pod.address for pod in pods)
    chooses = mode is Mode.OVERRIDE_HOST and fails_open == "fails-open"
    async with running_envoy(mode, server.address, **options) as envoy:
        yield Gateway(mode, envoy, Client(envoy.url, http), chooses)
    await server.close()


class _Silent(Idle):
    """Ends each RPC with OK at its first message."""

    def receive(self, message: bytes) -> None:
        self.call.end()

    def half_close(self) -> None:
        self.call.end()


SILENT = Method("/envoy.service.ext_proc.v3.ExternalProcessor/Process", _Silent)


def num_requests(pods: list[RunningPod]) -> int:
    """How many requests of clients reached any pod."""
    return sum(len(pod.pod.last_requests) for pod in pods)


def forget_requests(pods: list[RunningPod]) -> None:
    for pod in pods:
        pod.pod.last_requests.clear()


# --- headers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["an-address", "another-pod"])
async def test_a_header_that_names_a_destination_does_not_steer(
    gateway: Gateway, pods: list[RunningPod], victim: Victim, names: str
) -> None:
    target = victim.address if names == "an-address" else pods[0].address
    answers = [
        await gateway.client.chat("only-1", headers={header: target}) for header in STEERING_HEADERS
    ]

    assert {answer.served_by for answer in answers} == {"pod-1"}
    assert victim.num_connections == 0


async def test_a_header_sent_twice_or_in_trailers_does_not_steer(
    gateway: Gateway, victim: Victim
) -> None:
    body = chat("only-1")
    name, address = DESTINATION.encode(), victim.address.encode()
    answer = await raw_request(
        gateway.envoy.port,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        b"%s: %s\r\n%s: 127.0.0.1:1\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\n%s: %s\r\n\r\n" % (name, address, name, len(body), body, name, address),
    )

    assert answer.served_by == "pod-1"
    assert victim.num_connections == 0


async def test_a_pod_sees_the_chosen_destination_and_no_other(
    gateway: Gateway, pods: list[RunningPod], victim: Victim
) -> None:
    forget_requests(pods)
    await gateway.client.chat("only-2", headers={DESTINATION: victim.address})

    [seen] = pods[2].pod.last_requests
    headers = seen["headers"]
    assert isinstance(headers, list)
    values = [value for name, value in headers if name == DESTINATION]
    assert values == [pods[2].address]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/models/", "/v1/responses/resp_1", "/v1/models/nobody"),
        *("/v1/models/nobody%2Ftheir", *ANSWERED_PATHS),
    ],
)
async def test_a_request_that_the_router_answers_reaches_nobody(
    gateway: Gateway, pods: list[RunningPod], victim: Victim, path: str
) -> None:
    forget_requests(pods)
    for method in ("GET", "HEAD"):
        await gateway.client.request(method, path, headers={DESTINATION: victim.address})

    assert victim.num_connections == 0
    assert num_requests(pods) == 0


async def test_a_client_cannot_shorten_the_timeout_or_ask_for_retries(gateway: Gateway) -> None:
    """`x-envoy-*` headers are Envoy's own."""
    headers = {"x-envoy-upstream-rq-timeout-ms": "1", "x-envoy-max-retries": "100"}
    answer = await gateway.client.chat("only-1", headers=headers)

    assert answer.status == 200


async def test_a_client_cannot_set_the_request_id(gateway: Gateway) -> None:
    """A client that repeats an id could end another's request in the router's counts."""
    answer = await gateway.client.chat("only-1", headers={"x-request-id": "mine"})

    assert answer.headers["x-request-id"] not in ("", "mine")


async def test_without_a_choice_no_header_steers(
    undecided_gateway: Gateway, victim: Victim
) -> None:
    answers = [
        await undecided_gateway.client.chat("only-1", headers={header: victim.address})
        for header in STEERING_HEADERS
    ]

    assert victim.num_connections == 0
    for answer in answers:
        check_undecided(undecided_gateway, answer)


def check_undecided(gateway: Gateway, answer: Answer) -> None:
    """A clear error; a pod of Envoy's own choice only where it knows the pods and fails open."""
    if gateway.chooses:
        assert answer.served_by.startswith("pod-")
    else:
        assert answer.status == 503
        assert answer.error_code in ("router_unavailable", "endpoint_unavailable")
        assert answer.headers["retry-after"] == "1"


# --- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_path_that_is_not_listed_never_reaches_a_pod(
    gateway: Gateway, pods: list[RunningPod], method: str
) -> None:
    assert await not_refused(gateway, pods, method) == {}


async def test_without_a_choice_such_a_path_never_reaches_a_pod_either(
    undecided_gateway: Gateway, pods: list[RunningPod]
) -> None:
    assert await not_refused(undecided_gateway, pods, "POST") == {}


async def not_refused(
    gateway: Gateway, pods: list[RunningPod], method: str
) -> dict[str, tuple[Answer, int]]:
    """Forbidden paths that got anything but an error of Envoy's or the router's."""
    body = b'{"model": "only-1", "lora_name": "evil", "lora_path": "/evil"}'
    found = {}
    for path in FORBIDDEN_PATHS + (ANSWERED_PATHS if method == "POST" else ()):
        forget_requests(pods)
        answer = await raw_request(
            gateway.envoy.port,
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body,
        )
        # 503: where responses pass through the router, Envoy's own errors do, too.
        if answer.status not in (400, 404, 503) or answer.served_by or num_requests(pods):
            found[path] = (answer, num_requests(pods))
    return found


@pytest.mark.parametrize("path", [*ANSWERED_PATHS, "/v1/models/a%2fb", "/v1/models/..%2Fmetrics"])
async def test_without_a_choice_what_the_router_answers_reaches_nobody(
    undecided_gateway: Gateway, pods: list[RunningPod], path: str
) -> None:
    """Though a pod would serve it, where Envoy knows the pods and fails open."""
    forget_requests(pods)
    answer = await raw_request(
        undecided_gateway.envoy.port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    )

    assert (answer.status, answer.error_code) == (503, "router_unavailable")
    assert answer.headers["retry-after"] == "1"
    assert num_requests(pods) == 0


SERVED = {
    "/v1/chat/completions": {"POST"},
    "/v1/audio/speech": {"POST"},
    "/v1/models/only-1": {"GET", "HEAD"},
    "/v1/responses/resp_1": {"GET", "HEAD", "DELETE"},
    "/v1/responses/resp_1/input_items": {"GET", "HEAD"},
    "/v1/responses/resp_1/cancel": {"POST"},
}
"""Paths, and the methods that the router lets through there."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "FOO")


@pytest.mark.parametrize("path", SERVED)
async def test_without_a_choice_no_other_method_reaches_a_pod(
    undecided_gateway: Gateway, pods: list[RunningPod], path: str
) -> None:
    reached = set()
    for method in METHODS:
        forget_requests(pods)
        with suppress(asyncio.IncompleteReadError):  # an answer to HEAD has no body
            await raw_request(
                undecided_gateway.envoy.port,
                f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                "content-length: 0\r\n\r\n".encode(),
            )
        if num_requests(pods):
            reached.add(method)

    assert reached <= SERVED[path]


@pytest.mark.parametrize(
    "start_line",
    [
        "CONNECT 127.0.0.1:80 HTTP/1.1",
        "POST http://victim/v1/load_lora_adapter HTTP/1.1",
        "POST http://victim/metrics HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "POST v1/completions HTTP/1.1",
        "POST /v1/load_lora_adapter HTTP/1.0",
    ],
)
async def test_other_forms_of_a_request_line_reach_nobody(
    gateway: Gateway, pods: list[RunningPod], start_line: str
) -> None:
    forget_requests(pods)
    # Envoy may close the connection without a response.
    with suppress(asyncio.IncompleteReadError):
        answer = await raw_request(
            gateway.envoy.port,
            f"{start_line}\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode(),
        )
        assert answer.status in (400, 404, 405, 426)

    assert num_requests(pods) == 0


# --- what the router gets to see -------------------------------------------------------------


@pytest.mark.parametrize("body", [RequestBody.HEADERS_ONLY, RequestBody.BUFFERED])
async def test_metadata_namespaces_cannot_be_written_by_a_body(
    router: RouterProcess, http: aiohttp.ClientSession, victim: Victim, body: RequestBody
) -> None:
    """Only the model is read from a body, whatever else it claims to be."""
    claim: dict[str, Any] = {"envoy.lb": {DESTINATION: victim.address}, DESTINATION: victim.address}
    async with running_envoy(Mode.ORIGINAL_DST, router, request_body=body) as envoy:
        answer = await Client(envoy.url, http).chat("only-1", metadata=claim, **claim)

    assert answer.served_by == "pod-1"
    assert victim.num_connections == 0
