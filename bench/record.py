"""Records what a real Envoy sends a router, for `bench.instructions`: `python -m bench.record`.

Envoy, router and pods are those of `bench.run`; a tap between Envoy and router keeps the bytes.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from bench.crowd import Crowd, Plan
from bench.load import chat_body
from bench.recording import BODY_BYTES, PATH, RECORDED, shortened
from bench.stack import gateway_config
from extproc.stack.stack import Envoy, Router

_NUM_REQUESTS: Final = 3
"""So many that the last ones' headers are all in the connection's table."""
_LOGGED_S: Final = 2.5
"""Envoy sends an access log entry within a second."""


class Tap:
    """Passes connections on, and keeps what comes in on each."""

    def __init__(self, target: str) -> None:
        self.inbound: list[bytearray] = []
        self._host, _, self._port = target.rpartition(":")

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a connection."""
        self.inbound.append(kept := bytearray())
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        await asyncio.gather(_pump(reader, forth, kept), _pump(back, writer, bytearray()))


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
) -> None:
    while data := await reader.read(1 << 16):
        kept += data
        writer.write(data)
        await writer.drain()
    writer.close()


async def record() -> bytes:
    """Return what Envoy sent on the connection of some requests and of their log entries.

    Raises:
        StackError: Something did not start.
        aiohttp.ClientResponseError: A request failed.
    """
    async with Crowd(Plan(2, 4)) as crowd:
        config = {"discovery": {"static": crowd.pods}, "log": {"level": "error"}}
        async with Router(config) as router:
            tap = Tap(router.address)
            async with await asyncio.start_server(tap.pass_on, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                gateway = gateway_config(crowd.pods, f"127.0.0.1:{port}", is_ours=True)
                async with Envoy(gateway, name="gateway") as envoy:
                    await _ask(envoy.url)
            (inbound,) = [bytes(each) for each in tap.inbound if PATH in each]
            return shortened(inbound)


async def _ask(url: str) -> None:
    body, headers = chat_body("adapter-00", BODY_BYTES), {"content-type": "application/json"}
    async with aiohttp.ClientSession(raise_for_status=True, headers=headers) as http:
        for _ in range(_NUM_REQUESTS):
            async with http.post(f"{url}{PATH.decode()}", data=body) as response:
                await response.read()
            await asyncio.sleep(_LOGGED_S)


if __name__ == "__main__":
    RECORDED.write_bytes(asyncio.run(record()))
    print(RECORDED)
