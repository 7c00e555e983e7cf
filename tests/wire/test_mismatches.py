"""TLS on one side alone: counted, told once for each peer, and a warning until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import pytest

from extproc.files.tls import client_context
from extproc.wire.connection import Connection
from extproc.wire.listenertls import Certificates
from extproc.wire.mismatches import FORGET_S, MAX_PEERS, Mismatch, Mismatches
from extproc.wire.server import WireServer
from tests.pki import Pki
from tests.waiting import eventually
from tests.wire.wire_echo import ECHO, running, stream

PLAIN, TLS, NO_H2 = Mismatch


def counted(server: WireServer, kind: Mismatch) -> int:
    counts = server.counters.mismatches.counts
    assert [each for each in Mismatch if counts[each]] in ([], [kind])
    return counts[kind]


async def speak(
    server: WireServer, first: bytes = b"", context: ssl.SSLContext | None = None
) -> None:
    """Connect, send something, and read until the server hangs up."""
    name = None if context is None else "localhost"
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname=name
        )
        writer.write(first)
        await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "first",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_plaintext_to_a_tls_port_is_told_with_the_address_and_the_remedy(
    tmp_path: Path, first: bytes
) -> None:
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context) as (server, _):
        await speak(server, first)
        await speak(server, first)

        assert counted(server, PLAIN) == 2
        (line,) = server.counters.mismatches.take_news()
        assert line.startswith("127.0.0.1 speaks plaintext to this port, which has TLS")
        assert "DestinationRule" in line
        assert server.counters.mismatches.warnings(now=server.loop.time()) == [line]


async def test_a_grpc_client_without_tls_is_told_too(tmp_path: Path) -> None:
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context) as (server, _):

        def call() -> None:
            with grpc.insecure_channel(server.address) as channel:
                list(stream(channel, ECHO)(iter([b"x"]), timeout=60))

        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(call)
        assert counted(server, PLAIN) >= 1


async def test_tls_to_a_plaintext_port_is_told_until_the_peer_speaks_plaintext() -> None:
    context = ssl.create_default_context()
    async with running() as (server, _):
        await speak(server, context=context)

        assert counted(server, TLS) == 1
        mismatches = server.counters.mismatches
        (line,) = mismatches.take_news()
        assert line.startswith("127.0.0.1 speaks TLS to this port, which has none")
        assert mismatches.warnings(now=server.loop.time()) == [line]

        def call() -> list[bytes]:
            with grpc.insecure_channel(server.address) as channel:
                return list(stream(channel, ECHO)(iter([b"x"]), timeout=60))

        assert await asyncio.to_thread(call) == [b"x"]
        assert mismatches.warnings(now=server.loop.time()) == []


async def test_tls_without_http2_is_told(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    context = client_context(pki.ca)
    context.set_alpn_protocols(["http/1.1"])
    async with running(ssl_context=Certificates(*pki.issue("server")).context) as (server, _):
        await speak(server, context=context)

        async def is_counted() -> bool:
            return counted(server, NO_H2) == 1

        await eventually(is_counted, within_s=60)
        (line,) = server.counters.mismatches.take_news()
        assert "no HTTP/2 (ALPN h2)" in line


@pytest.mark.parametrize(
    "first", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 64, b"\x16\x03\x01 not TLS"]
)
async def test_what_looks_for_open_ports_is_no_gateway(tmp_path: Path, first: bytes) -> None:
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context) as (server, _):
        await speak(server, first)

        assert not any(server.counters.mismatches.counts.values())


def test_a_preface_that_comes_in_two_parts_is_no_tls() -> None:
    connection = Connection({}, now=0.0, host="10.0.0.1")
    connection.receive_pass(b"PRI * HTTP", 0, now=0.0)
    connection.receive_pass(b"\x16\x03\x01", 0, now=0.0)

    assert connection.is_failed
    assert not any(connection.counters.mismatches.counts.values())
    connection.lose()


def test_a_peer_is_news_again_after_a_while_or_when_it_errs_in_another_way() -> None:
    found = Mismatches()
    for now in (0.0, 1.0, FORGET_S, 2 * FORGET_S + 1):
        found.note(PLAIN, "10.0.0.1", now=now)
    assert len(found.take_news()) == 2
    found.note(NO_H2, "10.0.0.1", now=2 * FORGET_S + 1)

    assert len(found.take_news()) == 1
    assert found.take_news() == []


def test_a_warning_ends_some_time_after_the_last_wrong_connection() -> None:
    found = Mismatches()
    found.note(TLS, "", now=0.0)

    assert found.warnings(now=FORGET_S)[0].startswith("a Unix socket speaks TLS")
    assert found.warnings(now=FORGET_S + 1) == []


def test_peers_of_one_kind_share_a_warning() -> None:
    found = Mismatches()
    for number in range(3):
        found.note(PLAIN, f"10.0.0.{number}", now=0.0)
    found.spoke("10.0.0.9")

    (line,) = found.warnings(now=0.0)
    assert line.startswith("10.0.0.0 (and 2 more) speaks plaintext")


def test_no_more_peers_are_remembered_than_is_said_and_all_are_counted() -> None:
    found = Mismatches()
    for number in range(MAX_PEERS + 7):
        found.note(PLAIN, f"10.0.1.{number}", now=0.0)
    assert found.counts[PLAIN] == MAX_PEERS + 7
    assert len(found.take_news()) == MAX_PEERS

    found.note(PLAIN, "10.0.2.1", now=FORGET_S + 1)
    assert len(found.take_news()) == 1
