"""What clients can make Envoy hold, and the errors of those that it turns away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import h2.config
import h2.connection
import h2.exceptions
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import behind_envoy, pod_config, router_config, running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess, chat, peak_memory_bytes
from tests.fakepods import running_pods
from tests.waiting import eventually

PATH = "/v1/chat/completions"
MIB = 1024 * 1024
BODY_BYTES = 15 * MIB
MAX_HEAP_BYTES = 192 * MIB
NUM_UPLOADS = 40
"""Three times the heap's limit, together."""
HEAD = (
    f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"content-length: {BODY_BYTES}\r\n\r\n"
).encode()
CHUNK = b" " * 65536


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def large_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """A router that accepts bodies as large as the uploads."""
    request = {"max_body_bytes": 16 * MIB}
    async with RouterProcess(router_config(pods, request=request)) as running:
        yield running


# --- memory ----------------------------------------------------------------------------------


async def upload(port: int) -> None:
    """Send all but the end of a large body, and wait for Envoy to respond."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(HEAD)
            for _ in range(BODY_BYTES // len(CHUNK) - 1):
                writer.write(CHUNK)
                await writer.drain()
            await reader.read()
    finally:
        writer.close()


async def upload_by_http2(port: int) -> None:
    """Do the same on a stream of an HTTP/2 connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration())
    connection.initiate_connection()
    pseudo = {":method": "POST", ":path": PATH, ":scheme": "http", ":authority": "x"}
    connection.send_headers(1, [*pseudo.items(), ("content-type", "application/json")])
    sent_bytes = 0
    try:
        with suppress(ConnectionError, h2.exceptions.ProtocolError):
            while True:
                window = connection.local_flow_control_window(1)
                if window and sent_bytes + 16384 < BODY_BYTES:
                    connection.send_data(1, CHUNK[: min(window, 16384)])
                    sent_bytes += min(window, 16384)
                    writer.write(connection.data_to_send())
                    await writer.drain()
                    continue
                writer.write(connection.data_to_send())
                received = await reader.read(65536)
                if not received:
                    return
                connection.receive_data(received)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("start", "counter"),
    [
        (upload, "overload.envoy.load_shed_points.http1_server_abort_dispatch.shed_load_count"),
        (upload_by_http2, "envoy.overload_actions.reset_high_memory_stream.count"),
    ],
    ids=["http1", "http2"],
)
async def test_uploads_are_turned_away_before_they_fill_the_memory(
    start: Callable[[int], Coroutine[None, None, None]],
    counter: str,
    large_router: RouterProcess,
    http: aiohttp.ClientSession,
) -> None:
    """Small requests are served meanwhile where there is room, and all of them afterwards."""
    async with running_envoy(
        Mode.ORIGINAL_DST,
        large_router,
        max_body_bytes=16 * MIB,
        max_heap_bytes=MAX_HEAP_BYTES,
    ) as envoy:
        client = Client(envoy.url, http)
        uploads = [asyncio.create_task(start(envoy.port)) for _ in range(NUM_UPLOADS)]

        async def some_are_turned_away() -> bool:
            return (await envoy.stats(counter)).get(counter, 0) >= NUM_UPLOADS // 4

        await eventually(some_are_turned_away)
        meanwhile: list[Answer] = []

        async def one_is_served() -> bool:
            meanwhile.extend([await client.chat("only-1") for _ in range(20)])
            return "served" in map(outcome, meanwhile)

        await eventually(one_is_served)
        peak_bytes = peak_memory_bytes(envoy)
        for each in uploads:
            each.cancel()
        await asyncio.wait(uploads)
        await eventually(lambda: _has_room(envoy))
        afterwards = [await client.chat("only-1") for _ in range(20)]

    assert peak_bytes < 1.5 * MAX_HEAP_BYTES
    assert set(map(outcome, meanwhile)) <= {"served", "gateway_full"}
    assert set(map(outcome, afterwards)) == {"served"}


@pytest.mark.long
async def test_lists_that_nobody_reads_are_not_kept(http: aiohttp.ClientSession) -> None:
    """Without end: an answer that is written whole makes a connection idle, for an hour."""
    # Longer than what the kernel takes of an answer to this machine itself.
    listed = [[f"{pod}-{number:04d}-{'x' * 240}" for number in range(5000)] for pod in range(2)]
    names = (PodConfig(f"pod-{pod}", adapters=[*listed[pod], "only-1"]) for pod in range(2))
    async with (
        running_pods(*names) as pods,
        RouterProcess(router_config(pods, request={"max_list_bytes_per_s": 1024 * MIB})) as router,
        running_envoy(Mode.ORIGINAL_DST, router, max_heap_bytes=MAX_HEAP_BYTES) as envoy,
    ):
        client = Client(envoy.url, http)
        silent = [ask_and_never_read(envoy.port) for _ in range(NUM_UPLOADS)]
        await eventually(lambda: _ended(envoy, "downstream_cx_idle_timeout", NUM_UPLOADS // 2))
        await eventually(lambda: _has_room(envoy))
        afterwards = [await client.chat("only-1") for _ in range(20)]
        for each in silent:
            each.close()

    assert set(map(outcome, afterwards)) == {"served"}


def ask_and_never_read(port: int) -> socket.socket:
    """A client that asks for the list of models, with room for a few KB of it."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", port))
    opened.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    return opened


async def _ended(envoy: EnvoyProcess, why: str, num: int) -> bool:
    name = f"http.openai.{why}"
    return (await envoy.stats(name))[name] >= num


async def _has_room(envoy: EnvoyProcess) -> bool:
    name = "overload.envoy.resource_monitors.fixed_heap.pressure"
    return (await envoy.stats(name))[name] < 60


def outcome(answer: Answer) -> object:
    """`served`, or the code of an error that says when to retry."""
    if answer.status == 200:
        return "served"
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    return answer.error_code


async def test_connections_over_the_limit_are_closed_and_the_others_served(
    router: RouterProcess,
) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    async with running_envoy(Mode.ORIGINAL_DST, router, max_connections=3) as envoy:
        opened = [await asyncio.open_connection("127.0.0.1", envoy.port) for _ in range(3)]
        await eventually(lambda: _has_connections(envoy, 3))
        extra, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        with suppress(ConnectionError):
            assert await extra.read() == b""
        for _, each in opened:
            each.write(request)
        lines = [await reader.readline() for reader, _ in opened]
        for each in (writer, *(writer for _, writer in opened)):
            each.close()

    assert lines == [b"HTTP/1.1 200 OK\r\n"] * 3


async def _has_connections(envoy: EnvoyProcess, num: int) -> bool:
    name = "http.openai.downstream_cx_active"
    return (await envoy.stats(name))[name] == num


# --- time ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_slow_body_times_out_and_a_slow_response_does_not(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    config = pod_config(1, profile=replace(INSTANT, step_s=0.1))
    fallbacks = {"num_fallbacks": 2 if mode is Mode.OVERRIDE_HOST else 0}
    options: dict[str, Any] = {"mode": mode, "num_pods": 1, "request_timeout_s": 0.5}
    body = chat("only-1", stream=True, max_tokens=20)
    release = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield body[:20]
        await release.wait()
        yield body[20:]

    async with (
        running_pods(config) as pods,
        behind_envoy(router_config(pods, destination=fallbacks), http, **options) as (_, client),
    ):
        answer = await client.request("POST", PATH, body)
        late = await client.request("POST", PATH, slow_body())
        release.set()

    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert (late.status, late.error_code) == (408, "request_timeout")
