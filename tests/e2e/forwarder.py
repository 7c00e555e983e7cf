"""TCP forwarders that a test can switch off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Switch:
    """TCP forwarders. Off: nothing passes, and no connection ends."""

    def __init__(self) -> None:
        self._is_on = asyncio.Event()
        self._is_on.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def turn(self, *, on: bool) -> None:
        if on:
            self._is_on.set()
        else:
            self._is_on.clear()

    async def to(self, *targets: str, listen: str = "127.0.0.1:0") -> str:
        """Return an address that forwards to the first of `targets` that can be reached."""

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            task = asyncio.ensure_future(self._join(targets, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        own_host, _, own_port = listen.rpartition(":")
        server = await asyncio.start_server(forward, own_host, int(own_port))
        self._servers.append(server)
        return f"{own_host}:{server.sockets[0].getsockname()[1]}"

    async def _join(
        self, targets: Sequence[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._is_on.wait()
        far = await _reached(targets)
        if far is None:
            writer.close()
            return
        far_reader, far_writer = far
        self._writers.add(far_writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, far_writer))
            group.create_task(self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._is_on.wait()
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    async def __aenter__(self) -> Switch:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # some hold bytes that nobody reads
            writer.transport.abort()
        await asyncio.sleep(0)  # closed in the loop's next round


async def _reached(
    targets: Sequence[str],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    for target in targets:
        host, _, port = target.rpartition(":")
        try:
            return await asyncio.open_connection(host, int(port))
        except OSError:
            continue
    return None
