"""An Envoy Gateway overlay that runs, in a network of its own: its pods, routers and Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.harness import Client, RouterProcess
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.envoygateway import WITHIN_S, Controller, Proxy
from tests.kubernetes.manifests import MANIFESTS, build, declaring, router_config
from tests.kubernetes.network import add_address
from tests.waiting import eventually

OVERRIDE, ORIGINAL = "envoy-gateway", "envoy-gateway-original-dst"
PODS = ("10.244.0.11", "10.244.0.12", "10.244.0.13")
ROUTERS = ("10.244.0.21", "10.244.0.22")
PROXY = "10.244.0.31"
REWRITE = "x-gateway-model-name-rewrite"
"""A control header that the routers trust: who sets it chooses the model, and so the pod."""
LISTENER_PORT = 10080
"""Envoy Gateway's for port 80: its proxies have no right to ports below 1024."""


class InstalledRouter(RouterProcess):
    """A router of the overlay's, at the address of one of its pods."""

    def __init__(self, server: ApiServer, namespace: str, text: str, ip: str) -> None:
        super().__init__(at_address(router_config(text), ip), address=f"{ip}:9002")
        self.admin_url = f"http://{ip}:9901"
        token = server.token(namespace, "extproc")
        self.env = {"KUBECONFIG": str(server.kubeconfig_for(token, namespace=namespace))}


def at_address(config: dict[str, Any], ip: str) -> dict[str, Any]:
    """The overlay's configuration, where all pods are in one network."""
    server = {**config["server"], "address": f"{ip}:9002", "health_address": f"{ip}:9003"}
    admin = {"address": f"{ip}:9901", "metrics_address": f"{ip}:9090"}
    adapters = [*(f"only-{number}" for number in range(len(PODS))), "shared"]
    request = {**config["request"], "trusted_headers": [REWRITE]}
    own = {"server": server, "admin": admin, "request": request}
    return {**config, **own, **declaring(*adapters)}


@dataclass(frozen=True)
class Installed:
    """An overlay that runs."""

    namespace: str
    controller: Controller
    cluster: Cluster
    pods: list[RunningPod]
    routers: list[InstalledRouter]
    proxy: Proxy
    client: Client

    async def conditions(self) -> dict[str, str]:
        return await asyncio.to_thread(self.controller.conditions, self.namespace)

    async def conditions_become(self, expected: Mapping[str, str]) -> None:
        found: dict[str, str] = {}

        async def check() -> bool:
            found.clear()
            found.update(await self.conditions())
            return found == expected

        try:
            await eventually(check, within_s=WITHIN_S, every_s=0.5)
        except AssertionError:
            assert found == expected, found


def apply(server: ApiServer, namespace: str, folder: Path) -> str:
    """The overlay and the pods' Service, as a user applies them; what the overlay is."""
    server.kubectl("create", "namespace", namespace)
    server.kubectl("apply", "--server-side", "--validate=strict", "-k", str(folder))
    service = str(MANIFESTS / "vllm" / "base" / "service.yaml")
    server.kubectl("apply", "--server-side", "-n", namespace, "-f", service)
    return build(folder)


async def address_of(cluster: Cluster, service: str) -> str:
    """The virtual address of a Service, which is an address of this network from then on."""
    found = await cluster.request("GET", f"services/{service}")
    ip = found["spec"]["clusterIP"]
    await asyncio.to_thread(add_address, ip)
    return f"{ip}:{found['spec']['ports'][0]['port']}"


async def put_pods(cluster: Cluster) -> None:
    """Write the pods as kubelet and the controllers of Kubernetes do."""
    for number, ip in enumerate(PODS):
        await cluster.create_pod(f"vllm-{number}", {"app": "vllm"})
        await cluster.set_pod(f"vllm-{number}", ip=ip, is_ready=True)
    endpoints = [{"addresses": [ip], "conditions": {"ready": True}} for ip in PODS]
    await cluster.put_slice("vllm-1", "vllm", endpoints)


async def put_routers(
    cluster: Cluster, ips: Sequence[str], *, app_protocol: str = "kubernetes.io/h2c"
) -> None:
    """Write the routers in the same way, behind both of their Services."""
    grpc: dict[str, Any] = {"name": "grpc", "port": 9002}
    if app_protocol:
        grpc["appProtocol"] = app_protocol
    ports = [grpc, {"name": "metrics", "port": 9090}]
    endpoints = [{"addresses": [ip], "conditions": {"ready": True}} for ip in ips]
    await cluster.put_slice("extproc-1", "extproc", endpoints, ports=ports)
    await cluster.put_slice("extproc-log-1", "extproc-log", endpoints, ports=[grpc])
