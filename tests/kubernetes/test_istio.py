"""Our overlay for InferencePools under Istio's own control plane: who sets the control headers.

As docs/epp.md says: a filter before the router's, and not an HTTPRoute's. And what becomes of
websockets and of compressed bodies there, as docs/envoy.md says.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.charts import EppProcess
from tests.e2e.conftest import pod_config
from tests.e2e.harness import Answer, Client, connection_manager
from tests.e2e.test_body_modes import COMPRESSED
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.envoygateway import own_api_server
from tests.kubernetes.installed import REWRITE, apply, put_pods
from tests.kubernetes.istio import WITHIN_S, Istiod, Proxy, why_not
from tests.kubernetes.manifests import copied, declaring, router_config, with_istio
from tests.waiting import eventually

OVERLAY, NAMESPACE, POOL = "inference-pool", "mesh", "vllm"
SHADOW = f"{POOL}-ip-{hashlib.sha256(POOL.encode()).hexdigest()[:8]}"
"""The Service that Istio makes for a pool."""
PODS = ("10.244.0.11", "10.244.0.12", "10.244.0.13")
ROUTER, PROXY = "10.244.0.21", "10.244.0.31"
CONFIG_DUMP = "http://127.0.0.1:15000/config_dump"
ROOT = Path(__file__).parents[2]
TENANT = ROOT / "examples" / "istio" / "tenant.yaml"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@dataclass(frozen=True)
class Mesh:
    """The overlay, its pods and a Gateway's Envoy, as Istio configures it."""

    server: ApiServer
    pods: list[RunningPod]
    client: Client

    def kubectl(self, *arguments: str, **more: Any) -> str:
        return self.server.kubectl("-n", NAMESPACE, *arguments, **more)

    async def chosen(self, model: str = "shared") -> str:
        """The pod that a client's request went to, whose header says `only-1`."""
        return (await self.client.chat(model, headers={REWRITE: "only-1"})).served_by


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """An API server of these tests' own, in their network."""
    with own_api_server(*PODS, ROUTER, PROXY) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        istiod = Istiod(server)
        stack.push_async_callback(istiod.close)
        await istiod.start()
        configs = map(pod_config, range(len(PODS)))
        pods = await stack.enter_async_context(running_pods(*configs, hosts=PODS, port=8000))
        manifests = with_istio(copied(tmp_path_factory.mktemp("overlay"), NAMESPACE))
        folder = manifests / "overlays" / OVERLAY
        text = await asyncio.to_thread(apply, server, NAMESPACE, folder)
        cluster = await stack.enter_async_context(Cluster(server, NAMESPACE))
        await put_pods(cluster)
        ready = [{"addresses": [ip], "conditions": {"ready": True}} for ip in PODS]
        await cluster.put_slice("pool-1", SHADOW, ready, ports=[{"name": "http-0", "port": 8000}])
        overlay = router_config(text)
        config = {
            **{name: each for name, each in overlay.items() if name not in ("admin", "peers")},
            **{"server": {"address": f"{ROUTER}:1"}, "request": {"trusted_headers": [REWRITE]}},
            **declaring("shared", *(f"only-{number}" for number in range(len(PODS)))),
        }
        router = EppProcess(config, f"--pool-name={POOL}", f"--pool-namespace={NAMESPACE}")
        port = int(router.address.rpartition(":")[2])
        await cluster.put_slice(
            *("extproc-1", "extproc"),
            [{"addresses": [ROUTER], "conditions": {"ready": True}}],
            ports=[{"name": "grpc", "port": port}],
        )
        token = server.token(NAMESPACE, "extproc")
        kubeconfig = server.kubeconfig_for(token, namespace=NAMESPACE)
        router.env = {**router.env, "KUBECONFIG": str(kubeconfig)}
        stack.push_async_callback(router.close)
        await router.start()
        proxy = Proxy(NAMESPACE, "llm", PROXY)
        stack.push_async_callback(proxy.close)
        await proxy.start()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        found = Mesh(server, pods, Client(f"http://{PROXY}:80", http))

        async def is_served() -> bool:
            try:
                return (await found.client.chat("only-2")).served_by == "pod-2"
            except aiohttp.ClientError:
                return False

        await eventually(is_served, within_s=WITHIN_S, every_s=0.5)
        yield found


async def cluster_of(service: str) -> tuple[Any, list[Any]]:
    """The cluster that Istio makes of a Service or `PORT||SERVICE`, and its options of HTTP."""
    async with aiohttp.ClientSession() as http, http.get(CONFIG_DUMP) as response:
        dump = await response.json(content_type=None)
    (found,) = (
        each["cluster"]
        for part in dump["configs"]
        for each in part.get("dynamic_active_clusters", ())
        if each["cluster"]["name"].endswith(f"|{service}.{NAMESPACE}.svc.cluster.local")
    )
    return found, [*found["typed_extension_protocol_options"].values()]


async def test_connections_to_pods_idle_for_less_than_any_pod_keeps_them(mesh: Mesh) -> None:
    _, [http] = await cluster_of(SHADOW)

    assert http["common_http_protocol_options"]["idle_timeout"] == "0.500s"


async def test_the_picker_s_cluster_is_what_the_overlay_says(mesh: Mesh) -> None:
    """TLS, health checks and retries, in whatever namespace."""
    cluster, options = await cluster_of("9002||extproc")

    assert cluster["health_checks"][0]["grpc_health_check"]
    assert cluster["outlier_detection"]["consecutive_local_origin_failure"] == 1
    assert cluster["transport_socket"]["name"] == "envoy.transport_sockets.tls"
    assert [each["retry_policy"]["num_retries"] for each in options] == [5]


@contextmanager
def routed(mesh: Mesh, **change: Any) -> Iterator[None]:
    """The HTTPRoute with a filter that changes headers."""
    modifier = {"type": "RequestHeaderModifier", "requestHeaderModifier": change}
    path = "/spec/rules/0/filters"
    patch = partial(mesh.kubectl, "patch", "httproute", "llm", "--type=json", "-p")
    patch(json.dumps([{"op": "add", "path": path, "value": [modifier]}]))
    try:
        yield
    finally:
        patch(json.dumps([{"op": "remove", "path": path}]))


@pytest.mark.parametrize("change", ["set", "remove"])
async def test_what_an_httproute_sets_or_removes_comes_too_late(mesh: Mesh, change: str) -> None:
    """The client's value is what counts."""
    late = {"name": "x-late", "value": "yes"}
    values: dict[str, Any] = {"set": [{"name": REWRITE, "value": "only-0"}, late]}
    if change == "remove":
        values = {"set": [late], "remove": [REWRITE]}
    with routed(mesh, **values):

        async def is_applied() -> bool:
            mesh.pods[1].pod.last_requests.clear()
            found = await mesh.chosen()
            seen = [dict(each["headers"]) for each in mesh.pods[1].pod.last_requests]
            return found == "pod-1" and any("x-late" in each for each in seen)

        await eventually(is_applied, within_s=WITHIN_S)


async def test_an_envoy_filter_sets_headers_before_the_router(mesh: Mesh) -> None:
    example = TENANT.read_text().replace("x-llm-d-inference-fairness-id", REWRITE)
    example = example.replace("value: team-a", "value: only-0")

    async def is_chosen(pod: str) -> bool:
        return await mesh.chosen() == pod

    assert await mesh.chosen() == "pod-1", "a client chooses if nobody does"
    mesh.kubectl("apply", "-f", "-", input=example)
    await eventually(lambda: is_chosen("pod-0"), within_s=WITHIN_S)
    mesh.kubectl("delete", "-f", "-", input=example)
    await eventually(lambda: is_chosen("pod-1"), within_s=WITHIN_S)


async def test_a_websocket_of_responses_gets_the_status_after_which_agents_post(mesh: Mesh) -> None:
    """Istio's Envoy lets upgrades pass: the router answers."""
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"http://{PROXY}:80/v1/responses")

    assert refused.value.status == 426


async def test_a_body_that_istios_envoy_would_inflate_reaches_the_pod_twice(mesh: Mesh) -> None:
    """Envoy 1.40 sends a body with trailers twice where it may retry, and adds trailers to what it
    inflates (envoyproxy/envoy#45470). So the chart's EnvoyFilter inflates nothing."""
    config = yaml.safe_load(render(BootstrapOptions(mode=Mode.FULL_DUPLEX, routers=("x:1",))))
    filters = connection_manager(config)["http_filters"]
    (gzip,) = [each for each in filters if each["name"] == "inflate-gzip"]
    example = yaml.safe_load(TENANT.read_text())
    example["spec"]["configPatches"][0]["patch"]["value"] = gzip
    text = yaml.safe_dump(example)

    async def post() -> Answer:
        headers = {"content-encoding": "gzip"}
        return await mesh.client.request(
            "POST", "/v1/chat/completions", COMPRESSED["gzip"], headers=headers
        )

    assert (await post()).error_code == "unsupported_content_encoding"
    mesh.kubectl("apply", "-f", "-", input=text)
    try:

        async def reaches_a_pod() -> bool:
            answer = await post()
            return answer.status == 400 and b"Extra data" in answer.body

        await eventually(reaches_a_pod, within_s=WITHIN_S)
    finally:
        mesh.kubectl("delete", "-f", "-", input=text)
