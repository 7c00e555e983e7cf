"""What a pod may answer on a connection of ours, where aiohttp sets no limit.

A server may say `100 Continue` as often as it likes before its answer (RFC 9110 15.2), or answers
that nobody asked for. aiohttp reads all that one read of the socket brought before anything else
has its turn: two seconds of the event loop, and 200 MB.
"""

from __future__ import annotations

import functools
from ssl import SSLContext
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

MAX_HEADS: Final = 16
"""Heads that may come for one request."""
_SLICE_BYTES: Final = 2048
"""Looked at before heads are counted: a hundred of the shortest."""


class PodConnection(ResponseHandler):
    """One connection; dropped when more heads come for a request than `MAX_HEADS`."""

    _num_heads = 0

    def set_response_params(self, **params: Any) -> None:
        """A request begins."""
        self._num_heads = 0
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """A head has been read."""
        self._num_heads += 1
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Take what the socket brought; slice by slice where it may be many heads."""
        if data.count(b"HTTP/") <= MAX_HEADS:
            super().data_received(data)
            return
        for at in range(0, len(data), _SLICE_BYTES):
            super().data_received(data[at : at + _SLICE_BYTES])
            if self._num_heads > MAX_HEADS:
                if self.transport is not None:
                    self.transport.abort()
                return


def connector(ssl: SSLContext | None) -> aiohttp.TCPConnector:
    """Connects to pods, as many as there are; within the event loop only."""
    made = aiohttp.TCPConnector(limit=0, ssl=ssl if ssl is not None else True)
    # aiohttp has no public way to say this; a test sees that it is heard.
    factory: Any = functools.partial(PodConnection, loop=made._loop)
    made._factory = factory
    return made
