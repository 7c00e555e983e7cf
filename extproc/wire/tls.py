"""TLS of our listeners, from files, and a certificate of our own making.

Kubernetes rotates a mounted secret by swapping files; new connections then get the new certificate
without a restart. Open connections are not affected.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import ssl
import tempfile
from pathlib import Path
from typing import Final

from extproc.errors import needs_extra
from extproc.files.reading import describe_failure, read_stamp
from extproc.files.refusals import is_refusal, tls_failure
from extproc.files.tls import HTTP2, load_key_pair, server_context

log = logging.getLogger(__name__)

LIFETIME = dt.timedelta(days=3650)
"""Longer than any process runs; each start makes a new certificate."""
CLOCK_SKEW = dt.timedelta(hours=1)
"""Tolerance for gateways whose clock is behind."""


class Certificates:
    """Server certificate, key and, for mutual TLS, the authority of the clients, from files.

    Attributes:
        context: Offers HTTP/2 only, by ALPN (9113 3.2), and TLS 1.2 at least (9113 9.2).
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._files = certificate, key, client_ca
        self.context = server_context(certificate, key, client_ca=client_ca, protocols=HTTP2)
        self._stamp = read_stamp(*self._files)
        self._trouble = ""

    def reload_if_changed(self) -> bool:
        """Load the files again, for new connections, if one has changed; return whether they were
        loaded.

        Files that do not match (half of a rotation) change nothing; the next call tries again. A
        new client authority is added to the former ones, which stay trusted until a restart.
        """
        certificate, key, client_ca = self._files
        try:
            stamp = read_stamp(*self._files)
            if stamp == self._stamp:
                return False
            server_context(certificate, key, client_ca=client_ca)  # whether they can be used
            load_key_pair(self.context, certificate, key)
            if client_ca is not None:
                self.context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._trouble:
                name = error.filename or certificate
                log.warning("certificates not reloaded: %s: %s", name, describe_failure(error))
            self._trouble = str(error)
            return False
        self._stamp, self._trouble = stamp, ""
        return True


def make_certificate(*, now: dt.datetime) -> tuple[Path, Path]:
    """Make a self-signed certificate for `localhost`, for gateways that want TLS to the router and
    accept any certificate; return the paths of it and of its key, PEM files.

    Where the system has in-memory files, both files are such: the key never touches a disk, and a
    read-only root file system is enough.

    Raises:
        ImportError: The package `cryptography` is missing; the message says how to get it.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ImportError(needs_extra("a self-signed certificate", "kubernetes", error)) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "extproc")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return _file("extproc-tls.crt", pem), _file("extproc-tls.key", pem_key)


def _file(name: str, content: bytes) -> Path:
    """Make a file that disappears with this process, or a private one if there is no such kind."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
        os.write(descriptor, content)
        return Path(f"/proc/self/fd/{descriptor}")
    path = Path(tempfile.mkdtemp(prefix="extproc-")) / name
    path.write_bytes(content)
    return path


# --- TLS of one accepted connection, as functions of bytes.
#
# asyncio's own TLS reports a connection to its protocol only after the handshake, and allocates
# at least 256 KiB of buffers for it at once; a silent peer is then neither counted nor cheap.
# Here a connection costs nothing until its first bytes arrive, and can be limited from the start.

_READ_BYTES: Final = 256 * 1024


class TlsError(Exception):
    """The peer does not speak TLS as required; the pending output tells it why.

    Attributes:
        is_refusal: One side refuses the other's certificate: people have to change one.
        lacks_http2: The peer offers no HTTP/2.
    """

    def __init__(
        self, message: str, *, is_refusal: bool = False, lacks_http2: bool = False
    ) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        self.lacks_http2 = lacks_http2


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

    @property
    def has_begun(self) -> bool:
        """Whether anything has been received."""
        return self._tls is not None

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
            said = tls_failure(error, trust="server.tls.client_ca_file")
            raise TlsError(said, is_refusal=is_refusal(error)) from error

    def _shake_hands(self) -> None:
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        if self._tls.selected_alpn_protocol() != "h2":
            raise TlsError("no HTTP/2 by ALPN", lacks_http2=True)
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
