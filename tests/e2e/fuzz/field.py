"""Where the attackers of a scenario stand: ports, chance, and how much they may send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

SINK: Final = "sink"
"""Adapter of a pod that takes any body: what is attacked is the gateway, not an honest pod."""
HONEST: Final = tuple(f"adapter-{n:02d}" for n in range(12))
"""Adapters that only honest pods have; those of `bench.stack` have them, too."""
DECLARED: Final = tuple(f"declared-{n}" for n in range(4))
"""Adapters that are declared, with a version: honest pods have loaded them."""
VERSION: Final = "2"
LONG: Final = "long"
"""Adapter of a pod whose answers take seconds."""
SHAKY: Final = tuple(f"shaky-{n}" for n in range(4))
"""Adapters that honest pods have, and pods that fail at once list too."""
SESSION_HEADER: Final = "x-session"

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with a TCP reset
_CHUNK_BYTES: Final = 64 * 1024
_BURST_S: Final = 0.25
_FEW_BYTES: Final = 2000
_CHAT: Final = "/v1/chat/completions"


class Budget:
    """Bytes that all attackers together may send a second: they attack by asymmetry.

    Attributes:
        num_bytes: Sent so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.num_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def spend(self, num_bytes: int) -> None:
        """Wait until they may be sent; a few are only counted, lest the slow wait for the loud."""
        now_s = asyncio.get_running_loop().time()
        self.num_bytes += num_bytes
        self._free_at_s = max(self._free_at_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
        if num_bytes > _FEW_BYTES and self._free_at_s > now_s:
            await asyncio.sleep(self._free_at_s - now_s)


class Link:
    """A raw connection whose bytes are counted."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: Budget
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._budget = budget

    async def send(self, data: bytes) -> None:
        """Write, no faster than allowed and than the other side reads."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            await self._budget.spend(len(chunk))
            self._writer.write(chunk)
            await self._writer.drain()

    async def status(self, within_s: float) -> str:
        """The status of the next answer; `closed` or `silent` where there is none."""
        try:
            async with asyncio.timeout(within_s):
                line = await self._reader.readline()
        except TimeoutError:
            return "silent"
        return line.split(b" ")[1].decode("latin-1") if line.startswith(b"HTTP/") else "closed"

    async def whole_answer(self) -> str:
        """Read an answer to its end; its status.

        Raises:
            EOFError: It ended before, or there was none.
        """
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        left = int(length or 0)
        while left:
            data = await self._reader.read(min(left, _CHUNK_BYTES))
            if not data:
                raise EOFError
            left -= len(data)
        return head.split(b" ", 2)[1].decode("latin-1")

    async def pass_on(self, other: Link) -> None:
        """Send to another what comes here, until this one ends."""
        while data := await self._reader.read(_CHUNK_BYTES):
            await other.send(data)

    async def drain_input(self, within_s: float) -> str:
        """Read until the other side closes, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while await self._reader.read(_CHUNK_BYTES):
                    pass
                return "closed"
        return "still open"


async def crowd(attacks: Iterable[Coroutine[Any, Any, str]]) -> str:
    """Let many do something at once."""
    async with asyncio.TaskGroup() as tasks:
        for attack in attacks:
            tasks.create_task(attack)
    return "left"


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:  # closed already
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Field:
    """The target of attacks.

    Attributes:
        envoy_port: For clients.
        grpc_port: The router's gRPC services.
        admin_port: The router's HTTP for people.
        rng: Its chance.
        budget: What it may send.
        hold_s: How long the slow ones stay, at most.
        note: Counts one of many things that happen to one attacker.
    """

    envoy_port: int
    grpc_port: int
    admin_port: int
    rng: Random
    budget: Budget
    hold_s: float
    note: Callable[[str], None]

    @asynccontextmanager
    async def link(self, port: int = 0, *, reads: bool = True) -> AsyncIterator[Link]:
        """A connection, to Envoy by default, that ends with a reset or a close.

        One that does not read takes as little as asyncio can: 128 bytes and the socket's buffer.
        """
        limit = 64 * 1024 if reads else 64
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port or self.envoy_port, limit=limit
        )
        try:
            yield Link(reader, writer, self.budget)
        finally:
            if self.rng.random() < 0.5:
                reset(writer)
            else:
                writer.close()

    def a_while_s(self) -> float:
        """How long a slow one stays."""
        return self.rng.uniform(0.2, 1.0) * self.hold_s

    async def leave(self, data: bytes, port: int = 0, *, reads: bool = True) -> str:
        """Send on a connection of its own, stay for a while, and go."""
        async with self.link(port, reads=reads) as link:
            await link.send(data)
            await asyncio.sleep(self.a_while_s())
        return "left"

    async def drip(self, data: bytes, pieces: Iterable[bytes], pause_s: float) -> str:
        """Send on a connection of its own, then piece by piece, and go."""
        async with self.link() as link, asyncio.timeout(2 * self.hold_s):
            await link.send(data)
            for piece in pieces:
                await link.send(piece)
                await asyncio.sleep(pause_s)
        return "left"

    async def say(self, data: bytes, port: int = 0, within_s: float | None = None) -> str:
        """Send on a connection of its own; whether the other side closes it."""
        async with self.link(port) as link:
            await link.send(data)
            return await link.drain_input(self.hold_s / 4 if within_s is None else within_s)

    async def ask(self, data: bytes, port: int = 0, within_s: float | None = None) -> str:
        """Send on a connection of its own; the answer's status."""
        async with self.link(port) as link:
            await link.send(data)
            return await link.status(self.hold_s if within_s is None else within_s)

    async def post(
        self,
        body: bytes,
        path: str = _CHAT,
        headers: str = "",
        content_type: str = "application/json",
    ) -> str:
        """Send a whole request; the answer's status."""
        return await self.ask(head(len(body), path, headers, content_type=content_type) + body)


Attack = Callable[[Field], Awaitable[str]]
"""What one attacker does; returns what came of it."""


def by_name(*attacks: Attack) -> dict[str, Attack]:
    """Return functions by their names."""
    return {each.__name__: each for each in attacks}


def head(
    num_bytes: int,
    path: str = _CHAT,
    headers: str = "",
    *,
    content_type: str = "application/json",
) -> bytes:
    """Return the head of a POST; `headers` are whole lines."""
    lines = f"POST {path} HTTP/1.1\r\nhost: fuzz\r\ncontent-type: {content_type}\r\n"
    return f"{lines}content-length: {num_bytes}\r\n{headers}\r\n".encode("latin-1")


def chat(model: str, num_bytes: int = 0, **more: object) -> bytes:
    """A completion's body of about `num_bytes` at least."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return json.dumps({**body, **more, "padding": "x" * num_bytes}).encode()
