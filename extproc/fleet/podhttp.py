"""HTTP to a pod: a session, a bounded POST, and their failures.

aiohttp does not limit what a server sends on a connection: any number of `100 Continue` before a
response (RFC 9110 15.2), or responses without a request. It handles one whole read of the socket
before anything else runs: up to two seconds of the event loop, and 200 MB.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Mapping
from http import HTTPStatus
from ssl import SSLContext
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from extproc.errors import ExtprocError
from extproc.types import Endpoint

MAX_HEADS: Final = 16
"""Response heads for one request."""
UNREACHABLE: Final = frozenset(
    (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
)
"""Errors of the host, or of a router on the way, when nobody listens on a port."""
_SLICE_BYTES: Final = 2048
"""Handled between two counts of heads: a hundred of the shortest."""


class ResponseError(ExtprocError):
    """A response with a useless status or body. Ask again later."""


class TooLargeError(ResponseError):
    """A response longer than the limit; the rest was not read."""


FAILURES = (aiohttp.ClientError, OSError, ExtprocError)
"""Failures of a request that are not bugs of ours; timeouts are OSErrors."""


class PodConnection(ResponseHandler):
    """One connection; dropped when it sends more than `MAX_HEADS` heads for a request."""

    _num_heads = 0

    def set_response_params(self, **params: Any) -> None:
        """Begin a request."""
        self._num_heads = 0
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Handle a head."""
        self._num_heads += 1
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Handle a read, slice by slice if it may hold many heads."""
        if data.count(b"HTTP/") <= MAX_HEADS:
            super().data_received(data)
            return
        for at in range(0, len(data), _SLICE_BYTES):
            super().data_received(data[at : at + _SLICE_BYTES])
            if self._num_heads > MAX_HEADS:
                if self.transport is not None:
                    self.transport.abort()
                return


def _connector(ssl: SSLContext | None) -> aiohttp.TCPConnector:
    """Return a connector without a limit of connections; within the event loop only."""
    made = aiohttp.TCPConnector(limit=0, ssl=ssl if ssl is not None else True)
    # aiohttp has no public way to set it; a test checks that it has an effect.
    factory: Any = functools.partial(PodConnection, loop=made._loop)
    made._factory = factory
    return made


def base_url(endpoint: Endpoint) -> str:
    """Return the base URL of our own requests to an endpoint, without a trailing slash."""
    return endpoint.url.rstrip("/") or f"http://{endpoint.address}"


def open_session(
    headers: Mapping[str, str] | None = None, ssl: SSLContext | None = None
) -> aiohttp.ClientSession:
    """Open a session for requests to pods. Call within the event loop; close it in the end.

    Timeouts are the caller's. Compression is refused: it would cost the pod more CPU than it saves
    network, and expose us to decompression bombs.
    """
    return aiohttp.ClientSession(
        connector=_connector(ssl),
        headers={"Accept-Encoding": "identity", **(headers or {})},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def post(
    session: aiohttp.ClientSession, url: URL, document: object, *, max_bytes: int
) -> tuple[int, bytes]:
    """POST `document` as JSON; return status and body. Redirects are not followed.

    Raises:
        ResponseError: The body is compressed, against our request.
        TooLargeError: The body is longer than `max_bytes`.
        aiohttp.ClientError, OSError: As aiohttp raises them. Ask again later.
    """
    async with session.post(url, json=document, allow_redirects=False) as response:
        return response.status, await _body(response, max_bytes)


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        response.close()
        raise ResponseError("the response is compressed, which was not asked for")
    chunks, num_bytes = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            response.close()  # else aiohttp would read the rest to keep the connection
            raise TooLargeError(f"response longer than {max_bytes} bytes")
    return b"".join(chunks)


def describe_status(status: int) -> str:
    """Return the meaning of a status that is not 200, with what to look at."""
    try:
        said = f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        said = f"HTTP {status}"
    return f"{said}: pods.api_key_file?" if status in (401, 403) else said


def describe(error: BaseException) -> str:
    """Return the reason of a failure, in one line for people."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
