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

from extproc.config import Config
from extproc.files.refusals import tls_failure
from extproc.files.tls import client_context, server_context
from extproc.service.peeraccess import link_tls

CLIENT_CA = "server.tls.client_ca_file"
_FLIGHTS = 4
"""Times that each side takes its turn in a handshake, at most; TLS 1.2 with a client certificate
takes three."""


def certificate_warnings(config: Config, *, now: datetime) -> Iterator[str]:
    """Yield a line for each certificate that the other side will refuse, and each useless CA.

    Raises:
        OSError: A file cannot be used.
    """
    redis = config.adapters.store and config.adapters.store.redis
    tls, peers, pods = config.server.tls, config.peers, config.pods
    for name, ca_file in (
        ("pods.ca_file", pods.ca_file if pods.tls else None),
        (CLIENT_CA, tls.client_ca_file if tls else None),
        ("peers.ca_file", peers.ca_file if peers and tls else None),
        ("adapters.store.redis.ca_file", redis.ca_file if redis else None),
    ):
        if ca_file is not None:
            yield from (f"{name}: {ca_file}: {line}" for line in _of_authorities(ca_file, now))
    if tls is None:
        return
    trusting = client_context(tls.cert_file, checks_name=False)
    if refusal := _refusal(trusting, server_context(tls.cert_file, tls.key_file), "cert_file"):
        yield f"server.tls.cert_file: {tls.cert_file}: {refusal}"
    elif (link := link_tls(config)) is not None and peers is not None:
        listener = server_context(tls.cert_file, tls.key_file, client_ca=tls.client_ca_file)
        trust = "peers.ca_file" if peers.ca_file else CLIENT_CA
        if refusal := _refusal(link, listener, trust, peers.tls_name):
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
