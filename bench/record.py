"""Records what a real Envoy sends a router, for `bench.instructions`: `python -m bench.record`.

Envoy, router and pods are those of `bench.run`; a tap between Envoy and router keeps the bytes.
"""

from __future__ import annotations

import asyncio
import http.client
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench import envoys
from bench.load import chat_body
from bench.processes import require, started
from bench.recording import BODY_BYTES, PATH, RECORDED, shortened
from extproc.stack.processes import StackError, free_port
from extproc.stack.stack import Envoy, Router

_NUM_REQUESTS: Final = 3
"""So many that the last ones' headers are all in the connection's table."""
_ADAPTERS: Final = envoys.adapter_names(4)
_LOGGED_S: Final = 2.5
"""Envoy sends an access log entry within a second."""


class Tap:
    """Passes connections on, and keeps what comes in on each."""

    def __init__(self, host: str, port: int) -> None:
        self.inbound: list[bytearray] = []
        self._target = host, port

    async def serve(self, port: int) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self.inbound.append(kept)
        back, forth = await asyncio.open_connection(*self._target)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pump(reader, forth, kept))
            tasks.create_task(_pump(back, writer, bytearray()))


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
) -> None:
    while data := await reader.read(1 << 16):
        kept += data
        writer.write(data)
        await writer.drain()
    writer.close()


@contextmanager
def _beside(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Run a coroutine in a thread of its own, until the end of the context."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(work)
        thread = threading.Thread(target=runner.run, args=(_ended(task),))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


def record() -> bytes:
    """Return what Envoy sent on the connection of some requests and of their log entries.

    Raises:
        StackError: Something did not start, or a request failed.
    """
    with started(Envoy(envoys.pods_config(2, adapters=_ADAPTERS), name="pods")) as pods_envoy:
        pods = [f"127.0.0.1:{port}" for port in pods_envoy.ports]
        router = Router({"discovery": {"static": pods}, "log": {"level": "error"}})
        with started(router):
            host, _, port = router.address.rpartition(":")
            tap, tap_port = Tap(host, int(port)), free_port()
            address = f"127.0.0.1:{tap_port}"
            config = envoys.gateway_config(pods=pods, router=address, is_ours=True)
            with _beside(tap.serve(tap_port)), started(Envoy(config, name="gateway")) as gateway:
                _ask(gateway.port)
            (inbound,) = [bytes(each) for each in tap.inbound if PATH in each]
            return shortened(inbound)


def _ask(port: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(_NUM_REQUESTS):
        headers = {"content-type": "application/json"}
        body = chat_body(_ADAPTERS[0], BODY_BYTES)
        client.request("POST", PATH.decode(), body, headers)
        with client.getresponse() as response:
            response.read()
            if response.status != http.HTTPStatus.OK:
                raise StackError(f"a request failed with {response.status}")
        time.sleep(_LOGGED_S)
    client.close()


def main() -> int:
    """Write the recording; returns the exit status."""
    try:
        require()
        RECORDED.write_bytes(record())
    except StackError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(RECORDED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
