"""Istio's own control plane on a real API server, and a plain Envoy that it configures.

`EXTPROC_ISTIO` names a folder with the program `pilot-discovery` (or `pilot-discovery.xz`), Istio's
definitions (`crd-all.gen.yaml`), and what its chart renders for mesh and gateway template
(`istiod-objects.yaml`). For use inside `own_network`: the ports are Istio's own.

A plain Envoy has neither Istio's filters nor its agent: those are off, and xDS is in plain text.
"""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

from extproc.stack.processes import get_page
from extproc.stack.stack import find_envoy
from tests.e2e.harness import ChildProcess
from tests.kubernetes.apiserver import PROGRAMS, ApiServer, find_crds, missing_programs
from tests.kubernetes.network import missing_rights
from tests.waiting import eventually

WITHIN_S = 60.0
_ADS = 15010
_READY = "http://127.0.0.1:8080/ready"
_OFF = ("PILOT_ENABLE_ALPN_FILTER", "PILOT_ENABLE_METADATA_EXCHANGE")


def folder() -> Path | None:
    """Where Istio's control plane is."""
    named = os.environ.get("EXTPROC_ISTIO")
    return None if not named else Path(named)


def why_not() -> str:
    """Why tests with Istio cannot run here, as a sentence; empty where they can."""
    if why := missing_programs(*PROGRAMS) or missing_rights():
        return why
    if folder() is None:
        return "no istiod: name a folder with pilot-discovery by EXTPROC_ISTIO"
    return "" if find_crds() else "no custom resource definitions: name a folder by EXTPROC_CRDS"


class Istiod(ChildProcess):
    """`pilot-discovery discovery`, as an administrator."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__("istiod")
        self.server = server

    async def start(self) -> None:
        """Define Istio's objects, and start."""
        source = folder()
        assert source is not None
        program = source / "pilot-discovery"
        if not program.exists():
            packed = (source / "pilot-discovery.xz").read_bytes()
            program = self.dir / "pilot-discovery"
            program.write_bytes(lzma.decompress(packed))
            program.chmod(0o755)
        kubectl = self.server.kubectl
        kubectl("apply", "--server-side", "-f", str(source / "crd-all.gen.yaml"))
        kubectl("create", "namespace", "istio-system")
        objects = str(source / "istiod-objects.yaml")
        kubectl("apply", "--server-side", "-n", "istio-system", "-f", objects)
        env = {
            **dict.fromkeys(_OFF, "false"),
            "KUBECONFIG": str(self.server.kubeconfig),
            "POD_NAME": "istiod-1",
            "POD_NAMESPACE": "istio-system",
            "CLUSTER_ID": "Kubernetes",
            "PILOT_CERT_PROVIDER": "istiod",
            "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
            "REVISION": "default",
        }
        arguments = ("--kubeconfig", str(self.server.kubeconfig), "--domain", "cluster.local")
        self.spawn([str(program), "discovery", *arguments, "--monitoringAddr", ":15014"], env)

        async def is_ready() -> bool:
            return await get_page(_READY) is not None

        await eventually(is_ready, within_s=WITHIN_S, every_s=0.5)


class Proxy(ChildProcess):
    """An Envoy in the place of a Gateway's pod, configured by Istio."""

    def __init__(self, namespace: str, gateway: str, ip: str) -> None:
        super().__init__("proxy")
        self._bootstrap = _bootstrap(namespace, gateway, ip)

    async def start(self) -> None:
        """Start without waiting: the listener comes from Istio."""
        config = self.dir / "envoy.json"
        config.write_text(json.dumps(self._bootstrap))
        self.spawn([find_envoy(), "-c", str(config), "--disable-hot-restart"])


def _bootstrap(namespace: str, gateway: str, ip: str) -> dict[str, Any]:
    name = f"{gateway}-istio"
    labels = {
        "gateway.networking.k8s.io/gateway-name": gateway,
        "gateway.networking.k8s.io/gateway-class-name": "istio",
        "gateway.istio.io/managed": "istio.io-gateway-controller",
        "service.istio.io/canonical-name": name,
    }
    metadata = {
        **{"CLUSTER_ID": "Kubernetes", "NAMESPACE": namespace, "NAME": f"{name}-1"},
        **{"ISTIO_VERSION": "1.32.0", "MESH_ID": "cluster.local", "SERVICE_ACCOUNT": name},
        **{"WORKLOAD_NAME": name, "LABELS": labels, "INSTANCE_IPS": ip},
    }
    options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": _ADS}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    cluster = {
        **{"name": "xds-grpc", "type": "STATIC", "typed_extension_protocol_options": options},
        "load_assignment": {"cluster_name": "xds-grpc", "endpoints": endpoints},
    }
    by_ads = {"ads": {}, "resource_api_version": "V3"}
    ads = {
        "api_type": "DELTA_GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
    }
    admin = {"socket_address": {"address": "127.0.0.1", "port_value": 15000}}
    return {
        "node": {
            "id": f"router~{ip}~{name}-1.{namespace}~{namespace}.svc.cluster.local",
            "cluster": f"{name}.{namespace}",
            "metadata": metadata,
        },
        "admin": {"address": admin},
        "dynamic_resources": {"lds_config": by_ads, "cds_config": by_ads, "ads_config": ads},
        "static_resources": {"clusters": [cluster]},
    }
