"""Settings that are right, each by itself, and that work badly together."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config import Config


def short_expiry(config: Config) -> Iterator[str]:
    """Yield a line if reports expire before the next ones: pods' load is unknown in between."""
    scrape = config.scrape
    if scrape.expiry_s <= scrape.interval_s:
        yield (
            f"scrape.expiry_s ({scrape.expiry_s:g}) is not more than scrape.interval_s "
            f"({scrape.interval_s:g}): the load of pods will be unknown at times; "
            "raise expiry_s to a few intervals"
        )


def open_doors(config: Config) -> Iterator[str]:
    """Yield a line if Envoy passes requests by where no router answers."""
    if config.server.fail_open:
        yield (
            "server.fail_open: no adapter is private, as Envoy serves any client where no router "
            "answers"
        )


def unproven_peers(config: Config) -> Iterator[str]:
    """Yield a line if nothing proves who speaks as a peer."""
    if config.peers is not None and config.peers.key_file is None and not checks_clients(config):
        yield (
            "peers: without key_file or server.tls.client_ca_file the router cannot verify its "
            "peers. It trusts any process that listens at a peer's address, and sends its picks to "
            "any process that connects"
        )


def checks_clients(config: Config) -> bool:
    """Return whether TLS lets only clients call that have a certificate."""
    tls = config.server.tls
    return tls is not None and tls.client_ca_file is not None
