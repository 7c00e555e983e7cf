"""Hostile pods: what a pod may answer to the router's questions, one row or function a kind.

Most list models of their own names alone, so no honest request is routed to them by right. Some
claim names that are declared, which no honest request may notice. Those of `SHAKY_PODS` list the
shaky adapters, which honest pods have too, and fail every request for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

from tests.e2e.fuzz.field import DECLARED, SHAKY, SINK, VERSION, reset

_MIB: Final = 2**20
_MAX_HEAD_BYTES: Final = 128 * 1024
_LONG_BYTES: Final = 2 * _MIB
"""Bytes of an endless response in one visit; few, so that the machine can carry many visits."""


Make = Callable[[], bytes]


@dataclass(slots=True)
class Visit:
    """One request to a hostile pod.

    Attributes:
        name: The pod's.
        path: With the query.
        rng: Chance.
        writer: Where the answer goes.
        is_poison: It is one of those that end connections.
    """

    name: str
    path: str
    rng: Random
    writer: asyncio.StreamWriter
    is_poison: bool = False

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, head: bytes, pieces: Iterable[bytes], pause_s: float) -> None:
        """Send piece by piece, as long as anybody reads."""
        await self.send(b"HTTP/1.1 200 OK\r\n" + head)
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(pause_s)

    async def answer(self, body: bytes, status: str = "200 OK", headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode() + body)

    async def behave(self, metrics: Make | None = None, listed: Make | None = None) -> None:
        """A page or list, good but for what is given, or an answer to whoever asks for more."""
        if self.path.startswith("/metrics"):
            await self.answer(metrics() if metrics else page(self.name))
        elif self.path.startswith("/v1/models"):
            await self.answer(listed() if listed else models([self.name]))
        else:
            await self.answer(b'{"choices":[]}')


Answer = Callable[[Visit], Awaitable[None]]


def page(name: str, running: str = "0.0", waiting: str = "0.0", lora: str = "") -> bytes:
    """A metrics page."""
    return (
        f'vllm:num_requests_running{{model_name="{name}"}} {running}\n'
        f'vllm:num_requests_waiting{{model_name="{name}"}} {waiting}\n'
        f'vllm:kv_cache_usage_perc{{model_name="{name}"}} {waiting}\n{lora}'
    ).encode()


def lora_line(running: str, at: str, max_lora: str = "4") -> str:
    """A series of adapters."""
    return (
        f'vllm:lora_requests_info{{max_lora="{max_lora}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters=""}} {at}\n'
    )


def models(names: Sequence[str], **more: object) -> bytes:
    """A list of adapters."""
    return json.dumps({"data": [{"id": name, "parent": "base", **more} for name in names]}).encode()


# ---- kinds


async def extreme_numbers(visit: Visit) -> None:
    """Loads of no engine, times of no clock."""
    value = visit.rng.choice(
        ("1e308", "-5", "NaN", "+Inf", "-Inf", "1e18", "0x1", "1_000", "9" * 400)
    )
    at = visit.rng.choice(("1e308", "-1", "NaN", "+Inf", "9" * 400, "4e9"))
    slots = visit.rng.choice(("-1", "9" * 400, "", "1e9", "NaN"))
    odd = {"created": visit.rng.choice((1e308, -1, 10**400)), "max_model_len": 10**30}
    await visit.behave(
        lambda: page(visit.name, value, value, lora_line(visit.name, at, slots)),
        lambda: models([visit.name], **odd),
    )


@functools.cache
def _fat_page(kind: int) -> bytes:
    num = 15 * _MIB // 2
    many = ",".join(f"{number:x}" for number in range(_MIB))
    return (
        page("fat")
        + (
            lambda: lora_line(many, "1.7e9").encode(),
            lambda: b"".join(
                lora_line(many[8192 * n : 8192 * n + 8192], f"{1.7e9 + n}").encode()
                for n in range(len(many) // 8192)
            ),
            lambda: b"".join(
                b'vllm:num_requests_running{engine="%d"} 0\n' % n for n in range(num // 46)
            ),
            lambda: b"".join(
                b'vllm:lora_adapter_loaded{level="cpu",adapter_name="%x"} 1\n' % n
                for n in range(num // 62)
            ),
            lambda: b" x 1\n" * (num // 5),
            lambda: b"\n" * num,
            lambda: b"\0\n" * (num // 2),
            lambda: b"# " + b"x" * num + b"\n",
            lambda: b'vllm:cache_config_info{a="' + b'\\"' * (num // 2) + b'"} 1\n',
        )[kind]()
    )


_NUM_FAT: Final = 9


async def fat_list(visit: Visit) -> None:
    """A list of models of as many objects or as long names as there may be."""
    part = visit.rng.choice(('{"id":"a%d"},', '{"id":"a%d","root":"' + "r" * 300 + '"},', "{},"))
    num = 4 * _MIB // (len(part) + 5)
    entries = "".join(part % n if "%" in part else part for n in range(num))
    await visit.behave(listed=lambda: f'{{"data":[{entries}{{}}]}}'.encode())


async def false_counters(visit: Visit) -> None:
    """Tokens and first tokens that jump, of a pod that is always idle."""
    value = visit.rng.choice(("0", "1e6", "1e12", "9e15"))
    lines = "".join(
        f'vllm:{name}{{model_name="{visit.name}"}} {value}\n'
        for name in ("generation_tokens_total", "prompt_tokens_total")
    )
    lines += f"vllm:time_to_first_token_seconds_count {value}\nprocess_start_time_seconds 1\n"
    await visit.behave(lambda: page(visit.name, lora=lines))


async def resets(visit: Visit) -> None:
    """Hangs up on everything."""
    reset(visit.writer)


async def garbage(visit: Visit) -> None:
    """No HTTP."""
    await visit.send(
        visit.rng.choice((visit.rng.randbytes(2000), b"HTTP/1.1 999\r\n\r\n", b"\r\n"))
    )
    visit.writer.close()


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(bytes(64 * _MIB))


async def odd_models(visit: Visit) -> None:
    """Adapters without a parent, of no type, of a name that hurts."""
    entries: list[object] = [
        {"id": visit.name, "parent": None},
        {"id": visit.name + "\x1b[2J\n", "parent": visit.name},
        {"id": visit.name + "x" * 100_000, "parent": "p"},
    ]
    entries += visit.rng.choice(([], [{"id": 5}], ["x"], [None], [{"id": "", "created": "now"}]))
    await visit.behave(listed=lambda: json.dumps({"data": entries}).encode())


async def unasked_answers(visit: Visit) -> None:
    """More answers than questions, and interim ones without end."""
    await visit.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 500)
    await visit.behave()
    await visit.behave()


async def takes_names(visit: Visit) -> None:
    """Says that declared names are base models, cards of others, or of versions that there are not;
    other names each time. It fails what it is asked for.
    """
    at = visit.rng.randrange(len(DECLARED))
    name, other = (DECLARED[(at + n) % len(DECLARED)] for n in range(2))
    served = f"{name}@{VERSION}"
    entries = visit.rng.choice(
        (
            [{"id": each, "parent": None} for each in (*DECLARED[at:], served)],
            [{"id": name, "parent": other}, {"id": served, "parent": f"{other}@{VERSION}"}],
            [{"id": f"{name}@{n}", "root": f"/a/{name}", "parent": "base"} for n in range(100)],
            [{"id": served, "root": f"/a/{other}", "parent": "base"}],
            [{"id": "base", "root": name, "parent": name}, {"id": name, "parent": "base"}],
        )
    )
    if visit.path.startswith("/v1/models"):
        await visit.answer(json.dumps({"data": entries}).encode())
    elif visit.path.startswith("/metrics"):
        await visit.answer(page(name, lora=lora_line(",".join((*DECLARED, served)), "1.9e9")))
    else:
        await visit.answer(b"no", "500 Internal Server Error")


async def hangs_on_checks(visit: Visit) -> None:
    """Takes every load, says that it has all that is declared, and answers no request."""
    if visit.path.startswith("/v1/models"):
        cards = [{"id": "base", "parent": None}]
        cards += [
            {"id": f"{name}@{VERSION}", "root": f"/a/{name}", "parent": "base"} for name in DECLARED
        ]
        await visit.answer(json.dumps({"data": cards}).encode())
    elif visit.path.startswith("/v1/") and "lora_adapter" not in visit.path:
        await asyncio.sleep(60.0)
    else:
        await visit.behave()


def _changing_names(visit: Visit) -> list[str]:
    """Ten thousand adapters, others each time for half of them."""
    run = visit.rng.randrange(1000)
    return [f"{visit.name}-{n if n % 2 else run * 10_000 + n}" for n in range(10_000)]


def _new_series(visit: Visit) -> str:
    """Adapters that nobody has ever seen, new ones each time."""
    start = visit.rng.randrange(10**6)
    return "".join(lora_line(f"{visit.name}-{start + n}", f"{1.7e9 + start}") for n in range(3000))


_ODD_PAGES: Final = (b"{" * 50_000, b"[" * 50_000, b'{"data":null}', b"null")
_ELSEWHERE: Final = ("http://127.0.0.1:1/", "file:///etc/passwd", "//x")
_CHUNK: Final = b"4000\r\n" + b"x" * 16_384 + b"\r\n"

PODS: Final[Mapping[str, Answer]] = {
    # As many bytes as are read, each of which makes as much work and memory as it can.
    "fat_page": lambda visit: visit.behave(lambda: _fat_page(visit.rng.randrange(_NUM_FAT))),
    # Megabytes of valid lines.
    "huge_page": lambda visit: visit.behave(lambda: page(visit.name) * (4 * _MIB // 200)),
    # A length of gigabytes, of which some come.
    "too_large_page": lambda visit: visit.drip(
        b"content-length: 9999999999\r\n\r\n", [b"a 1\n" * (_LONG_BYTES // 4)], 2.0
    ),
    # A page without a line's end, a list without one.
    "one_long_line": lambda visit: visit.answer(
        b'vllm:num_requests_running{model_name="' + b'\\"' * _MIB
    ),
    # A byte at a time; chunks, as long as anybody reads; headers likewise.
    "slow_drip": lambda visit: visit.drip(b"content-length: 100000\r\n\r\n", [b"v"] * 50, 0.2),
    "never_ends": lambda visit: visit.drip(
        b"transfer-encoding: chunked\r\n\r\n", [_CHUNK] * (_LONG_BYTES // 16_384), 0.005
    ),
    "endless_head": lambda visit: visit.drip(
        b"", (b"x-%d: %s\r\n" % (number, b"y" * 500) for number in range(2000)), 0.0
    ),
    # HTTP, but neither a page nor a list.
    "garbage_in_pages": lambda visit: visit.answer(
        visit.rng.choice((visit.rng.randbytes(5000), *_ODD_PAGES))
    ),
    # A bomb that nobody asked for.
    "compressed": lambda visit: visit.answer(_bomb(), headers="content-encoding: gzip\r\n"),
    # Takes the question and says nothing.
    "silent": lambda _: asyncio.sleep(5.0),
    "many_models": lambda visit: visit.behave(listed=lambda: models(_changing_names(visit))),
    "many_adapters": lambda visit: visit.behave(lambda: page(visit.name, lora=_new_series(visit))),
    "fast_errors": lambda visit: visit.answer(b"no", "500 Internal Server Error"),
    # In a circle, or to where we should not go.
    "redirects": lambda visit: visit.answer(
        b"", "302 Found", f"location: {visit.rng.choice((visit.path, *_ELSEWHERE))}\r\n"
    ),
    **{each.__name__: each for each in (extreme_numbers, fat_list, false_counters, garbage)},
    **{each.__name__: each for each in (odd_models, unasked_answers, takes_names, hangs_on_checks)},
    "resets": resets,
}


async def takes_all(visit: Visit) -> None:
    """A good pod with one adapter, whose answers are tiny: where hostile clients' bodies go.

    What is poison, by a header, ends its connection.
    """
    if visit.is_poison:
        reset(visit.writer)
    else:
        await visit.behave(listed=lambda: models([SINK]))


def shaky(status: str) -> Answer:
    """Lists the shaky adapters and fails what is asked of them: with a status, or with a reset."""

    async def fail(visit: Visit) -> None:
        if visit.path.startswith(("/metrics", "/v1/models")):
            await visit.behave(listed=lambda: models(SHAKY))
        elif status == "200 OK":
            said = b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n'
            await visit.answer(said, headers="content-type: text/event-stream\r\n")
        elif status:
            await visit.answer(b'{"error":{}}', status)
        else:
            reset(visit.writer)

    return fail


SHAKY_PODS: Final[Mapping[str, Answer]] = {
    # A pod that answers 404 is as one that does not know the model.
    f"shaky_{status.partition(' ')[0] or 'resets'}": shaky(status)
    for status in (
        *("500 Internal Server Error", "503 Service Unavailable", "404 Not Found", ""),
        *("400 Bad Request", "401 Unauthorized", "200 OK"),
    )
}


# ---- a pod


class HostilePod:
    """Listens, and answers each request in its way.

    Attributes:
        name: Its kind and number.
        address: `ip:port`.
        num_visits: Requests so far.
    """

    def __init__(self, name: str, answer: Answer, rng: Random) -> None:
        self.name = name
        self.address = ""
        self.num_visits = 0
        self._answer = answer
        self._rng = rng

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        failures = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, RuntimeError)
        # Cancelled at the loop's end: asyncio.streams of 3.11 would tell of it as of an error.
        with contextlib.suppress(*failures, asyncio.CancelledError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await _discard_body(reader, head)
                self.num_visits += 1
                path = head.split(" ", 2)[1]
                await self._answer(Visit(self.name, path, self._rng, writer, "\nx-poison:" in head))
        writer.close()


async def _discard_body(reader: asyncio.StreamReader, head: str) -> None:
    fields = dict(line.lower().partition(":")[::2] for line in head.split("\r\n")[1:])
    left = int(fields.get("content-length", 0))
    while left > 0:
        left -= len(await reader.read(min(left, 2**18))) or left
    if "chunked" in fields.get("transfer-encoding", ""):
        while (size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)) > 0:
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")


@asynccontextmanager
async def hostile_pods(num_each: int, seed: int) -> AsyncIterator[list[HostilePod]]:
    """`num_each` of each kind, the shaky ones and one that takes all; then one that refuses.

    None at all if `num_each` is 0.
    """
    if not num_each:
        yield []
        return
    kinds = [*PODS.items()] * num_each + [*SHAKY_PODS.items(), ("takes_all", takes_all)]
    async with AsyncExitStack() as stack:
        pods = []
        for number, (name, answer) in enumerate(kinds):
            pod = HostilePod(f"{name}-{number}", answer, Random(f"{seed} {number}"))
            server = await asyncio.start_server(pod.serve, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
            stack.callback(server.close)
            pod.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            pods.append(pod)
        refusing = HostilePod("refuses", resets, Random(seed))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
            refusing.address = f"127.0.0.1:{taken.getsockname()[1]}"
            yield [*pods, refusing]
