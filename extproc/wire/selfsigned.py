"""A self-signed certificate, for gateways that want TLS to the router and accept any certificate.

Where the system has in-memory files, both files are such: the key never touches a disk, and a
read-only root file system is enough.
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path

from extproc.errors import needs_extra

LIFETIME = dt.timedelta(days=3650)
"""Longer than any process runs; each start makes a new certificate."""
CLOCK_SKEW = dt.timedelta(hours=1)
"""Tolerance for gateways whose clock is behind."""


def make_certificate(*, now: dt.datetime) -> tuple[Path, Path]:
    """Make a certificate for `localhost`; return the paths of it and of its key, PEM files.

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
