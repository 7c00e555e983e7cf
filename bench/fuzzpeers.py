"""Hostile peers and watchers: what anybody who reaches the router's own ports may send.

The gRPC port is for Envoy; whoever else reaches it must still cost nobody anything. What writes
entries of an access log that end others' picks is left out: only mutual TLS is against that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Final

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc_pb2

from bench.field import HONEST, Field, chat, crowd
from bench.fuzzframes import EXT_PROC, FLOODS, data, flood_bytes, message, open_stream, prefix
from extproc.gen import decisions_pb2, peers_pb2
from extproc.wire import frames

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


# ---- straight at the gRPC port


async def garbage_at_grpc(field: Field) -> str:
    """No HTTP/2: TLS, HTTP/1, noise, or half a preface."""
    data = field.rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
            b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
            field.rng.randbytes(5000),
            frames.PREFACE[:10],
            frames.PREFACE + field.rng.randbytes(5000),
        )
    )
    return await field.say(data, field.grpc_port, min(12.0, field.hold_s))


async def idle_at_grpc(field: Field) -> str:
    """Connections that say nothing, or only hello."""
    return await crowd(field.leave(_HELLO * (n % 2), field.grpc_port) for n in range(20))


async def h2_flood_at_grpc(field: Field) -> str:
    """One of the abuses of the wire, as far as a megabyte goes; read by some."""
    flood = field.rng.choice(FLOODS)
    said = await asyncio.to_thread(flood_bytes, flood)
    return f"{flood.limit} {await field.say(said, field.grpc_port)}"


async def half_uploads_at_grpc(field: Field) -> str:
    """Bodies for the router, of which the last part never comes."""
    said = _HELLO
    for stream_id in range(1, 2 * field.rng.choice((1, 4, 8)), 2):
        part = message(stream_id, _body(chat("x", 256 * 1024), is_last=False))
        said += _begun(field, stream_id) + part * field.rng.choice((1, 4, 8))
    return await field.say(said, field.grpc_port, field.a_while_s())


async def announced_messages_at_grpc(field: Field) -> str:
    """One gRPC message, long and never whole."""
    said = data(1, prefix(16 * 2**20))
    said += data(1, bytes(16_384)) * field.rng.choice((1, 60))
    return await field.say(
        _HELLO + open_stream(1, EXT_PROC) + said, field.grpc_port, field.a_while_s()
    )


async def bracket_soup_at_grpc(field: Field) -> str:
    """The last part of a body that no JSON reader likes, for one that trusts Envoy's limit."""
    soup = field.rng.choice((b"[", b'{"a":', b'{"a":[{},')) * 200_000
    said = _begun(field, 1) + message(1, _body(soup, is_last=True))
    return await field.say(_HELLO + said, field.grpc_port)


async def wrong_order_at_grpc(field: Field) -> str:
    """Messages that no Envoy would send, a hundred calls of them."""
    wrong = field.rng.choice(
        (_body(b"{}", is_last=True), b"", field.rng.randbytes(100), b"\x12\xff\xff\xff\xff\x7f")
    )
    path = field.rng.choice(_LONG_LIVED)
    calls = (open_stream(i, path) + message(i, wrong) for i in range(1, 201, 2))
    return await field.say(_HELLO + b"".join(calls), field.grpc_port)


async def open_calls_at_grpc(field: Field) -> str:
    """Two hundred calls of a long-lived method, about which nothing more is said."""
    path = field.rng.choice(_LONG_LIVED)
    calls = b"".join(open_stream(i, path) for i in range(1, 401, 2))
    return await field.say(_HELLO + calls, field.grpc_port, field.a_while_s())


async def false_router_at_grpc(field: Field) -> str:
    """Who says to be the router that loads, and has nothing that proves it: says that it unloads
    what there is and that picks have begun and ended.
    """
    rng, said = field.rng, [peers_pb2.PeerMessage() for _ in range(100)]
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
    told = b"".join(message(1, each.SerializeToString()) for each in said)
    return await field.say(
        _HELLO + open_stream(1, _LINK) + told, field.grpc_port, field.a_while_s()
    )


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


# ---- watchers


async def stalled_watchers(field: Field) -> str:
    """Asks for every decision, the remembered ones first, and reads nothing."""
    calls = b"".join(open_stream(i, _WATCH) + message(i, _ALL) for i in range(1, 21, 2))
    return await field.leave(_HELLO + calls, field.grpc_port, reads=False)


async def watchers_in_a_loop(field: Field) -> str:
    """Asks for all remembered decisions, again and again."""
    async with field.link(field.grpc_port) as link:
        await link.send(_HELLO)
        for stream_id in range(1, 21, 2):
            await link.send(open_stream(stream_id, _WATCH) + message(stream_id, _ALL))
            await link.drain_input(0.1)
            await link.send(frames.rst_stream(stream_id, 8))
    return "left"


async def stalled_viewers(field: Field) -> str:
    """Opens the live page's feed and reads nothing."""
    line = b"GET /live/feed HTTP/1.1\r\nhost: localhost\r\n\r\n"
    return await field.leave(line, field.admin_port, reads=False)


async def stalled_scrapers(field: Field) -> str:
    """Asks for many metrics pages at once and reads none."""
    path = field.rng.choice((b"/metrics", b"/debug/snapshot", b"/debug/decisions?n=999999"))
    lines = b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    return await field.leave(lines * 5, field.admin_port, reads=False)


async def impatient_scrapers(field: Field) -> str:
    """Asks for an expensive page and leaves at once."""
    for _ in range(5):
        async with field.link(field.admin_port) as link:
            await link.send(b"GET /debug/decisions?n=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return "left"


async def idle_at_admin(field: Field) -> str:
    """Connections without an end, half of them in the middle of a request's head."""
    begin = b"GET / HTTP/1.1\r\nx-"
    return await crowd(field.leave(begin * (n % 2), field.admin_port) for n in range(20))


async def upgrade_at_admin(field: Field) -> str:
    """Asks for another protocol and goes on, on many connections."""
    head, path = field.rng.choice(_UPGRADES), field.rng.choice((b"/metrics", b"/live/feed", b"/"))
    said = b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + head
    tail = field.rng.choice((b"x", b"\r\n", b"a: b\r\n", b"1\r\nx\r\n", said)) * 20_000
    return await crowd(
        field.leave(said + tail[: 2**18], field.admin_port, reads=False) for _ in range(8)
    )


async def uploads_at_admin(field: Field) -> str:
    """A body where none belongs."""
    line = b"POST /metrics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n"
    return await field.ask(line + bytes(100_000), field.admin_port, min(2.0, field.hold_s))


# ---- what calls are made of


def _begun(field: Field, stream_id: int) -> bytes:
    """A request of which the headers have come."""
    headers = _spelled_headers(field.rng.choice(("raw_value", "value")))
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


PEERS: Final = (
    *(garbage_at_grpc, idle_at_grpc, h2_flood_at_grpc, half_uploads_at_grpc),
    *(announced_messages_at_grpc, bracket_soup_at_grpc, wrong_order_at_grpc, open_calls_at_grpc),
    *(false_router_at_grpc, relayed_hello_at_grpc),
)
WATCHERS: Final = (
    *(stalled_watchers, watchers_in_a_loop, stalled_viewers, stalled_scrapers),
    *(impatient_scrapers, idle_at_admin, upgrade_at_admin, uploads_at_admin),
)
