"""The key and the trust of our own requests to pods: read again as soon as one of them is refused.

A fleet changes its key, or its authority, pod by pod, and the file changes at some moment of that.
So what was in the file before is tried as well, where a pod refuses what is there now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from ssl import SSLContext

from extproc.files.reading import describe_failure, read_key, read_stamp

log = logging.getLogger(__name__)


class PodSecrets:
    """The key and the trust that files name.

    Args:
        key_file: Has the pods' API key; None where they have none.
        ca_file: Has the authorities of their certificates; None for the system's.
        trust: Returns the context of our connections, which trusts these.
        tls_name: Must be in the pods' certificates; None for the host that is dialled.

    Attributes:
        keys: The key of the file, and the one that was there before; none without a file.
        contexts: Likewise those that trust what is in the file; none without TLS.
        tls_name: As given.

    Raises:
        OSError: The file with the key cannot be used.
    """

    def __init__(
        self,
        key_file: Path | None,
        ca_file: Path | None = None,
        trust: Callable[[], SSLContext | None] = lambda: None,
        *,
        tls_name: str | None = None,
    ) -> None:
        self.tls_name = tls_name
        self._key_file, self._ca_file, self._trust = key_file, ca_file, trust
        self.keys: Sequence[str] = () if key_file is None else (read_key(key_file),)
        context = trust()
        self.contexts: Sequence[SSLContext] = () if context is None else (context,)
        self._stamps = [read_stamp(each) for each in self._files]
        self._trouble = ""

    @property
    def _files(self) -> tuple[Path | None, Path | None]:
        return self._key_file, self._ca_file if self.contexts else None

    def reread(self) -> None:
        """Read files that have changed, since something of theirs was refused.

        One that cannot be used changes nothing.
        """
        try:
            stamps = [read_stamp(each) for each in self._files]
            of_key, of_ca = (
                now != before for now, before in zip(stamps, self._stamps, strict=True)
            )
            if of_key and self._key_file is not None:
                key = read_key(self._key_file)
                if key != self.keys[0]:
                    log.info("pods.api_key_file: there is another key")
                    self.keys = key, self.keys[0]
            if of_ca and (context := self._trust()) is not None:
                log.info("pods.ca_file: read again")
                self.contexts = context, self.contexts[0]
        except OSError as error:
            if str(error) != self._trouble:
                why = describe_failure(error)
                log.warning("pods.api_key_file, pods.ca_file: not read again: %s", why)
            self._trouble = str(error)
            return
        self._stamps, self._trouble = stamps, ""


PodAccess = tuple[dict[str, str], SSLContext | None, PodSecrets]
"""The headers, the TLS context and the secrets of our own requests to pods: what a `PodClient`
takes."""
