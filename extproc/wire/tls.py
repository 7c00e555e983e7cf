"""TLS for the listener of grpcio, and for our calls to pods."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.files.reading import check_readable, read_bytes, read_stamp

if TYPE_CHECKING:
    import grpc


def server_credentials(
    certificate: Path, key: Path, client_ca: Path | None = None
) -> grpc.ServerCredentials:
    """Return credentials that check the files at each handshake and read changed ones again.

    Files that cannot be read leave the last good ones in force.

    Args:
        certificate: Certificate chain.
        key: Its private key.
        client_ca: CAs of client certificates, which are then required.

    Raises:
        OSError: The files cannot be read now.
    """
    import grpc  # only one of the transports needs it, and it takes 9 MB

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = (read_bytes(key), read_bytes(certificate))
        roots = read_bytes(client_ca) if client_ca is not None else None
        return grpc.ssl_server_certificate_configuration([pair], roots)

    loaded = read_stamp(certificate, key, client_ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal loaded
        try:
            stamp = read_stamp(certificate, key, client_ca)
            if stamp == loaded:
                return None
            fresh = configuration()
        except OSError:
            return None
        loaded = stamp
        return fresh

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type] # None means "no change"; the stubs miss it
        require_client_authentication=client_ca is not None,
    )


def client_context(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext:
    """Return a context for our calls to pods; without `ca_file` it trusts the system's CAs.

    Raises:
        OSError: The file cannot be read, or has no certificates (`ssl.SSLError`).
    """
    check_readable(ca_file)
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
