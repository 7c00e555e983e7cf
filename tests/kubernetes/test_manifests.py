"""The manifests on a real API server, and the service under what they grant.

The service runs as a process with the manifests' own arguments and configuration (addresses on
loopback), as their ServiceAccount. The API server's audit log says what it asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from tests.e2e.charts import SERVING, health
from tests.e2e.harness import RouterProcess, free_port
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import NEW, ROUTES, rewrite_path, route_path, status_of
from tests.kubernetes.manifests import (
    MANIFESTS,
    MODEL_SERVERS,
    OVERLAYS,
    build,
    container,
    copied,
    only,
    router_config,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

APPLY = ("apply", "--server-side", "--validate=strict", "-k")
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def llm(api_server: ApiServer, crds: Path) -> str:
    """The namespace that the overlays name."""
    api_server.kubectl("create", "namespace", "llm")
    return "llm"


@pytest.mark.few(2)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_applied_by_one_command(
    api_server: ApiServer, llm: str, overlay: str
) -> None:
    folder = str(MANIFESTS / "overlays" / overlay)
    api_server.kubectl(*APPLY, folder)
    api_server.kubectl("get", "deployment", "extproc", "-n", llm)
    api_server.kubectl("delete", "-k", folder, "--wait=false")


def test_deleting_an_overlay_deletes_no_llmroute(
    api_server: ApiServer, llm: str, crds: Path
) -> None:
    """The definition is an artefact of its own."""
    api_server.kubectl("apply", "-k", str(MANIFESTS / "definitions"))
    api_server.kubectl("wait", "--for=condition=Established", "crd/llmroutes.llm.extproc")
    route = {
        "apiVersion": "llm.extproc/v1alpha1",
        "kind": "LLMRoute",
        "metadata": {"name": "kept", "namespace": llm},
        "spec": {"adapter": {"name": "kept"}, "backendRefs": [{"name": "vllm"}]},
    }
    api_server.kubectl("apply", "-f", "-", input=json.dumps(route))
    for overlay in OVERLAYS:
        folder = str(MANIFESTS / "overlays" / overlay)
        api_server.kubectl(*APPLY, folder)
        api_server.kubectl("delete", "-k", folder, "--wait=false")

    api_server.kubectl("get", "llmroute", "kept", "-n", llm)


@pytest.mark.parametrize("way", MODEL_SERVERS)
def test_an_example_of_a_model_server_is_applied_by_one_command(
    api_server: ApiServer, namespace: str, way: str
) -> None:
    api_server.kubectl(*APPLY, str(MANIFESTS / "vllm" / way), "-n", namespace)
    api_server.kubectl("get", "deployment", "vllm", "-n", namespace)


@pytest.mark.usefixtures("definition")
def test_what_the_example_pods_bring_along_can_be_declared(
    api_server: ApiServer, namespace: str
) -> None:
    file = MANIFESTS / "llmroutes.yaml"
    apply = ("apply", "--server-side", "--validate=strict", "-f", str(file))
    api_server.kubectl(*apply, "-n", namespace)
    routes = yaml.safe_load_all(file.read_text())
    declared = {each["spec"]["adapter"]["name"] for each in routes}

    for way in MODEL_SERVERS:
        deployment = only(build(MANIFESTS / "vllm" / way), "Deployment", "vllm")
        (vllm,) = deployment["spec"]["template"]["spec"]["containers"]
        adapters = {arg.partition("=")[0] for arg in vllm["args"] if arg.startswith("customer-")}
        assert adapters == declared


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_s_pods_are_allowed_where_pod_security_is_restricted(
    api_server: ApiServer, namespace: str, overlay: str
) -> None:
    deployment = only(build(MANIFESTS / "overlays" / overlay), "Deployment", "extproc")

    assert_restricted_allows(api_server, namespace, deployment)


@pytest.mark.parametrize("way", MODEL_SERVERS)
def test_pods_of_the_example_model_servers_are_allowed_where_pod_security_is_restricted(
    api_server: ApiServer, namespace: str, way: str
) -> None:
    deployment = only(build(MANIFESTS / "vllm" / way), "Deployment")

    assert_restricted_allows(api_server, namespace, deployment)


def assert_restricted_allows(
    api_server: ApiServer, namespace: str, deployment: dict[str, Any]
) -> None:
    """Assert that a pod of a deployment may be created, and not if it might be root."""
    label = "pod-security.kubernetes.io/enforce=restricted"
    api_server.kubectl("label", "namespace", namespace, label)
    template = deployment["spec"]["template"]
    template["metadata"].update(name=deployment["metadata"]["name"], namespace=namespace)
    pod = {"apiVersion": "v1", "kind": "Pod", **template}

    api_server.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))
    del pod["spec"]["securityContext"]["runAsNonRoot"]
    with pytest.raises(AssertionError, match="runAsNonRoot"):
        api_server.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))


# --- the service under its own account -------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """An overlay in a namespace of its own."""

    cluster: Cluster
    text: str


@pytest.fixture(params=OVERLAYS)
def applied(
    request: pytest.FixtureRequest, cluster: Cluster, crds: Path, tmp_path: Path
) -> Applied:
    folder = copied(tmp_path, cluster.namespace) / "overlays" / request.param
    cluster.server.kubectl(*APPLY, str(folder))
    return Applied(cluster, build(folder))


class InCluster(RouterProcess):
    """The router's container as a process."""

    def __init__(self, applied: Applied, folder: Path) -> None:
        super().__init__({})
        config = router_config(applied.text)
        self.health_address = f"127.0.0.1:{free_port()}"
        self.metrics_address = f"127.0.0.1:{free_port()}"
        config.setdefault("server", {}).update(
            address=self.address, health_address=self.health_address
        )
        config["admin"].update(
            address=self.admin_url.removeprefix("http://"), metrics_address=self.metrics_address
        )
        (folder / "extproc.yaml").write_text(yaml.safe_dump(config))
        arguments = container(applied.text)["args"]
        arguments = [each.replace("/etc/extproc", str(folder)) for each in arguments]
        self.command = [sys.executable, "-m", "extproc", *arguments]
        server, namespace = applied.cluster.server, applied.cluster.namespace
        token = server.token(namespace, "extproc")
        kubeconfig = server.kubeconfig_for(token, namespace=namespace)
        self.env = {"KUBECONFIG": str(kubeconfig)}


SPARE = {
    ("watch", "inference.networking.x-k8s.io", "inferenceobjectives", ""),
    ("watch", "inference.networking.k8s.io", "inferenceobjectives", ""),
    ("watch", "inference.networking.x-k8s.io", "inferencemodelrewrites", ""),
    ("patch", "inference.networking.x-k8s.io", "inferencemodelrewrites/status", ""),
}
"""Rights for a cluster with other definitions than those that count in this one."""


@pytest.mark.few(1)
async def test_the_service_needs_exactly_the_rights_that_it_is_granted(
    applied: Applied, tmp_path: Path
) -> None:
    await add_pod(applied, 1)
    router = InCluster(applied, tmp_path)
    await add_routers(applied, router)
    async with router:
        await sees_endpoints(router, {address(applied, 1)})
        await add_pod(applied, 2)
        await sees_endpoints(router, {address(applied, 1), address(applied, 2)})
        await sees_both_routers(router)
        await declarations_are_answered(applied)
        await probes_succeed(router, container(applied.text))
        await debug_pages_are_on_loopback_only(router)
        assert await router.stop(within_s=WITHIN_S) == 0

    asked = applied.cluster.server.requests_of(applied.cluster.namespace, "extproc")
    # A kind that this cluster has no definition of is 404, and granted nonetheless.
    refused = [each["requestURI"] for each in asked if each["responseStatus"]["code"] in (401, 403)]
    assert refused == []
    assert {what_was_asked(event) for event in asked} == set(what_is_granted(applied.text)) - SPARE


async def sees_endpoints(router: InCluster, expected: set[str]) -> None:
    async def check() -> bool:
        return (await router.in_flight()).keys() == expected

    await eventually(check, within_s=WITHIN_S)


async def sees_both_routers(router: InCluster) -> None:
    """By the Service's EndpointSlices, whether or not anything responds there."""

    async def check() -> bool:
        return await router.counter("extproc_routers") == 2

    await eventually(check, within_s=WITHIN_S)


async def declarations_are_answered(applied: Applied) -> None:
    """An InferenceModelRewrite and an LLMRoute, where the overlay's pods can be referred to."""
    reference = pods_reference(applied)
    if reference is None:
        return
    cluster = applied.cluster
    targets = [{"modelRewrite": "x"}]
    rewrite = {"poolRef": reference, "rules": [{"targets": targets}]}
    await cluster.put(f"{NEW}/v1alpha2", "InferenceModelRewrite", "it", rewrite)
    route = {"backendRefs": [reference], "adapter": {"name": "a", "load": "lazy"}}
    await cluster.put(ROUTES, "LLMRoute", "it", route)
    for path in (rewrite_path(NEW, "it"), route_path("it")):
        await eventually(partial(status_of, cluster, path), within_s=WITHIN_S)


def pods_reference(applied: Applied) -> dict[str, str] | None:
    """How a declaration refers to the overlay's pods; None if it cannot: they have no name."""
    granted = {resource for _, _, resource, _ in what_is_granted(applied.text)}
    if "llmroutes" not in granted:
        return None
    if by_service(applied):
        return {"group": "", "kind": "Service", "name": "vllm"}
    return {"name": "vllm"}


async def probes_succeed(router: InCluster, spec: Mapping[str, Any]) -> None:
    """The kubelet's probes, by gRPC without TLS."""
    names = {port["containerPort"]: port["name"] for port in spec["ports"]}
    async with grpc.aio.insecure_channel(router.health_address) as channel:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = spec[kind]["grpc"]
            assert names[probe["port"]] == "health"
            assert await health(channel, probe["service"]) == SERVING


async def debug_pages_are_on_loopback_only(router: InCluster) -> None:
    """Other pods reach the metrics port, which serves nothing but metrics."""
    admin_url, router.admin_url = router.admin_url, f"http://{router.metrics_address}"
    try:
        assert "extproc_ready" in await router.admin("/metrics")
        for path in ("/debug/snapshot", "/debug/decisions"):
            assert await router.admin_status(path) == 404
    finally:
        router.admin_url = admin_url


def what_was_asked(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    about = event["objectRef"]
    resource, name = about["resource"], about.get("name", "")
    if "subresource" in about:  # of any object
        resource, name = f"{resource}/{about['subresource']}", ""
    return (event["verb"], about.get("apiGroup", ""), resource, name)


def what_is_granted(text: str) -> Iterator[tuple[str, str, str, str]]:
    for rule in only(text, "Role", "extproc")["rules"]:
        for verb in rule["verbs"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames", [""]):
                        yield (verb, group, resource, name)


# --- what kubelet and controllers would do ---------------------------------------------------


def address(applied: Applied, number: int) -> str:
    """The address of a pod that does not exist; an EndpointSlice refuses loopback."""
    return f"192.0.2.{number}:8000" if by_service(applied) else f"127.0.9.{number}:8000"


def by_service(applied: Applied) -> bool:
    kubernetes = router_config(applied.text).get("discovery", {}).get("kubernetes", {})
    return "service" in kubernetes


async def add_pod(applied: Applied, number: int) -> None:
    """A vLLM pod that is ready, as the overlay discovers it."""
    name, ip = f"vllm-{number}", address(applied, number).rpartition(":")[0]
    if by_service(applied):
        await applied.cluster.put_slice(name, "vllm", [ready(ip)])
        return
    await applied.cluster.create_pod(name, {"app": "vllm"})
    await applied.cluster.set_pod(name, ip=ip, is_ready=True)


async def add_routers(applied: Applied, router: InCluster) -> None:
    """Two replicas behind our Service, on the router's port here, and one that is not ready."""
    port = int(router.address.rpartition(":")[2])
    ports = [{"name": "grpc", "port": port}, {"name": "metrics", "port": 9090}]
    starting = {"addresses": ["192.0.2.23"], "conditions": {"ready": False}}
    endpoints = [ready("192.0.2.21"), ready("192.0.2.22"), starting]
    await applied.cluster.put_slice("extproc-1", "extproc", endpoints, ports=ports)


def ready(ip: str) -> dict[str, Any]:
    return {"addresses": [ip], "conditions": {"ready": True}}
