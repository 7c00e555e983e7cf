"""TLS from files: a context for HTTP/2, loaded again when the files change.

Kubernetes rotates a mounted secret by swapping files; new connections then get the new certificate
without a restart, and connections that are open keep what they have.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from extproc.shell.files import check_readable, load_key_pair

log = logging.getLogger(__name__)


class Certificates:
    """Server certificate, key and, for mutual TLS, the authority of the clients, from files.

    Attributes:
        context: What `serve` listens with; offers HTTP/2 only, by ALPN (9113 3.2), TLS 1.2 at least
            (9113 9.2).
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        # 9113 9.2.1: compression and renegotiation MUST be disabled.
        self.context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        self.context.set_alpn_protocols(["h2"])
        if client_ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._load(self.context)
        self._stamp = self._read_stamp()
        self._trouble = ""

    def reload_if_changed(self) -> bool:
        """Load the files again if one has changed; for connections made from then on.

        Files that do not fit each other (half of a rotation) change nothing; the next call tries
        again. A client authority is added to the former ones, which stay trusted until a restart.
        """
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return False
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            if str(error) != self._trouble:
                log.warning("certificates not reloaded: %s", error)
            self._trouble = str(error)
            return False
        self._stamp, self._trouble = stamp, ""
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        check_readable(self._certificate, self._key, self._client_ca)
        load_key_pair(context, self._certificate, self._key)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)

    def _read_stamp(self) -> list[tuple[int, int, int]]:
        paths = (self._certificate, self._key, self._client_ca)
        stats = [os.stat(path) for path in paths if path is not None]
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]
