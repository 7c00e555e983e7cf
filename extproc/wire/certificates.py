"""TLS from files: a context for HTTP/2 that follows its files.

Kubernetes rotates a mounted secret by swapping files; new connections then get the new certificate
without a restart. Open connections are not affected.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from extproc.files.reading import check_readable, load_key_pair, read_stamp

log = logging.getLogger(__name__)


class Certificates:
    """Server certificate, key and, for mutual TLS, the authority of the clients, from files.

    Attributes:
        context: Offers HTTP/2 only, by ALPN (9113 3.2), and TLS 1.2 at least (9113 9.2).
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._files = certificate, key, client_ca
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        # 9113 9.2.1: compression and renegotiation MUST be disabled.
        self.context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        self.context.set_alpn_protocols(["h2"])
        if client_ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._load(self.context)
        self._stamp = read_stamp(*self._files)
        self._trouble = ""

    def reload_if_changed(self) -> bool:
        """Load the files again, for new connections, if one has changed; return whether they were
        loaded.

        Files that do not match (half of a rotation) change nothing; the next call tries again. A
        new client authority is added to the former ones, which stay trusted until a restart.
        """
        try:
            stamp = read_stamp(*self._files)
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
        certificate, key, client_ca = self._files
        check_readable(*self._files)
        load_key_pair(context, certificate, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
