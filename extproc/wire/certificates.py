"""Certificates that others will refuse, as far as their files tell; the files can be read.

Nothing here keeps the router from starting: the files may be renewed while it runs, and Envoy may
accept any certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from extproc.files.refusals import tls_failure
from extproc.files.tls import client_context, server_context

CLIENT_CA = "server.tls.client_ca_file"
_FLIGHTS = 4
"""Times that each side takes its turn in a handshake, at most; TLS 1.2 with a client certificate
takes three."""


def authority_warnings(name: str, ca_file: Path, now: datetime) -> Iterator[str]:
    """Yield a line for each authority in the file of a field that nobody should trust.

    Raises:
        OSError: The file cannot be used.
    """
    yield from (f"{name}: {ca_file}: {line}" for line in _of_authorities(ca_file, now))


def listener_warnings(
    files: tuple[Path, Path, Path | None],
    link: ssl.SSLContext | None,
    *,
    trust: str,
    name: str | None,
) -> Iterator[str]:
    """Yield a line if the listener's certificate will be refused, by anybody or by replicas.

    Args:
        files: The certificate, its key, and the authorities of clients.
        link: Of replicas that have the same files; None where there are none.
        trust: The field that says which certificates these trust.
        name: That the certificates of replicas must have.

    Raises:
        OSError: A file cannot be used.
    """
    cert_file, key_file, client_ca = files
    trusting = client_context(cert_file, checks_name=False)
    if refusal := _refusal(trusting, server_context(cert_file, key_file), "cert_file"):
        yield f"server.tls.cert_file: {cert_file}: {refusal}"
    elif link is not None:
        listener = server_context(cert_file, key_file, client_ca=client_ca)
        if refusal := _refusal(link, listener, trust, name):
            yield f"peers: a replica with the same files will not be linked: {refusal}"


def _of_authorities(ca_file: Path, now: datetime) -> Iterator[str]:
    context = client_context(ca_file)
    if not context.cert_store_stats()["x509_ca"]:
        yield (
            "there is no CA in it: only its own certificates are accepted, and none that they have "
            "signed: put the CA there"
        )
    for each in context.get_ca_certs():
        begins, ends = (
            datetime.fromtimestamp(ssl.cert_time_to_seconds(str(each[key])), UTC)
            for key in ("notBefore", "notAfter")
        )
        if not begins <= now <= ends:
            what = f"expired on {ends:%Y-%m-%d}" if ends < now else f"begins on {begins:%Y-%m-%d}"
            yield f"the CA {_name(each['subject'])} {what}, and nothing that it has signed is valid"


def _name(subject: object) -> str:
    """Return the common name in a subject as `ssl` gives it, or all of it."""
    assert isinstance(subject, tuple)
    parts = dict(pair for each in subject for pair in each)
    return repr(parts.get("commonName") or ", ".join(parts.values()))


def _refusal(
    client: ssl.SSLContext, server: ssl.SSLContext, trust: str, name: str | None = None
) -> str:
    """Return why a handshake of these two fails, "" if it does not. It is one in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for side in sides * _FLIGHTS:
        try:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        except ssl.SSLError as error:
            return tls_failure(error, trust=CLIENT_CA if side.server_side else trust)
    return ""
