"""Endpoint discovery for Envoy: the pool's endpoints as an EDS cluster.

With it Envoy can fail over between pods, and keeps serving them while the router is down. State of
the world only: `StreamEndpoints`; the incremental variant is not offered.

1. There is no response before discovery has synced: an early empty response would make Envoy refuse
   every request; without one it waits, or keeps its endpoints.
2. At most one response per stream is unacknowledged. Changes in the meantime are sent as one.
3. A version is a hash of the content, the same on all replicas and after restarts. No version is
   sent twice on a stream, neither after an ACK nor after a NACK, unless its subscription changes.

Source: envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field

from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from extproc.address import Address
from extproc.meters import Meters
from extproc.types import Endpoint
from extproc.wire.rpc import Call, Code, Metadata, Method, Session

METHOD = "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints"
TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

MAX_STREAMS = 1024
"""Subscriptions at one time. An Envoy opens one."""
MAX_REQUEST_BYTES = 1024 * 1024
"""One subscription, with all that Envoy says of itself. A byte takes up to 10 of memory."""
MAX_NAMES = 100
"""Clusters in one subscription; only one is ours."""


@dataclass(eq=False)
class EdsService:
    """One EDS cluster, kept current on every open stream.

    Attributes:
        cluster_name: The name under which Envoy subscribes (`service_name` of its
            `eds_cluster_config`, or the cluster's own name).
        on_nack: Called with Envoy's message for each response that it refused.
        on_unusable: Called with the address of each endpoint left out because it is not `ip:port`:
            Envoy would refuse the whole update.
    """

    cluster_name: str = "pods"
    _: KW_ONLY
    on_nack: Callable[[str], None] = lambda message: None
    on_unusable: Callable[[str], None] = lambda address: None
    version: str = ""
    _streams: dict[_Stream, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._resource = AnyMessage()
        # Of one pod that comes or goes, all others stay as they are.
        self._made: dict[Endpoint, endpoint_components_pb2.LbEndpoint | None] = {}

    @property
    def num_streams(self) -> int:
        """Open streams."""
        return len(self._streams)

    def add_metrics(self, meters: Meters) -> None:
        """Register the streams that are open."""
        says = "Open endpoint discovery streams."
        meters.add_gauge("eds_streams", says, lambda: self.num_streams)

    def methods(self) -> tuple[Method, ...]:
        """Return StreamEndpoints."""
        return (Method(METHOD, self._open, is_long_lived=True),)

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Publish the endpoints, in the order of their addresses; none empty the cluster."""
        assignment = endpoint_pb2.ClusterLoadAssignment(cluster_name=self.cluster_name)
        usable = assignment.endpoints.add().lb_endpoints
        before, self._made = self._made, {}
        for address, endpoint in sorted({each.address: each for each in endpoints}.items()):
            lb_endpoint = before[endpoint] if endpoint in before else _lb_endpoint(endpoint)
            self._made[endpoint] = lb_endpoint
            if lb_endpoint is None:
                self.on_unusable(address)
            else:
                usable.append(lb_endpoint)
        value = assignment.SerializeToString(deterministic=True)
        self._resource = AnyMessage(type_url=TYPE_URL, value=value)
        self.version = hashlib.blake2b(value, digest_size=8).hexdigest()
        for stream in tuple(self._streams):
            stream.refresh()

    def response(self, names: frozenset[str], nonce: str) -> bytes:
        """Return the current response to a subscription; without resources if no name is ours."""
        response = discovery_pb2.DiscoveryResponse(
            version_info=self.version, type_url=TYPE_URL, nonce=nonce
        )
        if self.cluster_name in names:
            response.resources.append(self._resource)
        return bytes(response.SerializeToString())

    def _open(self, call: Call, metadata: Metadata) -> Session:
        stream = _Stream(self, call, self._streams)
        if len(self._streams) >= MAX_STREAMS:
            call.end(Code.RESOURCE_EXHAUSTED, "too many subscriptions")
        else:
            self._streams[stream] = None
        return stream


@dataclass(eq=False)
class _Stream:
    """One Envoy's subscription."""

    service: EdsService
    call: Call
    streams: dict[_Stream, None]
    _names: frozenset[str] = frozenset()
    _sent_names: frozenset[str] = frozenset()
    _sent_version: str = ""
    _num_sent: int = 0
    _is_acknowledged: bool = True

    def receive(self, message: bytes) -> None:
        if len(message) > MAX_REQUEST_BYTES:
            self.call.end(Code.INVALID_ARGUMENT, f"more than {MAX_REQUEST_BYTES} bytes")
            return
        try:
            request = discovery_pb2.DiscoveryRequest.FromString(message)
        except DecodeError:
            self.call.end(Code.INVALID_ARGUMENT, "not a discovery request")
            return
        if request.type_url not in ("", TYPE_URL):
            self.call.end(Code.INVALID_ARGUMENT, f"only {TYPE_URL} is served here")
            return
        if len(request.resource_names) > MAX_NAMES:
            self.call.end(Code.INVALID_ARGUMENT, f"more than {MAX_NAMES} names")
            return
        if self._num_sent and request.response_nonce:
            if request.response_nonce != str(self._num_sent):
                return  # stale: the ACK or NACK of the newer response is on its way
            self._is_acknowledged = True
            if request.HasField("error_detail"):
                self.service.on_nack(request.error_detail.message)
        self._names = frozenset(request.resource_names)
        self._sent_names &= self._names  # a name that was dropped and added is sent again
        self.refresh()

    def refresh(self) -> None:
        """Send the current version, unless the peer has it or owes an ACK."""
        version = self.service.version
        is_news = version != self._sent_version or not self._names <= self._sent_names
        if self._names and version and is_news and self._is_acknowledged:
            self._num_sent += 1
            self._is_acknowledged = False
            self._sent_version = version
            self._sent_names = self._names
            self.call.send(self.service.response(self._names, str(self._num_sent)))

    def half_close(self) -> None:
        self.call.end()

    def closed(self) -> None:
        self.streams.pop(self, None)


def _lb_endpoint(endpoint: Endpoint) -> endpoint_components_pb2.LbEndpoint | None:
    """Return Envoy's form of `endpoint`; None if the address is not a plain `ip:port`.

    Scoped IPv6 (`fe80::1%eth0`) is refused too: some versions of Envoy crash on it
    (CVE-2026-73549).
    """
    try:
        address = Address.parse(endpoint.address)
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return None
    if not address.port:
        return None
    lb_endpoint = endpoint_components_pb2.LbEndpoint(
        health_status=health_check_pb2.HEALTHY if endpoint.is_ready else health_check_pb2.DRAINING
    )
    socket_address = lb_endpoint.endpoint.address.socket_address
    socket_address.address = str(ip)
    socket_address.port_value = address.port
    return lb_endpoint
