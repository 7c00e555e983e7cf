"""HTTP to a pod: a kept connection for pages that are read again and again, new ones for single
calls.

Every pod's page is read twenty times a second. A general HTTP client costs several times as much as
the page. It does not limit what a server may send beside a body either: heads, fields, and bytes
without any of it. Here a request is one write, and a response what the parser (llhttp) calls back.
Nothing is followed, decompressed or stored.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from io import BytesIO
from ssl import SSLContext, SSLError
from typing import Final, NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from yarl import URL

from extproc.bounds import fits_header
from extproc.files.tls import system_context
from extproc.reports.longpages import FREE_BYTES, Lease, LongPages
from extproc.reports.podhttp import MAX_HEADS, ResponseError, TooLargeError
from extproc.reports.podsecrets import PodSecrets

MAX_FIELDS: Final = 128
"""Fields (lines) of all heads and the trailer of one response."""
MAX_IDLE_BYTES: Final = 64 * 1024
"""Received one after the other without a byte of a body: heads, a chunk's size, a trailer."""
MAX_PIECES: Final = 16 * 1024
"""Chunks, or reads of the socket, of one body. Each costs as much as some kilobytes."""

_NO_ROOM: Final = "a long response, while others fill the memory for them"
_REFUSALS: Final = HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN
_USUAL: Final = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "extproc"}


class UnansweredError(ConnectionError):
    """The server closed the connection before the first byte of a response. Ask again."""


class Answer(NamedTuple):
    """A response.

    Attributes:
        content_type: Without parameters; "" for none.
    """

    status: int
    content_type: str
    body: bytes


class PodClient:
    """GETs from one server, one at a time, and asks beside that. Belongs to one event loop; `close`
    ends it.

    Compression is refused: it would cost the pod more CPU than it saves network, and expose us to
    decompression bombs. Redirects are not followed. Timeouts are the caller's: what is cancelled
    closes its connection.

    Args:
        headers: Sent with every request, e.g. `Authorization`.
        tls: For a server behind TLS; None for the system's trust.
        secrets: The pods' key, and what `tls` trusts, to be read again where a pod refuses one.
        room: For long responses of all clients together; its own by default.
        on_closed: Called when the server closes the kept connection while it is idle.

    Raises:
        ValueError: A header is not one line of printable ASCII.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        tls: SSLContext | None = None,
        secrets: PodSecrets | None = None,
        room: LongPages | None = None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_closed = on_closed
        given = headers or {}
        known = {name.lower() for name in given}
        usual = {name: value for name, value in _USUAL.items() if name.lower() not in known}
        lines = [f"{name}: {value}" for name, value in {**usual, **given}.items()]
        if not all(map(fits_header, lines)):
            raise ValueError("a header that is not one line of printable ASCII")
        self._lines = "\r\n".join(lines)
        self._tls = tls
        self._lease = (room or LongPages()).lease()
        self._secrets = secrets
        self._key = secrets.keys[0] if secrets is not None and secrets.keys else ""
        self._requests: dict[URL, bytes] = {}  # with this key
        self._connection: _Connection | None = None

    async def get(self, url: URL, *, max_bytes: int) -> tuple[int, bytes]:
        """GET `url`, always one of the same server; return status and body.

        A kept connection that turns out to be closed is replaced, once. A key that is refused is
        exchanged for the other one that there is, which is kept if it is not.

        Raises:
            ResponseError: The response is not HTTP, compressed or of too many parts.
            TooLargeError: The body is longer than `max_bytes`; the rest was not read.
            OSError: There was no whole response. Ask again later.

        The response holds its room until `release`.
        """
        answer = await self._with_key(self._key, lambda key: self._get(url, key, max_bytes))
        return answer.status, answer.body

    async def _with_key(self, first: str, send: Callable[[str], Awaitable[Answer]]) -> Answer:
        """Send with a key, and where it is refused with the others that the file has now."""
        answer = await send(first)
        if answer.status in _REFUSALS and self._secrets is not None:
            self._secrets.reread()
            for key in self._secrets.keys:
                if key != first and answer.status in _REFUSALS:
                    answer = await send(key)
                    if answer.status not in _REFUSALS:
                        self._key = key
                        self._requests.clear()
        return answer

    async def _get(self, url: URL, key: str, max_bytes: int) -> Answer:
        made = self._requests if key == self._key else {}
        request = made.get(url)
        if request is None:
            request = made[url] = self._prepare("GET", url, key)
        kept = self._connection
        if kept is not None and kept.is_open:
            try:
                return await kept.ask(request, max_bytes)
            except UnansweredError:
                pass  # as a server may do with a connection that was idle
            finally:
                kept.give_up()
        self._connection = fresh = await self._dial(url)
        fresh.on_idle_closed = self._on_closed
        try:
            return await fresh.ask(request, max_bytes)
        finally:
            fresh.give_up()

    async def ask(
        self, method: str, url: URL, document: object = None, *, max_bytes: int
    ) -> Answer:
        """Ask any server once, on a connection of its own, with a document as JSON.

        Raises:
            ResponseError, TooLargeError, OSError: As `get`.
        """

        async def send(key: str) -> Answer:
            connection = await self._dial(url)
            try:
                return await connection.ask(self._prepare(method, url, key, document), max_bytes)
            finally:
                connection.abort()
                self.release()

        keys = () if self._secrets is None else self._secrets.keys
        return await self._with_key(keys[0] if keys else "", send)

    def release(self) -> None:
        """Give back the room of responses: they have been read."""
        self._lease.release()

    @property
    def is_open(self) -> bool:
        """The connection is open, as far as is known."""
        return self._connection is not None and self._connection.is_open

    def close(self) -> None:
        """Close the connection."""
        self.release()
        if self._connection is not None:
            self._connection.abort()

    def _prepare(self, method: str, url: URL, key: str, document: object = None) -> bytes:
        lines = [f"{method} {url.raw_path_qs} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines.append(self._lines)
        if key:
            lines.append(f"Authorization: Bearer {key}")
        body = b"" if document is None else json.dumps(document).encode()
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def _dial(self, url: URL) -> _Connection:
        lease = self._lease
        if url.scheme != "https":
            return await _connection(url, lease, None)
        secrets = self._secrets
        if secrets is None or not secrets.contexts:
            return await _connection(url, lease, self._tls or system_context())
        tried, name = secrets.contexts[0], secrets.tls_name
        try:
            return await _connection(url, lease, tried, name)
        except SSLError as error:
            failure = error
        secrets.reread()
        for each in secrets.contexts:
            if each is not tried:
                try:
                    return await _connection(url, lease, each, name)
                except SSLError as error:
                    failure = error
        raise failure


async def _connection(
    url: URL, lease: Lease, tls: SSLContext | None, name: str | None = None
) -> _Connection:
    host, loop = url.host or "", asyncio.get_running_loop()
    sock = await _connect(host, url.port or 0)
    named = (name or host) if tls else None
    _, connection = await loop.create_connection(
        lambda: _Connection(loop, lease), sock=sock, ssl=tls, server_hostname=named
    )
    return connection


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that accepts.

    With a socket of our own: uvloop can leak one whose creation was cancelled.

    Raises:
        OSError: None does; of the last one.
    """
    loop = asyncio.get_running_loop()
    try:  # an IP address, as nearly always: without a thread
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    for number, (family, kind, protocol, _, address) in enumerate(found, start=1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or number == len(found):
                raise
    raise OSError(f"{host} has no address")


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way.

    Attributes:
        is_open: Another request can be made.
        on_idle_closed: Called when the server closes it between two requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lease: Lease) -> None:
        self.is_open = False
        self.on_idle_closed: Callable[[], None] = lambda: None
        self._loop, self._lease = loop, lease
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = HttpResponseParser(self)
        # As far as aiohttp goes, for servers that the router has always read.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )

    @property
    def is_asked(self) -> bool:
        """A request is under way."""
        return self._answer is not None

    def ask(self, request: bytes, max_bytes: int) -> asyncio.Future[Answer]:
        """Send a request; only while `is_open` and not `is_asked`."""
        assert self._transport is not None
        self._answer = answer = self._loop.create_future()
        self._is_silent = True
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._pieces: list[bytes] = []
        self._long: BytesIO | None = None
        self._num_pieces = 0
        self._num_heads = self._num_fields = self._num_idle_bytes = 0
        self._status, self._content_type, self._ends_with_connection = 0, b"", True
        self._transport.write(request)
        return answer

    def give_up(self) -> None:
        """Close at once if a request is under way: whoever asked has been cancelled."""
        if self._answer is not None:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport  # type: ignore[assignment] # uvloop's is not registered
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if not self.is_asked:  # nobody's
            self.abort()
            return
        self._is_silent, num_bytes = False, self._num_bytes
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            ours = error.__context__  # raised in a method below
            self._fail(ours if isinstance(ours, ResponseError) else ResponseError(_reason(error)))
            return
        if self._num_bytes != num_bytes:
            self._num_idle_bytes = 0
        elif self.is_asked:
            self._num_idle_bytes += len(data)
            if self._num_idle_bytes > MAX_IDLE_BYTES:
                self._fail(ResponseError(f"{MAX_IDLE_BYTES} bytes without any of a body"))

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        was_open, self.is_open = self.is_open, False
        if not self.is_asked:
            if was_open:
                self.on_idle_closed()
        elif self._is_silent:
            args = error.args if error is not None else ("the server closed the connection",)
            self._fail(UnansweredError(*args))
        elif error is None and self._status >= HTTPStatus.OK and self._ends_with_connection:
            self._complete()
        else:
            self._fail(error or ConnectionError("the server closed the connection in a response"))
        del self._parser  # it refers to this object, and would leave both to the garbage collector

    # --- what the parser calls

    def on_message_begin(self) -> None:
        """Refuse what follows the response."""
        if not self.is_asked:
            raise ResponseError("a response that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a field."""
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise ResponseError(f"more than {MAX_FIELDS} fields")
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        elif name == b"content-type":
            self._content_type = value
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            raise ResponseError("the response is compressed, which was not asked for")

    def on_headers_complete(self) -> None:
        """Note the status, maybe a provisional one."""
        self._num_heads += 1
        if self._num_heads > MAX_HEADS:
            raise ResponseError(f"more than {MAX_HEADS} heads")
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        """Count a piece and keep it."""
        self._num_bytes += len(piece)
        self._num_pieces += 1
        if self._num_bytes > self._max_bytes:
            raise TooLargeError(f"response longer than {self._max_bytes} bytes")
        if not self._lease.take(len(piece), self._lose):
            raise TooLargeError(_NO_ROOM)
        if self._num_pieces > MAX_PIECES:
            raise ResponseError(f"a body of more than {MAX_PIECES} pieces")
        self._keep(piece)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece. Those of a long body are not joined in the end: it would be there twice."""
        if self._long is not None:
            self._long.write(piece)
        elif self._num_bytes <= FREE_BYTES:
            self._pieces.append(piece)
        else:
            self._long = BytesIO()
            self._long.writelines((*self._pieces, piece))
            self._pieces = []

    def on_message_complete(self) -> None:
        """Hand the response on, unless it is provisional."""
        if self._status < HTTPStatus.OK:
            return
        if not self._parser.should_keep_alive():
            self.abort()
        self._complete()

    # --- ends of a request

    def _lose(self) -> None:
        if self.is_asked:
            self._fail(TooLargeError(_NO_ROOM))

    def _complete(self) -> None:
        self._lease.arrived()
        body = b"".join(self._pieces) if self._long is None else self._long.getvalue()
        self._pieces, self._long = [], None
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():  # else cancelled
            content_type = self._content_type.decode("latin-1").partition(";")[0].strip().lower()
            answer.set_result(Answer(self._status, content_type, body))

    def _fail(self, error: Exception) -> None:
        self.abort()
        self._lease.give_back(self._num_bytes)
        self._pieces, self._long = [], None
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


def _reason(error: HttpParserError | HttpParserUpgrade) -> str:
    return f"not HTTP: {error}" if isinstance(error, HttpParserError) else "a change of protocol"
