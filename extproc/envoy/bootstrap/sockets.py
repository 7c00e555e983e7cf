"""The sockets of a bootstrap: addresses, endpoints, TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from extproc.address import Address

TYPE_PREFIX = "type.googleapis.com/envoy."
"""The first part of the names of Envoy's types."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """TLS from Envoy to the router or to the pods. Paths are Envoy's.

    Attributes:
        ca: CAs that must have signed the server's certificate; "" accepts any.
        cert: Client certificate chain for mutual TLS; "" for none.
        key: Private key of `cert`.
        server_name: Name that the server's certificate must have; "" accepts any.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""


def set_address(place: dict[str, Any], address: str) -> None:
    """Set an address of the configuration to `host:port`.

    Raises:
        ValueError: It is not `host:port`.
    """
    parsed = Address.parse(address)
    place["socket_address"] = {"address": parsed.host, "port_value": parsed.port}


def is_name(address: str) -> bool:
    """Return whether the host of `host:port` is a name."""
    if address.startswith("unix:"):
        return False
    try:
        ipaddress.ip_address(Address.parse(address).host)
    except ValueError:
        return True
    return False


def endpoints(name: str, addresses: tuple[str, ...]) -> dict[str, Any]:
    """Return a cluster's load assignment; addresses are `host:port` or `unix:PATH`."""
    places: list[dict[str, Any]] = []
    for address in addresses:
        place: dict[str, Any] = {}
        if address.startswith("unix:"):
            place["pipe"] = {"path": address.removeprefix("unix:")}
        else:
            set_address(place, address)
        places.append({"endpoint": {"address": place}})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": places}]}


def tls_socket(files: TlsFiles, protocol: str) -> dict[str, Any]:
    """Return the transport socket for TLS to a server with this protocol (ALPN)."""
    common: dict[str, Any] = {"alpn_protocols": [protocol]}
    context: dict[str, Any] = {
        "@type": TYPE_PREFIX + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": common,
    }
    if files.ca:
        common["validation_context"] = {"trusted_ca": {"filename": files.ca}}
    if files.cert:
        chain, key = {"filename": files.cert}, {"filename": files.key}
        common["tls_certificates"] = [{"certificate_chain": chain, "private_key": key}]
    if files.server_name:
        context["sni"] = files.server_name
    if files.ca and files.server_name:
        matcher = {"exact": files.server_name}
        names = [{"san_type": "DNS", "matcher": matcher}]
        common["validation_context"]["match_typed_subject_alt_names"] = names
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}
