"""Gateways as charts configure them, and the router as charts start it.

Bodies and trailers go through the router both ways in full duplex, over TLS that trusts any
certificate; no header is removed, and there is no access log. Three ways to the pods: an
original-destination cluster that reads the header, a cluster that knows the pods and reads the
metadata, and one whose subsets are single pods (kgateway's).
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from google.protobuf import struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.harness import RouterProcess, connection_manager, free_port

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_HEADER = "x-test-subset"
"""A request header that the gateway turns into the subset hint."""
SUBSET_TEXT_HEADER = "x-test-subset-text"
CHOSEN_HEADER = "x-test-chosen"
SCORES_HEADER = "x-test-scores"
"""Response headers with the metadata that the router set."""

HEALTH_NAMES = (
    *("", "liveness", "readiness", "inference-extension"),
    "envoy.service.ext_proc.v3.ExternalProcessor",
)
SERVING, NOT_SERVING = 1, 2


class Chart(StrEnum):
    """How the gateway reaches the pods."""

    ORIGINAL_DST = "original-dst"  # by the header; metadata are not taken from the router
    ORIGINAL_DST_METADATA = "original-dst-and-metadata"
    OVERRIDE_HOST = "override-host"  # by the metadata; falls back along the list
    SUBSET_OR_NONE = "subset-or-none"  # by the metadata, as the criterion of a subset of one
    SUBSET_OR_ANY = "subset-or-any"  # the same, and any pod where none fits


PLAIN_CHARTS = (Chart.ORIGINAL_DST, Chart.ORIGINAL_DST_METADATA, Chart.OVERRIDE_HOST)


def subset(*addresses: str) -> dict[str, str]:
    """The header with which the gateway hints at these endpoints, as a list."""
    value = struct_pb2.Value(list_value=struct_pb2.ListValue())
    value.list_value.extend(addresses)
    return {SUBSET_HEADER: base64.b64encode(value.SerializeToString()).decode()}


_GATEWAY = """
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: openai
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    per_connection_buffer_limit_bytes: 32768
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": TYPE.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          use_remote_address: true
          normalize_path: true
          merge_slashes: true
          http_filters:
          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": TYPE.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-test-subset
                on_header_present: {<<: &hint {metadata_namespace: envoy.lb.subset_hint,
                  key: x-gateway-destination-endpoint-subset}, type: PROTOBUF_VALUE, encode: BASE64}
                remove: true
              - {header: x-test-subset-text, on_header_present: *hint, remove: true}
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": TYPE.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: router}, timeout: 10s}
              message_timeout: 1000s
              processing_mode:
                request_header_mode: SEND
                request_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_header_mode: SEND
                response_body_mode: FULL_DUPLEX_STREAMED
                response_trailer_mode: SEND
              metadata_options:
                forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                receiving_namespaces: {untyped: [envoy.lb, extproc.pick]}
          - name: envoy.filters.http.router
            typed_config:
              "@type": TYPE.filters.http.router.v3.Router
              suppress_envoy_headers: true
          route_config:
            name: pool
            virtual_hosts:
            - name: pool
              domains: ["*"]
              response_headers_to_add:
              - header:
                  key: x-test-chosen
                  value: "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%"
              - header:
                  key: x-test-scores
                  value: "%DYNAMIC_METADATA(extproc.pick:x-gateway-destination-endpoint-scores)%"
              routes:
              - match: {prefix: /}
                route: {cluster: pods, timeout: 86400s, idle_timeout: 86400s}
  clusters:
  - {name: pods, connect_timeout: 2s}
  - name: router
    type: STATIC
    lb_policy: LEAST_REQUEST
    connect_timeout: 5s
    health_checks:
    - timeout: 2s
      interval: 0.5s
      no_traffic_interval: 0.5s
      unhealthy_threshold: 3
      healthy_threshold: 1
      grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}
      tls_options: {alpn_protocols: [h2]}
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": TYPE.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: {alpn_protocols: [h2]}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": TYPE.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config:
          http2_protocol_options:
            initial_stream_window_size: 65536
            initial_connection_window_size: 1048576
""".replace("TYPE", "type.googleapis.com/envoy.extensions")

_ORIGINAL_DST = """
type: ORIGINAL_DST
lb_policy: CLUSTER_PROVIDED
original_dst_lb_config:
  use_http_header: true
  http_header_name: x-gateway-destination-endpoint
"""
_OVERRIDE_HOST = """
type: STATIC
load_balancing_policy:
  policies:
  - typed_extension_config:
      name: envoy.load_balancing_policies.override_host
      typed_config:
        "@type": TYPE.load_balancing_policies.override_host.v3.OverrideHost
        override_host_sources:
        - metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}
        selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
        fallback_policy:
          policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.least_request
              typed_config:
                "@type": TYPE.load_balancing_policies.least_request.v3.LeastRequest
""".replace("TYPE", "type.googleapis.com/envoy.extensions")
_SUBSET = """
type: STATIC
lb_policy: ROUND_ROBIN
lb_subset_config:
  subset_selectors: [{keys: [x-gateway-destination-endpoint]}]
  fallback_policy: FALLBACK
"""
_TO_PODS = {
    Chart.ORIGINAL_DST: _ORIGINAL_DST,
    Chart.ORIGINAL_DST_METADATA: _ORIGINAL_DST,
    Chart.OVERRIDE_HOST: _OVERRIDE_HOST,
    Chart.SUBSET_OR_NONE: _SUBSET.replace("FALLBACK", "NO_FALLBACK"),
    Chart.SUBSET_OR_ANY: _SUBSET.replace("FALLBACK", "ANY_ENDPOINT"),
}


def gateway_config(
    chart: Chart,
    *routers: str,
    pods: Sequence[str] = (),
    ca_file: Path | None = None,
    num_filters: int = 1,
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    is_http2: bool = False,
) -> str:
    """Return an Envoy bootstrap.

    Args:
        chart: How the gateway reaches the pods.
        routers: The routers' addresses.
        pods: Addresses that Envoy knows, where it does not dial the one in the header.
        ca_file: The authority of the router's certificate; none to trust any, as charts do.
        num_filters: How often the picker's filter is in the chain, as Envoy AI Gateway has it once
            per match of a route.
        request_body: The mode of requests' bodies.
        response_body: The mode of responses' bodies.
        is_http2: Pods are spoken to in HTTP/2.
    """
    bootstrap = yaml.safe_load(_GATEWAY)
    manager = connection_manager(bootstrap)
    pods_cluster, router_cluster = bootstrap["static_resources"]["clusters"]
    pods_cluster.update(yaml.safe_load(_TO_PODS[chart]))
    if chart is Chart.ORIGINAL_DST:
        hints, ext_proc = manager["http_filters"][:2]
        del ext_proc["typed_config"]["metadata_options"]
        manager["http_filters"].remove(hints)
    filters = manager["http_filters"]
    mode = filters[-2]["typed_config"]["processing_mode"]
    mode["request_body_mode"], mode["response_body_mode"] = request_body, response_body
    if response_body == "NONE":
        mode["response_trailer_mode"] = "SKIP"
    if is_http2:
        options = "typed_extension_protocol_options"
        pods_cluster[options] = router_cluster[options]
    filters[-2:-1] = num_filters * filters[-2:-1]
    if pods_cluster["type"] == "STATIC":
        pods_cluster["load_assignment"] = _assignment("pods", pods)
    if chart is Chart.OVERRIDE_HOST:
        retry_on = "connect-failure,refused-stream,reset-before-request"
        [host] = manager["route_config"]["virtual_hosts"]
        host["routes"][0]["route"]["retry_policy"] = {"retry_on": retry_on, "num_retries": 2}
    router_cluster["load_assignment"] = _assignment("router", routers)
    if ca_file is not None:
        tls = router_cluster["transport_socket"]["typed_config"]["common_tls_context"]
        tls["validation_context"] = {"trusted_ca": {"filename": str(ca_file)}}
    return yaml.safe_dump(bootstrap)


def _assignment(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    """Endpoints with their own address as the value that selects them in a subset."""
    places = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
        metadata = {"filter_metadata": {"envoy.lb": {DESTINATION: address}}}
        places.append({"endpoint": endpoint, "metadata": metadata})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": places}]}


class EppProcess(RouterProcess):
    """The real router, `extproc epp`, with the flags that a chart passes.

    Args:
        config: The content of `--config-file`; every address is on loopback.
        flags: Further flags.
    """

    def __init__(self, config: Mapping[str, Any], *flags: str) -> None:
        loopback = "127.0.0.1:1"
        server = {"health_address": loopback, **config.get("server", {})}
        super().__init__({**config, "server": server})
        document = yaml.safe_load(self._config_path.read_text())
        document["server"]["address"] = server.get("address", loopback)
        document["admin"]["metrics_address"] = loopback
        del document["log"]
        self._config_path.write_text(yaml.safe_dump(document))
        self.health_address = f"127.0.0.1:{free_port()}"
        self.metrics_url = f"http://127.0.0.1:{free_port()}"
        self.command = [
            *(sys.executable, "-m", "extproc", "epp"),
            *("--config-file", str(self._config_path)),
            *("--grpc-port", self.address.rpartition(":")[2]),
            *("--grpc-health-port", self.health_address.rpartition(":")[2]),
            f"--metrics-port={self.metrics_url.rpartition(':')[2]}",
            *("--zap-encoder", "json", "-v", "2"),
            *("--tracing=false", "--metrics-endpoint-auth=false"),
            *flags,
        ]

    async def metrics(self) -> str:
        """The page on its metrics port."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.metrics_url}/metrics") as response,
        ):
            return await response.text()


async def health(channel: Any, name: str) -> int:
    """Return the status that a health check of `name` reports."""
    request = health_pb2.HealthCheckRequest(service=name)
    reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return int(reply.status)
