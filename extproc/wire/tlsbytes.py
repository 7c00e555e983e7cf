"""TLS of one accepted connection, as functions of bytes.

asyncio's own TLS reports a connection to its protocol only after the handshake, and allocates at
least 256 KiB of buffers for it at once; a silent peer is then neither counted nor cheap. Here a
connection costs nothing until its first bytes arrive, and can be limited from the start.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Final

_READ_BYTES: Final = 256 * 1024


class TlsError(Exception):
    """The peer does not speak TLS as required; the pending output tells it why."""


class TlsBytes:
    """Server side of one TLS connection.

    Attributes:
        is_ready: The handshake is complete, with HTTP/2 chosen by ALPN (9113 3.2).
        is_over: The peer has closed its side.
    """

    __slots__ = ("_context", "_incoming", "_outgoing", "_tls", "is_over", "is_ready")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.is_ready = False
        self.is_over = False

    def receive(self, data: bytes) -> bytes:
        """Return the plain text of bytes from the socket.

        Raises:
            TlsError: The handshake or a record is wrong. Write `data_to_send()`, then close.
        """
        self._incoming.write(data)
        try:
            if not self.is_ready:
                self._shake_hands()
            return self._read() if self.is_ready else b""
        except ssl.SSLError as error:
            raise TlsError(str(error)) from error

    def _shake_hands(self) -> None:
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        if self._tls.selected_alpn_protocol() != "h2":
            raise TlsError("no HTTP/2 by ALPN")
        self.is_ready = True

    def _read(self) -> bytes:
        assert self._tls is not None
        parts = []
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_over = True
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, data: bytes) -> None:
        """Encrypt `data`; the handshake must be complete."""
        assert self._tls is not None
        if data:
            self._tls.write(data)

    def close(self) -> None:
        """Send close_notify (8446 6.1)."""
        if self.is_ready:
            assert self._tls is not None
            # Raised because the peer has not sent its own close_notify; ours is written.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the socket."""
        return self._outgoing.read()
