"""A server that costs almost nothing: answers every POST with a stream of server-sent events.

What a load generator can do is measured against it: HTTP/1.1 by hand on uvloop, the same pieces for
every request, one every so many milliseconds, as chunks of their own. `GET /v1/models` lists a base
model and adapters.
"""

from __future__ import annotations

import asyncio
import signal
from typing import cast

import uvloop

NUM_PIECES = 16
GAP_S = 0.015
NUM_ADAPTERS = 100

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"x-served-by: bench\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _piece(text: str) -> bytes:
    return _chunk(
        b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"base",'
        b'"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":null}]}\n\n'
        % text.encode()
    )


def _usage(num: int) -> bytes:
    return _chunk(
        b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"base","choices":[],'
        b'"usage":{"prompt_tokens":100,"completion_tokens":%d,"total_tokens":%d}}\n\n'
        % (num, num + 100)
    )


def _models() -> bytes:
    cards = ['{"id":"base","object":"model","parent":null}']
    cards += [f'{{"id":"a{n}","object":"model","parent":"base"}}' for n in range(NUM_ADAPTERS)]
    body = f'{{"object":"list","data":[{",".join(cards)}]}}'.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Stream(asyncio.Protocol):
    """One connection; no pipelining."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._piece = _piece(" word")
        self._last = _usage(NUM_PIECES) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Answer once a whole request is there."""
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            self._buffer = b""
            self._transport.write(_models())
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) >= length:
            self._buffer = b""
            self._loop.call_later(GAP_S, self._send, NUM_PIECES, True)

    def _send(self, left: int, is_first: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_HEAD + self._piece if is_first else self._piece)
        if left > 1:
            self._loop.call_later(GAP_S, self._send, left - 1, False)
        else:
            self._transport.write(self._last)


async def serve() -> None:
    """Serve until SIGTERM; says its port on the first line."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stream, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(serve())
