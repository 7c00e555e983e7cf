"""A small TCP proxy before a store's server, which can break its answers off in the middle."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from typing import Self


class Cut(Enum):
    """What becomes of an answer after the marker."""

    NOT = "not"
    CLOSED = "closed"  # the connection is closed
    SILENT = "silent"  # nothing more comes
    ERROR = "error"  # an error, as Redis sends it, comes in place of the rest


class Cutter:
    """Relays to a port of this machine.

    Attributes:
        cut: What is done to answers from now on.
        num_cut: Answers that were broken off.
    """

    def __init__(self, port: int, marker: bytes) -> None:
        self.cut = Cut.NOT
        self.num_cut = 0
        self._port, self._marker = port, marker
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):  # cancelled at our end
                theirs = await asyncio.open_connection("127.0.0.1", self._port)
                asking = asyncio.ensure_future(_copy(reader, theirs[1]))
                try:
                    await self._answer(theirs[0], writer)
                finally:
                    asking.cancel()
                    theirs[1].close()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            before, marker, _ = data.partition(self._marker)
            if self.cut is Cut.NOT or not marker:
                writer.write(data)
                await writer.drain()
                continue
            self.num_cut += 1
            if self.cut is Cut.ERROR:  # in place of the value that has the marker
                writer.write(before[: before.rindex(b"$")] + b"-ERR broken\r\n")
            else:
                writer.write(before + marker)
            await writer.drain()
            if self.cut is Cut.CLOSED:
                return
            await asyncio.sleep(60)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
