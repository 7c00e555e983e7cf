"""Peers that speak TLS to a plaintext port, or the reverse: who, how often, and what to do.

Nothing else tells. A gateway makes an empty 500 of each request, and calls its own objects valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_PEERS: Final = 100
"""Remembered at once; of further ones only the number is known."""
FORGET_S: Final = 300.0
"""Since the last such connection; then a peer is no news any more, and new again."""

_TLS_RECORD: Final = b"\x16\x03"  # a handshake of TLS: 8446 5.1
_PLAIN_HTTP: Final = (b"PRI * HTTP", b"GET ", b"HEAD ", b"POST ", b"OPTIONS ")


class Mismatch(StrEnum):
    """A way in which a peer speaks otherwise than it should."""

    PLAINTEXT_TO_TLS = "plaintext_to_tls"
    TLS_TO_PLAINTEXT = "tls_to_plaintext"
    TLS_WITHOUT_HTTP2 = "tls_without_http2"


_SAYS: Final = {
    Mismatch.PLAINTEXT_TO_TLS: (
        "speaks plaintext to this port, which has TLS: every request of such a gateway fails. Give "
        "its connections TLS (Istio: the DestinationRule of our chart or component; Envoy Gateway "
        "in mode `serve`: a BackendTLSPolicy; your own Envoy: a transport_socket), or turn TLS off "
        "here: `--secure-serving=false`, or no `server.tls`"
    ),
    Mismatch.TLS_TO_PLAINTEXT: (
        "speaks TLS to this port, which has none: every request of such a gateway fails. Turn TLS "
        "on here: `extproc epp` without `--secure-serving=false`, or `server.tls`. Or give its "
        "connections none (Istio: no `tls` in the DestinationRule; Envoy Gateway: no "
        "BackendTLSPolicy; your own Envoy: no transport_socket). AI Gateway always speaks TLS"
    ),
    Mismatch.TLS_WITHOUT_HTTP2: (
        "speaks TLS to this port and offers no HTTP/2 (ALPN h2): every request of such a gateway "
        "fails. Istio: name the Service's port `grpc`, or set its `appProtocol`; your own Envoy: "
        "http2_protocol_options in the cluster"
    ),
}


def is_tls(data: bytes) -> bool:
    """Return whether the first bytes of a connection begin a handshake of TLS."""
    return data.startswith(_TLS_RECORD)


def is_plain_http(data: bytes) -> bool:
    """Return whether the first bytes of a connection are those of HTTP, of whatever version."""
    return data.startswith(_PLAIN_HTTP)


@dataclass(slots=True)
class _Peer:
    kind: Mismatch
    seen_s: float
    is_wrong: bool = True


class Mismatches:
    """The peers of one server that speak something else than it does.

    Attributes:
        counts: Connections that ended so.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Mismatch, 0)
        self._peers: dict[str, _Peer] = {}
        self._news: list[str] = []

    def note(self, kind: Mismatch, host: str, *, now: float) -> None:
        """Record a connection that cannot be served; `host` is the peer's IP address, if known."""
        self.counts[kind] += 1
        host = host or "a Unix socket"
        peer = self._peers.get(host)
        if peer is None and len(self._peers) >= MAX_PEERS:
            self._forget(now)
            if len(self._peers) >= MAX_PEERS:
                return
        if peer is None or peer.kind is not kind or now - peer.seen_s > FORGET_S:
            self._news.append(f"{host} {_SAYS[kind]}")
        self._peers[host] = _Peer(kind, now)

    def spoke(self, host: str) -> None:
        """Record a connection that can be served: its peer speaks what it should by now."""
        if (peer := self._peers.get(host)) is not None:
            peer.is_wrong = False

    def take_news(self) -> list[str]:
        """Return a line for each peer that is new, once."""
        news, self._news = self._news, []
        return news

    def warnings(self, *, now: float) -> list[str]:
        """Return a line for each kind that goes on, with the peers that do it."""
        hosts: dict[Mismatch, list[str]] = {}
        for host, peer in self._peers.items():
            if peer.is_wrong and now - peer.seen_s <= FORGET_S:
                hosts.setdefault(peer.kind, []).append(host)
        return [f"{_listed(found)} {_SAYS[kind]}" for kind, found in hosts.items()]

    def _forget(self, now: float) -> None:
        self._peers = {
            host: peer for host, peer in self._peers.items() if now - peer.seen_s <= FORGET_S
        }


def _listed(hosts: list[str]) -> str:
    further = len(hosts) - 1
    return hosts[0] if not further else f"{hosts[0]} (and {further} more)"
