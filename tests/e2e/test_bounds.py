"""What clients, pods and a router that hangs can make Envoy hold, and what turned away hear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import h2.config
import h2.connection
import h2.exceptions
import pytest
import pytest_asyncio

from extproc.envoyconfig import Mode
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import RunningPod, start_pod
from tests.e2e.conftest import pod_config, router_config, running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess, chat, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

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


def rss_bytes(envoy: EnvoyProcess) -> int:
    """The largest resident set that it has had."""
    lines = Path(f"/proc/{envoy.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def large_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """One that takes bodies as large as the uploads."""
    request = {"max_body_bytes": 16 * MIB}
    async with RouterProcess(router_config(pods, request=request)) as running:
        yield running


# --- memory ----------------------------------------------------------------------------------


async def upload(port: int) -> None:
    """All but the end of a large body, and then wait for whatever Envoy does."""
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
    """The same on a stream of an HTTP/2 connection."""
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
    """And small requests are served meanwhile where there is room, and all of them afterwards."""
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

        await eventually(some_are_turned_away, within_s=60)
        meanwhile = [await client.chat("only-1") for _ in range(60)]
        peak_bytes = rss_bytes(envoy)
        for each in uploads:
            each.cancel()
        await asyncio.wait(uploads)
        await eventually(lambda: _has_room(envoy))
        afterwards = [await client.chat("only-1") for _ in range(20)]

    assert peak_bytes < 1.5 * MAX_HEAP_BYTES
    assert set(map(told, meanwhile)) <= {"served", "gateway_full"}
    assert "served" in map(told, meanwhile)
    assert {told(answer) for answer in afterwards} == {"served"}


async def _has_room(envoy: EnvoyProcess) -> bool:
    name = "overload.envoy.resource_monitors.fixed_heap.pressure"
    return (await envoy.stats(name))[name] < 60


def told(answer: Answer) -> object:
    """`served`, or the code of an error that says when to come back."""
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


@asynccontextmanager
async def brisk_envoy(mode: Mode, pods: list[RunningPod]) -> AsyncIterator[EnvoyProcess]:
    """Half a second for a request to arrive."""
    more = {"destination": {"num_fallbacks": 2}} if mode is Mode.OVERRIDE_HOST else {}
    async with (
        RouterProcess(router_config(pods, **more)) as router,
        running_envoy(mode, router, num_pods=len(pods), request_timeout_s=0.5) as envoy,
    ):
        yield envoy


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_slow_body_ends_and_a_slow_answer_does_not(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    pod = await start_pod(pod_config(1, profile=replace(INSTANT, step_s=0.1)))
    body = chat("only-1", stream=True, max_tokens=20)
    release = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield body[:20]
        await release.wait()
        yield body[20:]

    try:
        async with brisk_envoy(mode, [pod]) as envoy:
            client = Client(envoy.url, http)
            answer = await client.request("POST", PATH, body)
            late = await client.request("POST", PATH, slow_body())
    finally:
        release.set()
        await pod.stop()

    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert (late.status, late.error_code) == (408, "request_timeout")
