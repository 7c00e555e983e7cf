"""The other routers by `peers`: how they are found, and how each proves that it is one."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence

from extproc.address import Address
from extproc.config import Config
from extproc.config.file import ConfigError, usable
from extproc.config.peers import PeersConfig
from extproc.config.warnings import checks_clients
from extproc.discovery.kubernetes.api import MissingLibraryError, load_library
from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.files.reading import check_readable
from extproc.files.tls import HTTP2, client_context
from extproc.peers.keys import PeerKeys, read_keys
from extproc.peers.peering import OnEndpoints, PeerSettings
from extproc.service.clocks import Clocks

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
    with usable("peers.key_file", peers.key_file):
        if peers.key_file is not None:
            read_keys(peers.key_file)
    if peers.static is None and peer_port(config) is None:
        raise ConfigError("peers.port: must be given where server.address has no fixed port")
    try:
        if peers.service is not None:
            load_library("peers.service")
    except MissingLibraryError as error:
        raise ConfigError(str(error)) from error
    with usable("peers.ca_file", peers.ca_file):
        check_readable(None if config.server.tls is None else peers.ca_file)
    with usable("peers: ca_file and server.tls cannot be used"):
        link_tls(config)


def peer_settings(config: Config, clocks: Clocks) -> PeerSettings | None:
    """Return how peers are found and known; None where there are none."""
    peers = config.peers
    if peers is None:
        return None
    follow, warnings = _source(peers, peer_port(config), clocks)
    return PeerSettings(
        keys=keys_of(config),
        believes_callers=checks_clients(config),
        tls=lambda: link_tls(config),
        tls_name=peers.tls_name,
        static=peers.static or (),
        follow=follow,
        warnings=warnings,
    )


def _source(
    peers: PeersConfig, port: int | None, clocks: Clocks
) -> tuple[Callable[[OnEndpoints], Awaitable[None]] | None, Callable[[], list[str]]]:
    """Return what follows the peers, if they come and go, and what keeps it from that."""
    if (service := peers.service) is not None:
        kubernetes = Kubernetes(
            peers.kubeconfig, clock=clocks.clock, rng=clocks.rng, namespace=peers.namespace
        )

        async def follow_service(on_endpoints: OnEndpoints) -> None:
            try:
                await kubernetes.follow_service(service, on_endpoints, port=port)
            finally:
                await kubernetes.aclose()

        return follow_service, kubernetes.warnings
    if (name := peers.dns) is None:
        return None, list

    async def follow_name(on_endpoints: OnEndpoints) -> None:
        from extproc.discovery.dns import DnsDiscovery

        await DnsDiscovery(
            name,
            port=port,
            on_endpoints=on_endpoints,
            on_failure=lambda trouble: log.error("peers: %s", trouble),
            on_recovery=lambda: log.info("peers: discovery works again"),
            clock=clocks.clock,
            interval_s=peers.interval_s,
            nameservers=peers.nameservers,
        ).run()

    return follow_name, list


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
