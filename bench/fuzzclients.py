"""Hostile clients: what anybody who reaches Envoy may send, one function a kind.

Each is over within seconds and sends megabytes at most; what makes it hostile is what it costs the
others where nothing bounds it. Bodies that go through to a pod name `SINK`, or are small.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
from typing import Final

from bench.field import HONEST, SESSION_HEADER, SHAKY, SINK, Field, chat, crowd, head
from bench.fuzzframes import READY
from extproc.wire import frames

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


async def upload_stops(field: Field) -> str:
    """A body is announced, and comes in part."""
    num_bytes = field.rng.choice((1000, 200_000, _MIB, 16 * _MIB))
    body = chat(SINK, num_bytes)
    return await field.leave(
        head(len(body)) + body[: field.rng.randrange(min(len(body), 2 * _MIB))]
    )


async def slow_drip(field: Field) -> str:
    """A body comes byte by byte."""
    body = chat(SINK, 200)
    async with field.link() as link, asyncio.timeout(2 * field.hold_s):
        await link.send(head(len(body)))
        for at in range(int(field.hold_s / 0.2)):
            await link.send(body[at : at + 1])
            await asyncio.sleep(0.2)
    return "left"


async def endless_chunks(field: Field) -> str:
    """A chunked body that never says its end, in tiny chunks."""
    async with field.link() as link:
        await link.send(head(0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
        await link.send(b'10\r\n{"model":"sink",\r\n')
        for _ in range(20):
            await link.send(b'4\r\n"a":\r\n2\r\n1,\r\n' * 50)
            await asyncio.sleep(field.hold_s / 40)
    return "left"


async def huge_valid_body(field: Field) -> str:
    """Up to the largest body that is taken."""
    num_bytes = field.rng.choice((_MIB, 4 * _MIB, 15 * _MIB))
    return await field.post(chat(SINK, num_bytes, is_model_last=True))


async def too_large_body(field: Field) -> str:
    """Beyond it."""
    return await field.post(chat(SINK, 17 * _MIB))


async def bracket_soup(field: Field) -> str:
    """Megabytes of structure without content."""
    soup = field.rng.choice((b"[", b"{", b'{"a":', b"[[],", b'{"a":[{},')) * 400_000
    return await field.post(b'{"model":"sink","x":' + soup)


async def nan_and_garbage(field: Field) -> str:
    """Send JSON that only Python accepts, then JSON that nobody accepts."""
    number = field.rng.choice((b"NaN", b"-Infinity", b"1" * 5000, b"1e999999"))
    tail = bytes(field.rng.randrange(1, 256) for _ in range(200)) * field.rng.choice((1, 1000))
    return await field.post(b'{"x":' + number + b',"model":"sink"}' + tail)


async def many_numbers(field: Field) -> str:
    """A body that costs a reader more than its bytes."""
    item = field.rng.choice((b"0,", b"1e5,", b'"\\u0041",', b'"\\ud800",', b"NaN,", b'{"":0},'))
    num_bytes = field.rng.choice((1, 4, 12)) * _MIB
    return await field.post(b'{"x":[' + item * (num_bytes // len(item)) + b'0],"model":"sink"}')


async def deep_nesting(field: Field) -> str:
    """Deeper than any stack, closed as it should be."""
    depth = field.rng.choice((500, 5000, 200_000))
    return await field.post(b'{"model":"sink","x":' + b"[" * depth + b"]" * depth + b"}")


async def model_twice(field: Field) -> str:
    """Two models, escapes, or no string."""
    names = ('"adapter-00","model":"sink"', '"\\u0073ink"', '["sink"]', "{}", "null", '""', '"\\n"')
    return await field.post(('{"model":' + field.rng.choice(names) + "}").encode())


async def many_models(field: Field) -> str:
    """Names that nobody has, each another, on one connection."""
    async with field.link() as link:
        status = ""
        for _ in range(20):
            name = "".join(field.rng.choices(string.ascii_letters, k=250))
            body = chat(name)
            await link.send(head(len(body)) + body)
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


async def malformed_http(field: Field) -> str:
    """No HTTP/1, or two of them in one."""
    return await field.ask(field.rng.choice(_MALFORMED), within_s=min(2.0, field.hold_s))


async def h2_flood_at_envoy(field: Field) -> str:
    """Streams opened and reset, or windows and pings."""
    flood = field.rng.choice(
        (frames.ping(bytes(8)) * 20_000, frames.settings({}) * 5000, frames.rst_stream(1, 8) * 5000)
    )
    return await field.say(READY + flood)


async def idle_connections(field: Field) -> str:
    """Connections that ask nothing."""
    return await crowd(field.leave(b"") for _ in range(50))


async def half_heads(field: Field) -> str:
    """A request's head, line by line and never whole."""
    async with field.link() as link:
        await link.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
        for number in range(int(field.hold_s)):
            await link.send(b"x-%d: y\r\n" % number)
            await asyncio.sleep(0.5)
    return "left"


async def huge_headers(field: Field) -> str:
    """Up to what Envoy takes, and beyond."""
    lines = field.rng.choice(
        (
            "x-a: " + "a" * 50_000 + "\r\n",
            "".join(f"x-{n}: y\r\n" for n in range(95)),
            "x-a: " + "a" * 100_000 + "\r\n",
            "cookie: a=b\r\n" * 90,
            "x-request-id: " + "r" * 20_000 + "\r\n",
            "x-llm-d-inference-objective: " + "o" * 30_000 + "\r\n",
        )
    )
    return await field.post(chat(field.rng.choice(HONEST)), headers=lines)


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


async def list_of_models(field: Field) -> str:
    """The pool's models in a loop, unread by some."""
    if field.rng.random() < 0.5:
        return await field.leave(_GET_LIST * 20, reads=False)
    return await field.ask(_GET_LIST * 20)


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


async def odd_method_or_path(field: Field) -> str:
    """Send a request that is not served, with an odd method or path."""
    method = field.rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X" * 50))
    path = field.rng.choice((*_PATHS, "/v1/chat/completions"))
    line = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    return await field.ask(line.encode())


async def steering_headers(field: Field) -> str:
    """Names an address itself, or tries."""
    target = f"127.0.0.1:{field.admin_port}"
    lines = "".join(f"{name}: {target}\r\n" for name in _STEERING)
    return await field.post(chat(SINK), headers=lines)


async def words_for_pods(field: Field) -> str:
    """Headers and fields by which a gateway steers a pod."""
    more = (
        '"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"127.0.0.1"}',
        '"priority":-1000000000',
        '"lora_path":"/etc/passwd","data_parallel_rank":7',
    )
    model = field.rng.choice((SINK, *SHAKY))
    body = f'{{"model":"{model}","messages":[],{field.rng.choice(more)}}}'.encode()
    headers = "".join(field.rng.sample(_OF_PODS, 2))
    return await field.post(body, headers=headers)


async def many_choices(field: Field) -> str:
    """One request for thirty generations, a hundred of them at once."""
    body = chat(SINK, n=30, best_of=30, max_tokens=4096)
    return await crowd(field.post(body) for _ in range(100))


async def poison(field: Field) -> str:
    """What makes whoever gets it close the connection, of adapters that several pods have."""
    status = ""
    for _ in range(10):
        status = await field.post(chat(SINK, user="poison"), headers="x-poison: 1\r\n")
    return status


async def leaves(field: Field) -> str:
    """Goes at any moment of a request that an honest pod serves."""
    body = chat(field.rng.choice(HONEST), stream=True, max_tokens=5)
    request = head(len(body)) + body
    is_whole = field.rng.random() < 0.7
    async with field.link() as link:
        await link.send(request if is_whole else request[: field.rng.randrange(1, len(request))])
        await asyncio.sleep(field.rng.choice((0.0, 0.005, 0.02, 0.05)))
    return "left"


async def unread_answer(field: Field) -> str:
    """Asks for a stream and reads nothing of it."""
    body = chat(SINK, stream=True)
    return await field.leave(head(len(body)) + body, reads=False)


CLIENTS: Final = (
    *(upload_stops, slow_drip, endless_chunks, huge_valid_body, too_large_body),
    *(bracket_soup, nan_and_garbage, many_numbers, deep_nesting, model_twice, many_models),
    *(odd_form, malformed_http, h2_flood_at_envoy, idle_connections, half_heads),
    *(huge_headers, large_sessions, unknown_response, list_of_models, lists_in_a_loop),
    *(odd_method_or_path, steering_headers, words_for_pods, many_choices, poison, leaves),
    unread_answer,
)
