"""Large bodies, many at once: the router's memory has a bound, and small requests do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat, peak_memory_bytes
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

MIB = 1024 * 1024
PART_BYTES = 256 * 1024
PATH = "/v1/chat/completions"
MAX_BODY_BYTES = 16 * MIB
BUDGET_BYTES = 128 * MIB
MEMORY_BYTES = 512 * MIB
"""Of the container that such a budget is the default for."""
NUM_STALLED, NUM_WHOLE, NUM_SMALL = 36, 80, 40
LARGE = chat("only-1", padding_bytes=15_000_000, is_model_last=True)
MODES = [BodyDelivery.BUFFERED, BodyDelivery.STREAMED, BodyDelivery.FULL_DUPLEX]


@asynccontextmanager
async def stack(
    pods: Sequence[RunningPod], body: BodyDelivery
) -> AsyncIterator[tuple[RouterProcess, EnvoyProcess]]:
    """A router of its own, and an Envoy that takes bodies of 16 MiB to it."""
    request = {"max_body_bytes": MAX_BODY_BYTES, "max_bytes_in_memory": BUDGET_BYTES}
    async with (
        RouterProcess(router_config(pods, preset="founding", request=request)) as router,
        running_envoy(
            Mode.ORIGINAL_DST,
            router,
            request_body=body,
            max_body_bytes=MAX_BODY_BYTES,
            message_timeout_s=60,
            max_heap_bytes=16_384 * MIB,  # the router's limit is tried here, not Envoy's
        ) as envoy,
    ):
        yield router, envoy


async def upload(envoy: EnvoyProcess, num_bytes: int = len(LARGE)) -> tuple[int, bytes]:
    """Send so much of a large body; status and the whole answer.

    On a plain socket: a response that comes while we send is followed by a reset, and asyncio's
    streams then drop what was not read.
    """
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", envoy.port)) as connection:
        connection.setblocking(False)
        answer = asyncio.create_task(read_answer(connection))
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        try:
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(
                    connection, f"{head}content-length: {len(LARGE)}\r\n\r\n".encode()
                )
                for start in range(0, num_bytes, PART_BYTES):
                    if answer.done():
                        break
                    part = memoryview(LARGE)[start : min(start + PART_BYTES, num_bytes)]
                    await loop.sock_sendall(connection, part)
            received = await answer
        finally:
            answer.cancel()
    return int(received.split(b" ", 2)[1]), received


async def read_answer(connection: socket.socket) -> bytes:
    """Return all bytes until a response with a content-length is whole."""
    received = b""
    while True:
        part = await asyncio.get_running_loop().sock_recv(connection, 65_536)
        if not part:
            raise ConnectionError("closed before there was an answer")
        received += part
        head, is_whole, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if is_whole and len(body) >= (int(length.group(1)) if length else 1):
            return received


async def small_requests(client: Client) -> list[int]:
    """Requests of ordinary size, one after the other."""
    statuses = []
    for _ in range(NUM_SMALL):
        answer = await client.request("POST", PATH, chat("only-1"))
        statuses.append(answer.status)
        await asyncio.sleep(0.05)
    return statuses


async def has_begun(envoy: EnvoyProcess, num_requests: int) -> bool:
    name = "http.openai.downstream_rq_total"
    return (await envoy.stats(name))[name] >= num_requests


@pytest.mark.few(1)
@pytest.mark.parametrize("body", [pytest.param(MODES[0], marks=pytest.mark.long), *MODES[1:]])
async def test_stalled_and_whole_uploads_at_once_neither_end_the_router_nor_harm_others(
    body: BodyDelivery, pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with stack(pods, body) as (router, envoy):
        stalled = [
            asyncio.create_task(upload(envoy, len(LARGE) - 1_000_000)) for _ in range(NUM_STALLED)
        ]
        small = asyncio.create_task(small_requests(Client(envoy.url, http)))
        await eventually(lambda: has_begun(envoy, NUM_STALLED))
        whole = [asyncio.create_task(upload(envoy)) for _ in range(NUM_WHOLE)]
        answers = await asyncio.wait_for(asyncio.gather(*whole), 120)

        assert await small == [200] * NUM_SMALL
        assert peak_memory_bytes(router) < MEMORY_BYTES
        for status, answer in [*answers, *(task.result() for task in stalled if task.done())]:
            if status != 200:
                assert (status, b'"code":"memory"' in answer) == (429, True), answer
                assert b"\r\nretry-after: 1\r\n" in answer
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)

        async def is_freed() -> bool:
            return await router.counter("extproc_body_bytes") == 0

        await eventually(is_freed)
        assert (await upload(envoy))[0] == 200
