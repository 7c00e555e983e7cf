"""Our wire behind a real Envoy 1.40: every body mode, holding, leaving, stopping, draining.

In every test Envoy's own counters say that it was content: `streams_failed` and
`spurious_msgs_received` stay 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.wire import Abuse, Limits
from tests.commandline import output_of
from tests.waiting import eventually
from tests.wire.wire_envoy import DuplexProcessor, Processor, Proxy, envoy, has_envoy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not has_envoy, reason="no envoy binary (extra `demo`)"),
]

h2load = shutil.which("h2load")
SMALL = b'{"model": "adapter-1", "prompt": "' + b"x" * 260 + b'"}'


async def post(port: int, body: bytes, headers: str = "") -> bytes:
    """One HTTP/1.1 request; the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1 HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    writer.write(head.encode() + headers.encode() + b"\r\n" + body)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


async def assert_content(proxy: Proxy) -> dict[str, int]:
    """Envoy has nothing to complain about, and our books are balanced."""
    stats = await proxy.stats("ext_proc")
    assert stats["streams_failed"] == 0
    assert stats["spurious_msgs_received"] == 0
    counters = proxy.server.counters
    assert counters.session_errors == 0
    assert counters.connection_faults == 0
    return stats


@pytest.mark.parametrize(
    "mode", ["NONE", "BUFFERED", "BUFFERED_PARTIAL", "STREAMED", "FULL_DUPLEX_STREAMED"]
)
@pytest.mark.parametrize("size_bytes", [300, 107_000])
async def test_every_body_mode(tmp_path: Path, mode: str, size_bytes: int) -> None:
    processor = {
        "FULL_DUPLEX_STREAMED": DuplexProcessor,
        "STREAMED": Streamed,
        "NONE": HeadersOnly,
    }.get(mode, Processor)
    async with envoy(tmp_path, body_mode=mode, processor=processor) as proxy:
        answers = await asyncio.gather(*(post(proxy.port, b"x" * size_bytes) for _ in range(40)))

        assert all(b" 200 OK" in answer and answer.endswith(b"served") for answer in answers)
        stats = await assert_content(proxy)
        assert stats["streams_started"] == 40
        assert proxy.server.counters.streams_answered == 40
        assert all(session.is_closed for session in proxy.opened)


class HeadersOnly(Processor):
    """Needs no body."""

    def _headers(self, is_last: bool) -> None:
        super()._headers(True)


class Streamed(Processor):
    """Answers every chunk of a streamed body."""

    def _body(self, request: pb.ProcessingRequest) -> None:
        self._call.send(pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString())
        if request.request_body.end_of_stream:
            self._call.end()


async def test_unix_socket(tmp_path: Path) -> None:
    async with envoy(tmp_path, is_unix=True) as proxy:
        assert b" 200 OK" in await post(proxy.port, SMALL)
        await assert_content(proxy)


async def test_repeated_calls_use_cached_header_blocks(tmp_path: Path) -> None:
    async with envoy(tmp_path) as proxy:
        for _ in range(20):
            assert b" 200 OK" in await post(proxy.port, SMALL)

        assert proxy.server.counters.header_blocks_cached >= 15
        await assert_content(proxy)


async def test_requests_are_held_beyond_the_message_timeout(tmp_path: Path) -> None:
    held: list[Callable[[], None]] = []
    async with envoy(tmp_path, message_timeout="4s", hold=held.append) as proxy:
        waiting = [asyncio.ensure_future(post(proxy.port, SMALL)) for _ in range(200)]
        await eventually(lambda: len(held) >= 200)
        await asyncio.sleep(5)
        assert not any(request.done() for request in waiting)
        for release in held:
            release()
        answers = await asyncio.gather(*waiting)

        assert all(b" 200 OK" in answer for answer in answers)
        stats = await assert_content(proxy)
        assert stats["message_timeouts"] == 0
        assert stats["override_message_timeout_received"] == 200


async def test_held_clients_that_leave_are_forgotten_at_once(tmp_path: Path) -> None:
    held: list[Callable[[], None]] = []
    async with envoy(tmp_path, hold=held.append) as proxy:
        waiting = [asyncio.ensure_future(post(proxy.port, SMALL)) for _ in range(100)]
        await eventually(lambda: len(held) >= 100)
        for request in waiting:
            request.cancel()
        await asyncio.wait(waiting)
        await eventually(lambda: not proxy.server.counters.streams_open)
        for release in held:
            release()

        assert all(session.is_closed for session in proxy.opened)
        assert proxy.server.counters.streams_opened == 100
        assert proxy.server.counters.abuse[Abuse.FRAME_FLOOD] == 0
        assert b" 200 OK" in await _released(proxy, held)
        await assert_content(proxy)


async def _released(proxy: Proxy, held: list[Callable[[], None]]) -> bytes:
    held.clear()
    request = asyncio.ensure_future(post(proxy.port, SMALL))
    await eventually(lambda: held)
    held[0]()
    return await request


async def test_envoy_that_stops_in_the_middle_of_a_hold_is_noticed(tmp_path: Path) -> None:
    held: list[Callable[[], None]] = []
    limits = Limits(keepalive_s=0.3, keepalive_timeout_s=0.5)
    async with envoy(tmp_path, hold=held.append, limits=limits) as proxy:
        request = asyncio.ensure_future(post(proxy.port, SMALL))
        await eventually(lambda: held)
        os.kill(proxy.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: proxy.opened[0].is_closed)
        finally:
            os.kill(proxy.pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            await request

        assert proxy.server.counters.abuse[Abuse.HALF_OPEN] == 1
        assert proxy.server.counters.connections_open == 0
        assert proxy.server.counters.streams_lost == 1


async def test_drain_loses_no_request(tmp_path: Path) -> None:
    held: list[Callable[[], None]] = []
    async with envoy(tmp_path, hold=held.append) as proxy:
        waiting = [asyncio.ensure_future(post(proxy.port, SMALL)) for _ in range(20)]
        await eventually(lambda: len(held) >= 20)
        drained = asyncio.ensure_future(proxy.server.drain(20))
        await asyncio.sleep(0.3)
        assert not drained.done()
        for release in held:
            release()
        answers = await asyncio.gather(*waiting)

        assert await drained
        assert all(b" 200 OK" in answer for answer in answers)
        assert proxy.server.counters.streams_lost == 0
        await assert_content(proxy)


@pytest.mark.skipif(h2load is None, reason="no h2load (Debian package nghttp2-client)")
async def test_load_leaves_nothing_behind(tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(SMALL)
    async with envoy(tmp_path) as proxy:
        load = ("-n", "3000", "-c", "20", "-m", "10", "-d", body)
        url = f"http://127.0.0.1:{proxy.port}/v1"
        output = await asyncio.to_thread(output_of, str(h2load), *load, url)

        assert "3000 succeeded, 0 failed" in output
        stats = await assert_content(proxy)
        assert stats["streams_started"] == 3000
        assert proxy.server.counters.streams_open == 0
        assert all(session.is_closed for session in proxy.opened)
