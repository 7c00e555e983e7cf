"""Our wire against clients that other people wrote: grpcio, grpclib, h2, curl, nghttp2, Node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
import uvloop
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import GRPCError

from extproc.wire.server import WireServer
from tests.waiting import eventually
from tests.wire.rawcodec import RawCodec
from tests.wire.wire_echo import ECHO, FAIL, WATCH, grpcio_echo, running, stream

SIZES = [0, 1, 300, 16_379, 16_380, 70_000, 1_000_000]


async def run_tool(*command: str, stdin: bytes | None = None) -> tuple[int, bytes]:
    """Run a program to its end; its code and what it printed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode or 0, output


def needs(tool: str, package: str) -> pytest.MarkDecorator:
    """Skip where a program is not installed."""
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"no {tool} ({package})")


# ---- grpcio


@pytest.mark.parametrize("size_bytes", SIZES)
async def test_grpcio_gets_its_messages_back(size_bytes: int) -> None:
    async with running() as (server, _):
        bodies = [os.urandom(size_bytes) for _ in range(3)]

        assert await asyncio.to_thread(grpcio_echo, server.address, bodies) == bodies


async def test_grpcio_reads_status_and_details() -> None:
    async with running() as (server, _):
        with pytest.raises(grpc.RpcError) as failed:
            await asyncio.to_thread(grpcio_echo, server.address, [b"x"], FAIL)
        with pytest.raises(grpc.RpcError) as unknown:
            await asyncio.to_thread(grpcio_echo, server.address, [b"x"], "/no.Such/Method")
        with pytest.raises(grpc.RpcError) as raised:
            await asyncio.to_thread(grpcio_echo, server.address, [b"raise"])

    assert (failed.value.code().name, failed.value.details()) == (
        "FAILED_PRECONDITION",
        "50 % café",
    )
    assert unknown.value.code().name == "UNIMPLEMENTED"
    assert raised.value.code().name == "INTERNAL"


async def test_grpcio_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "wire.sock")
    async with running(path=path) as (server, _):
        assert server.address == f"unix:{path}"
        assert await asyncio.to_thread(grpcio_echo, server.address, [b"x"]) == [b"x"]

    assert not Path(path).exists()


async def test_grpcio_deadline_ends_the_session() -> None:
    async with running() as (server, sessions):

        def watch() -> str:
            with grpc.insecure_channel(server.address) as channel:
                call = stream(channel, WATCH)(iter([b"x"]), timeout=0.3)
                with pytest.raises(grpc.RpcError) as late:
                    list(call)
                return str(late.value.code().name)

        assert await asyncio.to_thread(watch) in ("DEADLINE_EXCEEDED", "CANCELLED")
        await eventually(lambda: sessions[0].num_closed == 1)


async def test_many_grpcio_calls_at_once() -> None:
    async with running() as (server, sessions):

        def calls() -> int:
            with grpc.insecure_channel(server.address) as channel:
                method: Any = channel.unary_unary(ECHO, None, None)
                futures = [method.future(b"%d" % i, timeout=60) for i in range(300)]
                return sum(future.result() == b"%d" % i for i, future in enumerate(futures))

        assert await asyncio.to_thread(calls) == 300
        assert len(sessions) == 300


# ---- grpclib


@contextlib.asynccontextmanager
async def grpclib_channel(server: WireServer) -> AsyncIterator[Channel]:
    """A grpclib channel that sends bytes."""
    channel = Channel("127.0.0.1", server.port, codec=RawCodec())
    try:
        yield channel
    finally:
        channel.close()


@pytest.mark.parametrize("size_bytes", SIZES)
async def test_grpclib_gets_its_messages_back(size_bytes: int) -> None:
    async with running() as (server, _), grpclib_channel(server) as channel:
        body = os.urandom(size_bytes)
        method: Any = StreamStreamMethod(channel, ECHO, bytes, bytes)
        got = await asyncio.wait_for(method([body, body]), 60)
        one: Any = UnaryUnaryMethod(channel, ECHO, bytes, bytes)

        assert got == [body, body]
        assert await one(body) == body


async def test_grpclib_reads_status_and_details() -> None:
    async with running() as (server, _), grpclib_channel(server) as channel:
        method: Any = UnaryUnaryMethod(channel, FAIL, bytes, bytes)
        with pytest.raises(GRPCError) as failed:
            await method(b"x")

    assert failed.value.status.name == "FAILED_PRECONDITION"
    assert failed.value.message == "50 % café"


# ---- the h2 library


def h2_echo(port: int, body: bytes, window_bytes: int) -> bytes:
    """One echo with the h2 library on a blocking socket; it checks us as strictly as it can."""
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
    connection.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", ECHO),
            (":authority", "h2"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ],
    )
    rest, got = b"\0" + len(body).to_bytes(4, "big") + body, b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        while True:
            while rest and (room := connection.local_flow_control_window(1)):
                size = min(room, connection.max_outbound_frame_size, len(rest))
                connection.send_data(1, rest[:size], end_stream=size == len(rest))
                rest = rest[size:]
            sock.sendall(connection.data_to_send())
            for event in connection.receive_data(sock.recv(65_536)):
                if isinstance(event, h2.events.DataReceived):
                    got += event.data
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, h2.events.StreamEnded):
                    return got
                assert not isinstance(event, h2.events.ConnectionTerminated)


@pytest.mark.parametrize("window_bytes", [1_000, 65_535, 10_000_000])
async def test_h2_finds_no_fault_with_us(window_bytes: int) -> None:
    async with running() as (server, _):
        body = os.urandom(200_000)
        got = await asyncio.to_thread(h2_echo, server.port, body, window_bytes)

        assert got[5:] == body


# ---- programs


@needs("curl", "Debian package curl")
async def test_curl_gets_its_message_back(tmp_path: Path) -> None:
    async with running() as (server, _):
        code, output = await run_tool(
            "curl", "-sS", "--http2-prior-knowledge", "-H", "content-type: application/grpc",
            "-H", "te: trailers", "--data-binary", "@-", "-D", str(tmp_path / "headers"),
            f"http://{server.address}{ECHO}", stdin=b"\0\0\0\0\x05hello",
        )  # fmt: skip
        status, _ = await run_tool(
            "curl", "-sS", "--http2-prior-knowledge", "-f", f"http://{server.address}{ECHO}"
        )

    assert (code, output) == (0, b"\0\0\0\0\x05hello")
    assert "grpc-status: 0" in (tmp_path / "headers").read_text()
    assert status == 22  # 405


@needs("nghttp", "Debian package nghttp2-client")
async def test_nghttp_gets_a_response(tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"\0\0\0\0\x05hello")
    async with running() as (server, _):
        code, output = await run_tool(
            "nghttp", "-v", "-H", "te: trailers",
            "-H", "content-type: application/grpc", "-d", str(body),
            f"http://{server.address}{ECHO}",
        )  # fmt: skip

    assert code == 0
    assert b"grpc-status: 0" in output
    assert b"error" not in output.lower().replace(b"error_code=no_error", b"")


@needs("h2load", "Debian package nghttp2-client")
async def test_h2load_succeeds_every_time(tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"\0\0\0\0\x05hello")
    async with running() as (server, sessions):
        code, output = await run_tool(
            "h2load", "-n", "3000", "-c", "10", "-m", "50", "-d", str(body),
            "-H", "content-type: application/grpc", "-H", "te: trailers",
            f"http://{server.address}{ECHO}",
        )  # fmt: skip

        assert code == 0
        assert b"3000 succeeded, 0 failed, 0 errored" in output
        assert len(sessions) == 3000


NODE = """
const http2 = require('http2');
const client = http2.connect(process.argv[1]);
client.on('error', e => { console.log('session', e); process.exit(1); });
const size = Number(process.argv[3]);
const body = Buffer.alloc(size + 5, 'x');
body.writeUInt8(0, 0); body.writeUInt32BE(size, 1);
const stream = client.request({':method': 'POST', ':path': process.argv[2],
  'content-type': 'application/grpc', 'te': 'trailers'}, {endStream: false});
let got = [];
stream.on('data', chunk => got.push(chunk));
stream.on('trailers', t => console.log('status', t['grpc-status']));
stream.on('error', e => console.log('stream', e));
stream.on('end', () => {
  console.log('same', Buffer.concat(got).equals(body));
  client.ping((error) => { console.log('ping', error === null); client.close(); });
});
stream.end(body);
"""


@needs("node", "Debian package nodejs")
@pytest.mark.parametrize("size_bytes", [5, 300_000])
async def test_node_gets_its_message_back(size_bytes: int) -> None:
    async with running() as (server, _):
        url = f"http://{server.address}"
        code, output = await run_tool("node", "-e", NODE, url, ECHO, str(size_bytes))

    assert code == 0
    assert sorted(output.split(b"\n")) == [b"", b"ping true", b"same true", b"status 0"]


def test_peers_are_served_on_uvloop_too() -> None:
    async def main() -> None:
        await test_grpcio_gets_its_messages_back(1_000_000)
        await test_many_grpcio_calls_at_once()
        await test_grpclib_gets_its_messages_back(300)
        await test_h2_finds_no_fault_with_us(1_000)

    uvloop.run(main())
