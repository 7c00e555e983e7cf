"""TLS for our listener and for our calls to pods. Certificates are read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.shell.files import check_readable, read_bytes

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener.

    Attributes:
        cert: Our certificate chain.
        key: Its private key.
        client_ca: CAs of client certificates; set means that clients must have one.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def state(self) -> tuple[int, ...]:
        """Changes whenever a file does (Kubernetes swaps a symbolic link: the target counts)."""
        paths = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        stats = [path.stat() for path in paths]
        return tuple(
            part for stat in stats for part in (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        )


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that look at the files at each handshake and read them when they have changed.

    A pair that cannot be read keeps the last good one in force.

    Raises:
        OSError: The files cannot be read at the start.
    """
    import grpc  # only one of the transports needs it, and it takes 9 MB

    loaded = files.state()
    initial = _configuration(files)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal loaded
        try:
            state = files.state()
            if state == loaded:
                return None
            fresh = _configuration(files)
        except OSError:
            return None
        loaded = state
        return fresh

    return grpc.dynamic_ssl_server_credentials(
        initial,
        fetch,  # type: ignore[arg-type] # None means "no change"; the stubs miss it
        require_client_authentication=files.client_ca is not None,
    )


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    import grpc

    pair = (read_bytes(files.key), read_bytes(files.cert))
    roots = read_bytes(files.client_ca) if files.client_ca is not None else None
    return grpc.ssl_server_certificate_configuration([pair], roots)


def client_context(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext:
    """For our calls to pods over HTTPS.

    Raises:
        OSError: The file cannot be read, or has no certificates (`ssl.SSLError`).
    """
    check_readable(ca_file)
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
