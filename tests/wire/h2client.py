"""One gRPC call over the `h2` library: what came back, byte for byte and status for status.

grpc.aio forgets the server's status if a write of its own fails after an early end; this does not.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

PATIENCE_S = 60.0


class Heard(NamedTuple):
    """The response to one call of a client."""

    messages: tuple[bytes, ...]
    code: int
    details: str


async def call(address: str, path: str, messages: Sequence[bytes]) -> Heard:
    """Send all messages, half-close, and listen to the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        return await asyncio.wait_for(_Call(reader, writer).run(path, messages), PATIENCE_S)
    finally:
        writer.close()


class _Call:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._body = b""
        self._fields: dict[str, str] = {}
        self._is_over = False

    async def run(self, path: str, messages: Sequence[bytes]) -> Heard:
        self._h2.initiate_connection()
        self._h2.send_headers(
            1,
            [
                *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")),
                *(("te", "trailers"), ("content-type", "application/grpc")),
            ],
        )
        for message in messages:
            self._h2.send_data(1, b"\0" + struct.pack(">I", len(message)) + message)
        self._h2.end_stream(1)
        while not self._is_over:
            self._writer.write(self._h2.data_to_send())
            data = await self._reader.read(65_536)
            if not data:
                break
            try:
                events = self._h2.receive_data(data)
            except ProtocolError:  # a reset that crossed our end
                break
            for event in events:
                self._take(event)
        return Heard(
            tuple(_split(self._body)),
            int(self._fields.get("grpc-status", -1)),
            unquote(self._fields.get("grpc-message", "")),
        )

    def _take(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._body += event.data or b""
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, 1)
        elif isinstance(event, ResponseReceived | TrailersReceived):
            self._fields |= {str(name): str(value) for name, value in event.headers or ()}
        elif isinstance(event, StreamEnded | StreamReset):
            self._is_over = True


def _split(body: bytes) -> list[bytes]:
    messages = []
    while body:
        (length,) = struct.unpack(">I", body[1:5])
        messages.append(body[5 : 5 + length])
        body = body[5 + length :]
    return messages
