"""Hostile peers and watchers: what anybody who reaches the router's own ports may send.

The gRPC port is for Envoy; whoever else reaches it must still cost nobody anything. What writes
entries of an access log that end others' picks is left out: only mutual TLS is against that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc_pb2

from extproc.gen import decisions_pb2, peers_pb2
from extproc.wire import frames
from tests.e2e.fuzz.field import HONEST, Attack, Field, by_name, chat, crowd
from tests.e2e.fuzz.http2 import EXT_PROC, FLOODS, data, flood_bytes, message, open_stream, prefix

_LINK: Final = "/extproc.v1.Peers/Link"
_WATCH: Final = "/extproc.v1.Decisions/Watch"
_LONG_LIVED: Final = (
    "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints",
    "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
    "/grpc.health.v1.Health/Watch",
    _LINK,
    _WATCH,
    EXT_PROC,
)
_ALL: Final = decisions_pb2.WatchRequest(replay_last=2**32 - 1).SerializeToString()
_UPGRADES: Final = (
    b"connection: upgrade\r\nupgrade: x\r\n\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"expect: 100-continue\r\ncontent-length: 100000000\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n1;",
    b"transfer-encoding: chunked\r\n\r\n0\r\n",
    b"\r\n",
)
_LARGEST_WINDOW: Final = 2**31 - 1
_HELLO: Final = (
    frames.PREFACE
    + frames.settings({frames.INITIAL_WINDOW_SIZE: _LARGEST_WINDOW})
    + frames.SETTINGS_ACK
    + frames.window_update(0, _LARGEST_WINDOW - 65_535)
)
_SOUP: Final = (b"[", b'{"a":', b'{"a":[{},')
_GET: Final = b"GET %s HTTP/1.1\r\nhost: localhost\r\n"


# ---- what calls are made of


def _begun(rng: Random, stream_id: int) -> bytes:
    """A request of which the headers have come."""
    headers = _spelled_headers(rng.choice(("raw_value", "value")))
    return open_stream(stream_id, EXT_PROC) + message(stream_id, headers)


@functools.cache
def _spelled_headers(spelling: str) -> bytes:
    """Values in the field that Envoy takes, or in that of other gateways."""
    values = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        ":scheme": "http",
        ":authority": "fuzz",
        "content-type": "application/json",
    }
    message = ext_proc_pb2.ProcessingRequest()
    for name, value in values.items():
        header = message.request_headers.headers.headers.add(key=name)
        setattr(header, spelling, value.encode() if spelling == "raw_value" else value)
    return bytes(message.SerializeToString())


def _body(content: bytes, *, is_last: bool) -> bytes:
    message = ext_proc_pb2.ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = is_last
    return bytes(message.SerializeToString())


# ---- straight at the gRPC port


def _garbage(rng: Random) -> bytes:
    """No HTTP/2: TLS, HTTP/1, noise, or half a preface."""
    return rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
            b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
            rng.randbytes(5000),
            frames.PREFACE[:10],
            frames.PREFACE + rng.randbytes(5000),
        )
    )


def _wrong_order(rng: Random) -> bytes:
    """Messages that no Envoy would send, a hundred calls of them."""
    odd = (_body(b"{}", is_last=True), b"", rng.randbytes(100), b"\x12\xff\xff\xff\xff\x7f")
    wrong, path = rng.choice(odd), rng.choice(_LONG_LIVED)
    return b"".join(open_stream(i, path) + message(i, wrong) for i in range(1, 201, 2))


def _half_uploads(rng: Random) -> bytes:
    """Bodies for the router, of which the last part never comes."""
    said = b""
    for stream_id in range(1, 2 * rng.choice((1, 4, 8)), 2):
        part = message(stream_id, _body(chat("x", 256 * 1024), is_last=False))
        said += _begun(rng, stream_id) + part * rng.choice((1, 4, 8))
    return said


def _announced(rng: Random) -> bytes:
    """One gRPC message, long and never whole."""
    begun = open_stream(1, EXT_PROC) + data(1, prefix(16 * 2**20))
    return begun + data(1, bytes(16_384)) * rng.choice((1, 60))


def _open_calls(rng: Random) -> bytes:
    """Two hundred calls of a long-lived method, about which nothing more is said."""
    path = rng.choice(_LONG_LIVED)
    return b"".join(open_stream(i, path) for i in range(1, 401, 2))


def _false_router(rng: Random) -> bytes:
    """Who says to be the router that loads, and has nothing that proves it: says that it unloads
    what there is and that picks have begun and ended.
    """
    said = [peers_pb2.PeerMessage() for _ in range(100)]
    said[0].hello.router_id, said[1].sums.is_whole = "!", True
    for each in said[1:]:
        each.sums.names.extend(("127.0.0.1:1", ""))
        each.sums.places.extend((0, 1, 1, 0, rng.randrange(100), rng.randrange(100)))
    for each in said[2:]:
        if rng.random() < 0.5:
            each.sums.changes.extend(rng.randrange(100) for _ in range(15))
            continue
        each.adapters.loads, each.adapters.declared = True, rng.getrandbits(64)
        for name in HONEST:
            each.adapters.failed.add(name=name, reason="files")
            each.adapters.leaving.add(address="127.0.0.1:1", name=name)
    return open_stream(1, _LINK) + b"".join(message(1, each.SerializeToString()) for each in said)


def _lasting(make: Callable[[Random], bytes]) -> Attack:
    """Say hello and this, and stay for a while."""
    return lambda field: field.say(_HELLO + make(field.rng), field.grpc_port, field.a_while_s())


async def h2_flood_at_grpc(field: Field) -> str:
    """One of the abuses of the wire, as far as a megabyte goes; read by some."""
    flood = field.rng.choice(FLOODS)
    said = await asyncio.to_thread(flood_bytes, flood)
    return f"{flood.limit} {await field.say(said, field.grpc_port)}"


async def relayed_hello_at_grpc(field: Field) -> str:
    """Two links of one who says to each what the other has just said."""
    async with field.link(field.grpc_port) as one, field.link(field.grpc_port) as other:
        for link in (one, other):
            await link.send(_HELLO + open_stream(1, _LINK))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(field.a_while_s()), asyncio.TaskGroup() as tasks:
                tasks.create_task(one.pass_on(other))
                tasks.create_task(other.pass_on(one))
    return "left"


PEERS: Final[Mapping[str, Attack]] = {
    "garbage_at_grpc": lambda field: field.say(
        _garbage(field.rng), field.grpc_port, min(12.0, field.hold_s)
    ),
    # Connections that say nothing, or only hello.
    "idle_at_grpc": lambda field: crowd(
        field.leave(_HELLO * (n % 2), field.grpc_port) for n in range(20)
    ),
    # The last part of a body that no JSON reader likes, for one that trusts Envoy's limit.
    "bracket_soup_at_grpc": lambda field: field.say(
        _HELLO
        + _begun(field.rng, 1)
        + message(1, _body(field.rng.choice(_SOUP) * 200_000, is_last=True)),
        field.grpc_port,
    ),
    "wrong_order_at_grpc": lambda field: field.say(
        _HELLO + _wrong_order(field.rng), field.grpc_port
    ),
    "half_uploads_at_grpc": _lasting(_half_uploads),
    "announced_messages_at_grpc": _lasting(_announced),
    "open_calls_at_grpc": _lasting(_open_calls),
    "false_router_at_grpc": _lasting(_false_router),
    **by_name(h2_flood_at_grpc, relayed_hello_at_grpc),
}


# ---- watchers


async def watchers_in_a_loop(field: Field) -> str:
    """Asks for all remembered decisions, again and again."""
    async with field.link(field.grpc_port) as link:
        await link.send(_HELLO)
        for stream_id in range(1, 21, 2):
            await link.send(open_stream(stream_id, _WATCH) + message(stream_id, _ALL))
            await link.drain_input(0.1)
            await link.send(frames.rst_stream(stream_id, 8))
    return "left"


async def impatient_scrapers(field: Field) -> str:
    """Asks for an expensive page and leaves at once."""
    for _ in range(5):
        async with field.link(field.admin_port) as link:
            await link.send(_GET % b"/debug/decisions?n=1000" + b"\r\n")
    return "left"


async def upgrade_at_admin(field: Field) -> str:
    """Asks for another protocol and goes on, on many connections."""
    head, path = field.rng.choice(_UPGRADES), field.rng.choice((b"/metrics", b"/live/feed", b"/"))
    said = _GET % path + head
    tail = field.rng.choice((b"x", b"\r\n", b"a: b\r\n", b"1\r\nx\r\n", said)) * 20_000
    return await crowd(
        field.leave(said + tail[: 2**18], field.admin_port, reads=False) for _ in range(8)
    )


_PAGES: Final = (b"/metrics", b"/debug/snapshot", b"/debug/decisions?n=999999")
_UPLOAD: Final = b"POST /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n"
WATCHERS: Final[Mapping[str, Attack]] = {
    # Asks for every decision, the remembered ones first, and reads nothing.
    "stalled_watchers": lambda field: field.leave(
        _HELLO + b"".join(open_stream(i, _WATCH) + message(i, _ALL) for i in range(1, 21, 2)),
        field.grpc_port,
        reads=False,
    ),
    # Opens the live page's feed and reads nothing.
    "stalled_viewers": lambda field: field.leave(
        _GET % b"/live/feed" + b"\r\n", field.admin_port, reads=False
    ),
    # Asks for many pages at once and reads none.
    "stalled_scrapers": lambda field: field.leave(
        (_GET % field.rng.choice(_PAGES) + b"\r\n") * 5, field.admin_port, reads=False
    ),
    # Connections without an end, half of them in the middle of a request's head.
    "idle_at_admin": lambda field: crowd(
        field.leave(b"GET / HTTP/1.1\r\nx-" * (n % 2), field.admin_port) for n in range(20)
    ),
    # A body where none belongs.
    "uploads_at_admin": lambda field: field.ask(
        _UPLOAD + bytes(100_000), field.admin_port, min(2.0, field.hold_s)
    ),
    **by_name(watchers_in_a_loop, impatient_scrapers, upgrade_at_admin),
}
