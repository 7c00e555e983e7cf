"""Hostile clients: what anybody who reaches Envoy may send, one row or function a kind.

Each is over within seconds and sends megabytes at most; what makes it hostile is what it costs the
others where nothing bounds it. Bodies that go through to a pod name `SINK`, or are small.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
from collections.abc import Mapping
from typing import Final

from extproc.wire import frames
from tests.e2e.fuzz.field import (
    HONEST,
    SESSION_HEADER,
    SHAKY,
    SINK,
    Attack,
    Field,
    by_name,
    chat,
    crowd,
    head,
)
from tests.e2e.fuzz.http2 import READY

_MIB: Final = 2**20
_GET_LIST: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
BROKEN: Final = "broken answer"
_LIST_READERS: Final = 25
"""Connections of one who reads lists in a loop: with as many of them as come, some hundreds."""
_STEERING: Final = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-envoy-original-dst-host",
    "x-envoy-max-retries",
    "x-envoy-upstream-rq-timeout-ms",
)
_OF_PODS: Final = (
    "x-prefiller-host-port: 127.0.0.1:1\r\n",
    "x-data-parallel-rank: 99\r\n",
    "x-data-parallel-host-port: 127.0.0.1:1\r\n",
    "x-gateway-inference-fairness-id: other\r\n",
    "x-llm-d-inference-objective: gold\r\n",
)
"""Headers that a gateway sets, or other routers do, for pods."""
_MALFORMED: Final = (
    b"GET\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/9.9\r\nhost: x\r\n\r\n",
    b"\x00" * 200,
    b"GET /v1/models HTTP/1.1\r\nho st: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 100,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
)
_PATHS: Final = (
    "/v1/load_lora_adapter",
    "/sleep",
    "/metrics",
    "/v1/chat/../load_lora_adapter",
    "/v1//chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/models/" + "m" * 4000,
    "/v1/responses/abc/cancel",
    "/" + "%41" * 2000,
    "/v1/chat/completions?" + "q" * 8000,
)


_ODD_NUMBERS: Final = (b"NaN", b"-Infinity", b"1" * 5000, b"1e999999")
_MANY: Final = (b"0,", b"1e5,", b'"\\u0041",', b'"\\ud800",', b"NaN,", b'{"":0},')
_ODD_MODELS: Final = (
    *('"adapter-00","model":"sink"', '"\\u0073ink"', '["sink"]', "{}", "null", '""', '"\\n"'),
)
_HEADERS: Final = (
    "x-a: " + "a" * 50_000 + "\r\n",
    "".join(f"x-{n}: y\r\n" for n in range(95)),
    "x-a: " + "a" * 100_000 + "\r\n",
    "cookie: a=b\r\n" * 90,
    "x-request-id: " + "r" * 20_000 + "\r\n",
    "x-llm-d-inference-objective: " + "o" * 30_000 + "\r\n",
)
_MEMBERS: Final = (
    '"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"127.0.0.1"}',
    '"priority":-1000000000',
    '"lora_path":"/etc/passwd","data_parallel_rank":7',
)
_SMALL: Final = chat(SINK, 200)
_FLOODS: Final = (
    *(frames.ping(bytes(8)) * 20_000, frames.settings({}) * 5000, frames.rst_stream(1, 8) * 5000),
)
_METHODS: Final = ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X" * 50)

ONCE: Final[Mapping[str, Attack]] = {
    # Up to the largest body that is taken, and beyond it.
    "huge_valid_body": lambda field: field.post(
        chat(SINK, field.rng.choice((_MIB, 4 * _MIB, 15 * _MIB)), is_model_last=True)
    ),
    "too_large_body": lambda field: field.post(chat(SINK, 17 * _MIB)),
    # Megabytes of structure without content.
    "bracket_soup": lambda field: field.post(
        b'{"model":"sink","x":'
        + field.rng.choice((b"[", b"{", b'{"a":', b"[[],", b'{"a":[{},')) * 400_000
    ),
    # JSON that only Python accepts, then JSON that nobody accepts.
    "nan_and_garbage": lambda field: field.post(
        b'{"x":' + field.rng.choice(_ODD_NUMBERS) + b',"model":"sink"}' + _noise(field)
    ),
    # A body that costs a reader more than its bytes.
    "many_numbers": lambda field: field.post(
        b'{"x":[' + _repeated(field, _MANY) + b'0],"model":"sink"}'
    ),
    # Deeper than any stack, closed as it should be.
    "deep_nesting": lambda field: field.post(_nested(field.rng.choice((500, 5000, 200_000)))),
    # Two models, escapes, or no string.
    "model_twice": lambda field: field.post(
        f'{{"model":{field.rng.choice(_ODD_MODELS)}}}'.encode()
    ),
    # No HTTP/1, or two of them in one.
    "malformed_http": lambda field: field.ask(
        field.rng.choice(_MALFORMED), within_s=min(2.0, field.hold_s)
    ),
    # Streams opened and reset, or windows and pings.
    "h2_flood_at_envoy": lambda field: field.say(READY + field.rng.choice(_FLOODS)),
    # Connections that ask nothing.
    "idle_connections": lambda field: crowd(field.leave(b"") for _ in range(50)),
    # Up to what Envoy takes, and beyond.
    "huge_headers": lambda field: field.post(
        chat(field.rng.choice(HONEST)), headers=field.rng.choice(_HEADERS)
    ),
    # A request that is not served.
    "odd_method_or_path": lambda field: field.ask(
        f"{field.rng.choice(_METHODS)} {field.rng.choice((*_PATHS, '/v1/chat/completions'))} "
        "HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()
    ),
    # Names an address itself, or tries.
    "steering_headers": lambda field: field.post(
        chat(SINK),
        headers="".join(f"{name}: 127.0.0.1:{field.admin_port}\r\n" for name in _STEERING),
    ),
    # Headers and fields by which a gateway steers a pod.
    "words_for_pods": lambda field: field.post(
        f'{{"model":"{field.rng.choice((SINK, *SHAKY))}","messages":[],'
        f"{field.rng.choice(_MEMBERS)}}}".encode(),
        headers="".join(field.rng.sample(_OF_PODS, 2)),
    ),
    # One request for thirty generations, a hundred of them at once.
    "many_choices": lambda field: crowd(
        field.post(chat(SINK, n=30, best_of=30, max_tokens=4096)) for _ in range(100)
    ),
    # Asks for a stream and reads nothing of it.
    "unread_answer": lambda field: field.leave(_whole(chat(SINK, stream=True)), reads=False),
    # The pool's models in a loop, unread by some.
    "list_of_models": lambda field: (
        field.leave(_GET_LIST * 20, reads=False)
        if field.rng.random() < 0.5
        else field.ask(_GET_LIST * 20)
    ),
    # A request's head, line by line and never whole; a body, byte by byte.
    "half_heads": lambda field: field.drip(
        b"POST /v1/chat/completions HTTP/1.1\r\n",
        (b"x-%d: y\r\n" % number for number in range(int(field.hold_s))),
        0.5,
    ),
    "slow_drip": lambda field: field.drip(
        head(len(_SMALL)), (_SMALL[n : n + 1] for n in range(int(field.hold_s / 0.2))), 0.2
    ),
    # A chunked body that never says its end, in tiny chunks.
    "endless_chunks": lambda field: field.drip(
        head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        + b'10\r\n{"model":"sink",\r\n',
        [b'4\r\n"a":\r\n2\r\n1,\r\n' * 50] * 20,
        field.hold_s / 40,
    ),
}
"""What is said once."""


def _whole(body: bytes) -> bytes:
    return head(len(body)) + body


def _noise(field: Field) -> bytes:
    tail = bytes(field.rng.randrange(1, 256) for _ in range(200))
    return tail * field.rng.choice((1, 1000))


def _repeated(field: Field, items: tuple[bytes, ...]) -> bytes:
    item, num_bytes = field.rng.choice(items), field.rng.choice((1, 4, 12)) * _MIB
    return item * (num_bytes // len(item))


def _nested(depth: int) -> bytes:
    return b'{"model":"sink","x":' + b"[" * depth + b"]" * depth + b"}"


async def upload_stops(field: Field) -> str:
    """A body is announced, and comes in part."""
    num_bytes = field.rng.choice((1000, 200_000, _MIB, 16 * _MIB))
    body = chat(SINK, num_bytes)
    sent = body[: field.rng.randrange(min(len(body), 2 * _MIB))]
    return await field.leave(head(len(body)) + sent)


async def many_models(field: Field) -> str:
    """Names that nobody has, each another, on one connection."""
    async with field.link() as link:
        status = ""
        for _ in range(20):
            name = "".join(field.rng.choices(string.ascii_letters, k=250))
            await link.send(_whole(chat(name)))
            status = await link.status(field.hold_s)
            if status != "404":
                break
            await link.drain_input(0.05)
        return status


async def odd_form(field: Field) -> str:
    """Multipart: many parts, no end, two models, wrong boundaries."""
    boundary = field.rng.choice(("b", "b" * 70, "b" * 500, "="))
    part = f'--{boundary}\r\ncontent-disposition: form-data; name="model"\r\n\r\nsink\r\n'
    body = (part * field.rng.choice((1, 2, 900, 20_000)) + f"--{boundary}--\r\n").encode()
    body = field.rng.choice((body, body[:-4], body.replace(b"\r\n", b"\n"), b"--" * 300_000))
    kind = f"multipart/form-data; boundary={boundary}"
    return await field.post(body, "/v1/audio/transcriptions", content_type=kind)


async def large_sessions(field: Field) -> str:
    """A session of 50 KB with each request, each another."""
    status = ""
    for _ in range(5):
        value = f"{field.rng.random()}" + "s" * 50_000
        status = await field.post(chat(SINK), headers=f"{SESSION_HEADER}: {value}\r\n")
    return status


async def unknown_response(field: Field) -> str:
    """A stored response that nobody has."""
    name = field.rng.choice(("resp_" + "0" * 32, "r" * 50_000, ""))
    body = json.dumps({"model": SINK, "input": "x", "previous_response_id": name}).encode()
    session = field.rng.choice(("", f"{SESSION_HEADER}: {field.rng.random()}\r\n"))
    return await field.post(body, "/v1/responses", session)


async def lists_in_a_loop(field: Field) -> str:
    """The same, read whole and asked for again, on many connections at once."""
    readers = (_read_lists(field, stays=number % 2 == 0) for number in range(_LIST_READERS))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(crowd(readers), field.a_while_s())
    return "left"


async def _read_lists(field: Field, *, stays: bool) -> str:
    while True:
        try:
            async with field.link() as link:
                is_wanted = True
                while is_wanted:
                    await link.send(_GET_LIST)
                    field.note(await link.whole_answer())
                    is_wanted = stays
        except (OSError, EOFError):
            field.note(BROKEN)


async def poison(field: Field) -> str:
    """What makes whoever gets it close the connection, of adapters that several pods have."""
    status = ""
    for _ in range(10):
        status = await field.post(chat(SINK, user="poison"), headers="x-poison: 1\r\n")
    return status


async def leaves(field: Field) -> str:
    """Goes at any moment of a request that an honest pod serves."""
    body = chat(field.rng.choice(HONEST), stream=True, max_tokens=5)
    request = _whole(body)
    is_whole = field.rng.random() < 0.7
    async with field.link() as link:
        await link.send(request if is_whole else request[: field.rng.randrange(1, len(request))])
        await asyncio.sleep(field.rng.choice((0.0, 0.005, 0.02, 0.05)))
    return "left"


CLIENTS: Final[Mapping[str, Attack]] = {
    **ONCE,
    **by_name(upload_stops, many_models, odd_form, large_sessions, unknown_response),
    **by_name(lists_in_a_loop, poison, leaves),
}
