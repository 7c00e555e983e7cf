"""TLS contexts: the one place that makes them, for our listeners and for our own connections.

A certificate is accepted or refused alike on every Python, as curl, Go and Envoy do it:

1. Python's own default asks, since 3.13, for all that RFC 5280 asks of authorities
   (`VERIFY_X509_STRICT`). Authorities of Kubernetes clusters and of companies lack some of that: an
   Authority Key Identifier (EKS), a key usage (microk8s), both (`openssl x509 -req`). That default
   is off here. The chain, its signatures, names, dates and purposes are checked in any case.
2. Each certificate in a file of authorities is trusted, an intermediate one and a server's own
   included (`VERIFY_X509_PARTIAL_CHAIN`, Python's default since 3.13).

TLS is 1.2 or newer. Files are regular ones of a limited size; a private key must not be encrypted.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Sequence
from pathlib import Path

from extproc.files.reading import check_readable

HTTP2 = ("h2",)
SYSTEM_TRUST = "the system's CAs (or those of SSL_CERT_FILE)"


def client_context(
    ca_file: Path | None = None,
    *,
    verify: bool = True,
    checks_name: bool = True,
    certificate: Path | None = None,
    key: Path | None = None,
    protocols: Sequence[str] = (),
) -> ssl.SSLContext:
    """Return a context for connections that we open.

    Args:
        ca_file: PEM file with the authorities of the servers' certificates, or with these
            certificates themselves. None for the system's authorities.
        verify: Whether servers' certificates are checked.
        checks_name: Whether they must have the name, or address, that is dialled.
        certificate: PEM file with our chain, for servers that want one.
        key: PEM file with its private key; None if `certificate` has it.
        protocols: Offered by ALPN.

    Raises:
        OSError: A file cannot be read, or its content cannot be used (`ssl.SSLError`).
    """
    check_readable(ca_file, certificate, key)
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.check_hostname = verify and checks_name
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    return _finish(context, certificate, key, protocols)


def server_context(
    certificate: Path | None = None,
    key: Path | None = None,
    *,
    client_ca: Path | None = None,
    protocols: Sequence[str] = (),
) -> ssl.SSLContext:
    """Return a context for connections that we accept.

    Args:
        certificate: PEM file with our chain; None if it is loaded later.
        key: PEM file with its private key; None if `certificate` has it.
        client_ca: PEM file with the authorities of the clients' certificates, which are then
            required.
        protocols: Accepted by ALPN.

    Raises:
        OSError: As for `client_context`.
    """
    check_readable(client_ca, certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # 9113 9.2.1: compression and renegotiation MUST be disabled.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return _finish(context, certificate, key, protocols)


@functools.cache
def system_context() -> ssl.SSLContext:
    """Return the client context that trusts the system's authorities: reading them takes long."""
    return client_context()


def load_key_pair(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load a certificate chain and its private key, which must not be encrypted.

    Raises:
        OSError: A file cannot be read, or they do not match (`ssl.SSLError`).
    """
    # Without `password` OpenSSL would ask the terminal for one, and wait.
    context.load_cert_chain(certificate, key, password=_refuse_password)


def _finish(
    context: ssl.SSLContext, certificate: Path | None, key: Path | None, protocols: Sequence[str]
) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # not that of Debian's Python by itself
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if certificate is not None:
        load_key_pair(context, certificate, key)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def _refuse_password() -> str:
    raise ssl.SSLError(0, "the private key is encrypted")
