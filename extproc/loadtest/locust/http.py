"""HTTP/1.1 over gevent sockets, for streams: connections are kept, pieces are seen as they come.

geventhttpclient parses the answers (llhttp, in C). Its own client reads in blocks and hands over a
block when it is full, which hides when each piece came; so the reading is done here.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.socket
import gevent.ssl
import msgspec
from gevent.monkey import get_original
from geventhttpclient.response import HTTPParseError, HTTPResponse

_RECEIVE_BYTES = 65536
_poll: Callable[[], select.poll] = get_original("select", "poll")
"""The kernel's: asking whether something is there now takes no event loop."""


class UrlError(Exception):
    """Not the URL of a server."""


class ConnectError(Exception):
    """No connection; the message says why."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class FetchError(Exception):
    """What was asked for did not come; the message says why."""


@dataclass(frozen=True)
class Server:
    """Where requests go.

    Attributes:
        host: Name or address.
        port: TCP port.
        is_tls: Whether it is spoken to over TLS.
        prefix: Path before `/v1`, without a slash at its end; often "".
        headers: Sent with every request.
    """

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str] | None = None) -> Server:
        """The server of a base URL; `/v1` at its end may be left out.

        Raises:
            UrlError: It is none.
        """
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise UrlError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise UrlError(f"{url!r} is not an http:// or https:// URL")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if is_tls else 80), is_tls, prefix, headers or {})

    @property
    def authority(self) -> str:
        """As it stands in the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    @cached_property
    def _fields(self) -> bytes:
        lines = {"Host": self.authority, "User-Agent": "extproc-loadtest", **self.headers}
        return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()

    def post(self, path: str, body: bytes) -> bytes:
        """A POST of JSON as it goes over the wire."""
        return (
            b"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (
                f"{self.prefix}{path}".encode(),
                self._fields,
                len(body),
                body,
            )
        )

    def get(self, path: str) -> bytes:
        """A GET as it goes over the wire."""
        return b"GET %s HTTP/1.1\r\n%s\r\n" % (f"{self.prefix}{path}".encode(), self._fields)


class Connections:
    """Connections to one server. The one used last is used next, so that the others may close."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[socket] = []
        self._tls = gevent.ssl.create_default_context() if server.is_tls else None

    def take(self) -> socket:
        """A connection that is not in use, or a new one.

        Raises:
            ConnectError: There is none.
        """
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            connection.close()
        return self._connect()

    def give_back(self, connection: socket) -> None:
        """Keep a connection whose answer was read to its end."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close those that are kept."""
        while self._idle:
            self._idle.pop().close()

    def _connect(self) -> socket:
        server = self._server
        try:
            connection = gevent.socket.create_connection((server.host, server.port))
        except OSError as error:
            raise ConnectError(f"{server.authority}: {error.strerror or error}") from error
        connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        if self._tls is None:
            return connection
        try:
            return self._tls.wrap_socket(connection, server_hostname=server.host)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise ConnectError(f"{server.authority}: {error}") from error
            raise


class Answer(HTTPResponse):
    """An answer as it arrives.

    Args:
        on_body: Gets each piece of the body.
        method: Of the request.
    """

    def __init__(self, on_body: Callable[[bytes], None], method: str = "POST") -> None:
        super().__init__(method)
        self._on_piece = on_body

    def _on_body(self, buf: bytearray) -> None:
        self._on_piece(bytes(buf))

    def header(self, name: str) -> str:
        """The header's value, the first if there are several, "" if there is none."""
        value = self.get(name, "") or ""
        return value if isinstance(value, str) else value[0]


def exchange(
    connections: Connections, request: bytes, answer: Answer, on_data: Callable[[], None]
) -> None:
    """Send a request and read the answer to its end.

    Args:
        connections: To the server.
        request: As it goes over the wire.
        answer: Takes what comes.
        on_data: Called whenever something has come, before `answer` takes it.

    Raises:
        ConnectError: There is no connection.
        ConnectionLost: It ended before the answer.
        BaseException: What else ends it, such as a `gevent.Timeout`; the connection is closed.
    """
    connection = connections.take()
    is_kept = False
    try:
        connection.sendall(request)
        while not answer.message_complete:
            data = connection.recv(_RECEIVE_BYTES)
            on_data()
            answer.feed(data)
            if not data and not answer.message_complete:
                raise ConnectionLost("the connection was closed")
        is_kept = not answer.should_close()
    except (HTTPParseError, OSError) as error:
        raise ConnectionLost(str(error)) from error
    finally:
        if is_kept:
            connections.give_back(connection)
        else:
            connection.close()


def fetch_json(server: Server, path: str, *, timeout_s: float) -> Any:
    """GET a JSON document.

    Raises:
        FetchError: It did not come, in one line.
    """
    body = bytearray()
    answer = Answer(body.extend, "GET")
    connections = Connections(server)
    try:
        with gevent.Timeout(timeout_s, FetchError(f"no answer in {timeout_s:g} s")):
            exchange(connections, server.get(path), answer, lambda: None)
        if answer.status_code != 200:
            raise FetchError(f"status {answer.status_code}: {_line(body)}")
        return msgspec.json.decode(body)
    except ConnectError as error:
        raise FetchError(f"no connection to {error}") from error
    except (ConnectionLost, FetchError, msgspec.DecodeError) as error:
        raise FetchError(f"{server.authority}{server.prefix}{path}: {error}") from error
    finally:
        connections.close()


def _line(body: bytearray) -> str:
    return " ".join(body[:200].decode(errors="replace").split())


def _is_quiet(connection: socket) -> bool:
    """Whether nothing has come, not even the end."""
    poll = _poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
