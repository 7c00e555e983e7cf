"""HTTP to a pod: a session, a bounded GET, and what may go wrong.

aiohttp sets no limit to what a server may answer on a connection: it may say `100 Continue` as
often as it likes before its answer (RFC 9110 15.2), or send answers that nobody asked for. aiohttp
reads all that one read of the socket brought before anything else has its turn: two seconds of the
event loop, and 200 MB.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from extproc.core.errors import ExtprocError
from extproc.core.types import Endpoint

MAX_HEADS: Final = 16
"""Heads that may come for one request."""
_SLICE_BYTES: Final = 2048
"""Looked at before heads are counted: a hundred of the shortest."""


class ResponseError(ExtprocError):
    """A server answered, but with a status or a body of no use. Count it, ask again later."""


class TooLargeError(ResponseError):
    """A server's answer is longer than the limit; the rest was not read."""


FAILURES = (aiohttp.ClientError, OSError, ExtprocError)
"""How a request may fail without anything being wrong with us. OSError: timeouts, too."""


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
        """Read what has arrived, slice by slice where it may be many heads."""
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
    """Connects to pods, as many as there are; within the event loop only."""
    made = aiohttp.TCPConnector(limit=0, ssl=ssl if ssl is not None else True)
    # aiohttp has no public way to say this; a test sees that it is heard.
    factory: Any = functools.partial(PodConnection, loop=made._loop)
    made._factory = factory
    return made


def base_url(endpoint: Endpoint) -> str:
    """The beginning of URLs of our own requests to an endpoint, without a trailing slash."""
    return endpoint.url.rstrip("/") or f"http://{endpoint.address}"


def open_session(
    headers: Mapping[str, str] | None = None, ssl: SSLContext | None = None
) -> aiohttp.ClientSession:
    """Open a session for GETs of pods. Call within the event loop; close it in the end.

    Timeouts are the caller's. Compression is refused: it would cost the pod more than the network,
    and us a bomb's inflation.
    """
    return aiohttp.ClientSession(
        connector=_connector(ssl),
        headers={"Accept-Encoding": "identity", **(headers or {})},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def get(session: aiohttp.ClientSession, url: URL, *, max_bytes: int) -> tuple[int, bytes]:
    """GET `url`; return status and body. Redirects are not followed: a pod does not send us on.

    Raises:
        ResponseError: The body is compressed, which nobody asked for.
        TooLargeError: The body is longer than `max_bytes`.
        aiohttp.ClientError, OSError: As aiohttp raises them. Ask again later.
    """
    async with session.get(url, allow_redirects=False) as response:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            response.close()
            raise ResponseError("the answer is compressed, unasked")
        chunks, num_bytes = [], 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                response.close()  # else aiohttp would read the rest to keep the connection
                raise TooLargeError(f"answer longer than {max_bytes} bytes")
        return response.status, b"".join(chunks)


def describe(error: BaseException) -> str:
    """The reason why a visit or a call failed, in one line for people."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__
