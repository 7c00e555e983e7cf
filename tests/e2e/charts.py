"""Gateways as charts configure them, and the router as charts start it.

Bodies go through the router both ways in full duplex, trailers too, over TLS that trusts any
certificate; nothing is stripped at the door and there is no access log. Three ways to the pods:
an original-destination cluster that reads the header, a cluster that knows the pods and reads the
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

from tests.e2e.harness import RouterProcess, free_port

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_HEADER = "x-test-subset"
"""The gateway's way to a subset, for tests: this request header becomes the subset hint."""
SUBSET_TEXT_HEADER = "x-test-subset-text"
TOLD_HEADER = "x-test-told"
SCORES_HEADER = "x-test-scores"
"""Response headers with what the router put into the metadata."""

HEALTH_NAMES = (
    *("", "liveness", "readiness", "inference-extension"),
    "envoy.service.ext_proc.v3.ExternalProcessor",
)
SERVING, NOT_SERVING = 1, 2

_TYPE = "type.googleapis.com/envoy.extensions."


class Chart(StrEnum):
    """How the gateway reaches the pods."""

    ORIGINAL_DST = "original-dst"  # by the header; metadata are not taken from the router
    ORIGINAL_DST_METADATA = "original-dst-and-metadata"
    OVERRIDE_HOST = "override-host"  # by the metadata; falls back along the list
    SUBSET_OR_NONE = "subset-or-none"  # by the metadata, as the criterion of a subset of one
    SUBSET_OR_ANY = "subset-or-any"  # the same, and any pod where none fits


PLAIN_CHARTS = (Chart.ORIGINAL_DST, Chart.ORIGINAL_DST_METADATA, Chart.OVERRIDE_HOST)
_SUBSET_FALLBACKS = {Chart.SUBSET_OR_NONE: "NO_FALLBACK", Chart.SUBSET_OR_ANY: "ANY_ENDPOINT"}


def subset(*addresses: str) -> dict[str, str]:
    """The header that has the gateway hint at these endpoints, as a list."""
    value = struct_pb2.Value(list_value=struct_pb2.ListValue())
    value.list_value.extend(addresses)
    return {SUBSET_HEADER: base64.b64encode(value.SerializeToString()).decode()}


def gateway_config(
    chart: Chart, router: str, *, pods: Sequence[str] = (), ca_file: Path | None = None
) -> str:
    """An Envoy bootstrap; `pods` are known to it where it does not dial what the router says."""
    http_filters = [_ext_proc(chart), _router()]
    if chart is not Chart.ORIGINAL_DST:
        http_filters.insert(0, _subset_from_headers())
    manager = {
        "@type": _TYPE + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "use_remote_address": True,
        "normalize_path": True,
        "merge_slashes": True,
        "http_filters": http_filters,
        "route_config": {"name": "pool", "virtual_hosts": [_virtual_host(chart)]},
    }
    chain = {"filters": [{"name": "hcm", "typed_config": manager}]}
    listener = {
        "name": "openai",
        "address": _address("127.0.0.1:0"),
        "per_connection_buffer_limit_bytes": 32768,
        "filter_chains": [chain],
    }
    clusters = [_pods_cluster(chart, pods), _router_cluster(router, ca_file)]
    static = {"listeners": [listener], "clusters": clusters}
    admin = {"address": _address("127.0.0.1:0")}
    return yaml.safe_dump({"admin": admin, "static_resources": static})


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _assigned(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    places = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": places}]}


def _ext_proc(chart: Chart) -> dict[str, Any]:
    config: dict[str, Any] = {
        "@type": _TYPE + "filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "router"}, "timeout": "10s"},
        "processing_mode": {
            **{f"{side}_header_mode": "SEND" for side in ("request", "response")},
            **{f"{side}_body_mode": "FULL_DUPLEX_STREAMED" for side in ("request", "response")},
            **{f"{side}_trailer_mode": "SEND" for side in ("request", "response")},
        },
        "message_timeout": "1000s",
    }
    if chart is not Chart.ORIGINAL_DST:
        config["metadata_options"] = {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb", "extproc.pick"]},
        }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _router() -> dict[str, Any]:
    config = {"@type": _TYPE + "filters.http.router.v3.Router", "suppress_envoy_headers": True}
    return {"name": "envoy.filters.http.router", "typed_config": config}


def _subset_from_headers() -> dict[str, Any]:
    key = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "key": "x-gateway-destination-endpoint-subset",
    }
    listed = {**key, "type": "PROTOBUF_VALUE", "encode": "BASE64"}
    rules = [
        {"header": SUBSET_HEADER, "on_header_present": listed, "remove": True},
        {"header": SUBSET_TEXT_HEADER, "on_header_present": key, "remove": True},
    ]
    config = {"@type": _TYPE + "filters.http.header_to_metadata.v3.Config", "request_rules": rules}
    return {"name": "envoy.filters.http.header_to_metadata", "typed_config": config}


def _virtual_host(chart: Chart) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": "pods", "timeout": "86400s", "idle_timeout": "86400s"}
    if chart is Chart.OVERRIDE_HOST:
        retry_on = "connect-failure,refused-stream,reset-before-request"
        route["retry_policy"] = {"retry_on": retry_on, "num_retries": 2}
    told = {
        TOLD_HEADER: f"%DYNAMIC_METADATA(envoy.lb:{DESTINATION})%",
        SCORES_HEADER: f"%DYNAMIC_METADATA(extproc.pick:{DESTINATION}-scores)%",
    }
    return {
        "name": "pool",
        "domains": ["*"],
        "response_headers_to_add": [
            {"header": {"key": key, "value": value}} for key, value in told.items()
        ],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
    }


def _pods_cluster(chart: Chart, pods: Sequence[str]) -> dict[str, Any]:
    cluster: dict[str, Any] = {"name": "pods", "connect_timeout": "2s"}
    if chart in _SUBSET_FALLBACKS:
        return cluster | {
            "type": "STATIC",
            "lb_policy": "ROUND_ROBIN",
            "lb_subset_config": {
                "subset_selectors": [{"keys": [DESTINATION]}],
                "fallback_policy": _SUBSET_FALLBACKS[chart],
            },
            "load_assignment": _labelled(_assigned("pods", pods)),
        }
    if chart is not Chart.OVERRIDE_HOST:
        by_header = {"use_http_header": True, "http_header_name": DESTINATION}
        return cluster | {
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": by_header,
        }
    fallback = {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {
            "@type": _TYPE + "load_balancing_policies.least_request.v3.LeastRequest",
        },
    }
    override = {
        "@type": _TYPE + "load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return cluster | {
        "type": "STATIC",
        "load_assignment": _assigned("pods", pods),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


def _labelled(assignment: dict[str, Any]) -> dict[str, Any]:
    """With each endpoint's own address as the value that chooses it."""
    for place in assignment["endpoints"][0]["lb_endpoints"]:
        socket = place["endpoint"]["address"]["socket_address"]
        own = f"{socket['address']}:{socket['port_value']}"
        place["metadata"] = {"filter_metadata": {"envoy.lb": {DESTINATION: own}}}
    return assignment


def _router_cluster(router: str, ca_file: Path | None) -> dict[str, Any]:
    """TLS that trusts any certificate, as charts have it, or those of an authority."""
    validation: dict[str, Any] = {}
    if ca_file is not None:
        validation = {"trusted_ca": {"filename": str(ca_file)}}
    tls = {
        "@type": _TYPE + "transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": validation},
    }
    protocol = {
        "@type": _TYPE + "upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {
            "http2_protocol_options": {
                "initial_stream_window_size": 65536,
                "initial_connection_window_size": 1048576,
            }
        },
    }
    return {
        "name": "router",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "5s",
        "load_assignment": _assigned("router", [router]),
        "health_checks": [
            {
                **{"timeout": "2s", "interval": "0.5s", "no_traffic_interval": "0.5s"},
                **{"unhealthy_threshold": 3, "healthy_threshold": 1},
                "grpc_health_check": {
                    "service_name": "envoy.service.ext_proc.v3.ExternalProcessor"
                },
                "tls_options": {"alpn_protocols": ["h2"]},
            }
        ],
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol
        },
    }


class EppProcess(RouterProcess):
    """The real router, `extproc epp`, with the flags that a chart passes.

    Args:
        config: The content of `--config-file`; every address is on loopback.
        flags: Further flags.
    """

    def __init__(self, config: Mapping[str, Any], *flags: str) -> None:
        loopback = "127.0.0.1:1"
        server = {"address": loopback, "health_address": loopback, **config.get("server", {})}
        super().__init__({**config, "server": server})
        document = yaml.safe_load(self._config_path.read_text())
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

    def change_config(self, **sections: Any) -> None:
        """Replace sections of the file that it follows."""
        document = yaml.safe_load(self._config_path.read_text())
        changed = self._config_path.with_suffix(".new")
        changed.write_text(yaml.safe_dump({**document, **sections}))
        changed.replace(self._config_path)

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
