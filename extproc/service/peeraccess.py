"""The proof of being a peer, and the checks of that and of `peers` at the start."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence

from extproc.address import Address
from extproc.config import Config
from extproc.config.file import ConfigError
from extproc.discovery.kubernetes.api import MissingLibraryError, load_library
from extproc.files.reading import check_readable, describe_failure
from extproc.files.tls import HTTP2, client_context
from extproc.peers.keys import PeerKeys, read_keys

log = logging.getLogger(__name__)


def check_peers(config: Config) -> None:
    """Check what can be checked before peers are dialled.

    Raises:
        ConfigError: The peers' port is unknown, the extra `kubernetes` is needed and not installed,
            or a TLS file cannot be used.
    """
    peers = config.peers
    if peers is None:
        return
    if peers.key_file is not None:
        try:
            read_keys(peers.key_file)
        except OSError as error:
            why = describe_failure(error)
            raise ConfigError(f"peers.key_file: {peers.key_file}: {why}") from error
    if peers.static is None and peer_port(config) is None:
        raise ConfigError("peers.port: must be given where server.address has no fixed port")
    try:
        if peers.service is not None:
            load_library("peers.service")
        check_readable(None if config.server.tls is None else peers.ca_file)
    except MissingLibraryError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"peers.ca_file: {peers.ca_file}: {describe_failure(error)}") from error
    try:
        link_tls(config)
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"peers: ca_file and server.tls cannot be used: {why}") from error


def unproven_peers(config: Config) -> list[str]:
    """Return a line where nothing proves who speaks as a peer."""
    if config.peers is None or config.peers.key_file is not None or checks_clients(config):
        return []
    return [
        "peers: without key_file or server.tls.client_ca_file the router cannot verify its peers. "
        "It trusts any process that listens at a peer's address, and sends its picks to any "
        "process that connects"
    ]


def checks_clients(config: Config) -> bool:
    """Return whether TLS lets only clients call that have a certificate."""
    tls = config.server.tls
    return tls is not None and tls.client_ca_file is not None


def keys_of(config: Config) -> Callable[[], Sequence[bytes] | None]:
    """Return what gives the keys that replicas share, as they are now, or None."""
    path = None if config.peers is None else config.peers.key_file
    if path is None:
        return lambda: None
    return PeerKeys(path, on_failure=lambda why: log.error("peers.key_file: %s", why))


def peer_port(config: Config) -> int | None:
    """Return the port of the replicas' gRPC services; None if it is not known."""
    own = config.server.address
    own_port = 0 if own.startswith("unix:") else Address.parse(own).port
    return (config.peers and config.peers.port) or own_port or None


def link_tls(config: Config) -> ssl.SSLContext | None:
    """TLS of the links that we open, from the files as they are now; None without `server.tls`.

    Raises:
        OSError: A file cannot be read, or its content cannot be used (`ssl.SSLError`).
    """
    peers, files = config.peers, config.server.tls
    if peers is None or files is None:
        return None
    return client_context(
        # Replicas share their certificate, and it may vouch for itself. They are dialled by
        # address, which certificates rarely contain.
        peers.ca_file or files.client_ca_file or files.cert_file,
        verify=peers.tls_verify,
        checks_name=peers.tls_name is not None,
        certificate=files.cert_file,
        key=files.key_file,
        protocols=HTTP2,
    )
