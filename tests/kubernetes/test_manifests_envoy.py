"""The Envoy Gateway overlays, translated by Envoy Gateway itself and run in a real Envoy.

With a router process that has the overlay's own configuration, addresses and discovery aside.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.lab.engine.profiles import INSTANT, EngineProfile
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import SLOW, own_pods, pages_of, pod_config
from tests.e2e.harness import (
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    free_port,
    h2_request,
)
from tests.e2e.load import CHAT, RESPONSES, killed_by, with_requests
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import missing_programs
from tests.kubernetes.chart import no_helm, rendered
from tests.kubernetes.manifests import MANIFESTS, build, declaring, router_config
from tests.kubernetes.translated import Translated, translate

OVERRIDE, ORIGINAL = "envoy-gateway", "envoy-gateway-original-dst"
DESTINATION = "x-gateway-destination-endpoint"
PROMPT_BYTES = 200_000

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),  # Envoy Gateway's translation, and up to three programs to start
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        bool(missing_programs("kubectl", "egctl")), reason=missing_programs("kubectl", "egctl")
    ),
]


@dataclass(frozen=True)
class Gateway:
    """An overlay that runs."""

    overlay: str
    pods: list[RunningPod]
    router: RouterProcess
    envoy: EnvoyProcess
    client: Client


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[OVERRIDE, ORIGINAL])
async def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    async with running(request.param, tmp_path_factory.mktemp("envoy")) as found:
        yield found


@asynccontextmanager
async def running(
    overlay: str, folder: Path, *, profile: EngineProfile = INSTANT, **sections: Any
) -> AsyncIterator[Gateway]:
    """The overlay with three pods."""
    text = build(MANIFESTS / "overlays" / overlay)
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(own_pods(profile=profile))
        found_in = outside_kubernetes(router_config(text), pods)
        sections["pods"] = {**found_in.get("pods", {}), **sections.get("pods", {})}
        config = {**found_in, **sections}
        router = await stack.enter_async_context(RouterProcess(config))
        found = await asyncio.to_thread(translated, text, pods, router)
        envoy = await stack.enter_async_context(EnvoyProcess(found.write(folder)))
        timeout = aiohttp.ClientTimeout(total=60)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Gateway(overlay, pods, router, envoy, Client(envoy.url, http))


def outside_kubernetes(config: dict[str, Any], pods: list[RunningPod]) -> dict[str, Any]:
    """The overlay's configuration for a process outside Kubernetes, over these pods."""
    kept = {key: config[key] for key in config.keys() - {"discovery", "peers", "admin", "server"}}
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    adapters = [*(f"only-{number}" for number in range(len(pods))), "shared"]
    return {**kept, "discovery": {"static": static}, **declaring(*adapters)}


def translated(text: str, pods: list[RunningPod], router: RouterProcess) -> Translated:
    routers = [router.address]
    services = {"extproc": routers, "extproc-log": routers}
    services["vllm"] = [pod.address for pod in pods]
    found = translate(text, services)
    assert found.refusals == ()
    return found


@pytest.mark.few(1)
async def test_a_prompt_of_200_kb_passes_over_http_2(gateway: Gateway) -> None:
    answer = await h2_request(gateway.envoy.port, chat("only-1", padding_bytes=PROMPT_BYTES))
    assert (answer.status, answer.served_by) == (200, "pod-1")


@pytest.mark.parametrize("overlay", [OVERRIDE, ORIGINAL])
async def test_envoy_gateway_pings_the_routers_for_requests_and_for_the_log(overlay: str) -> None:
    routers = ["127.0.0.1:9"]
    services = {"extproc": routers, "extproc-log": routers, "vllm": routers}
    text = build(MANIFESTS / "overlays" / overlay)
    found = await asyncio.to_thread(translate, text, services)
    pings = {}
    for cluster in found.clusters:
        (http,) = cluster["typedExtensionProtocolOptions"].values()
        http2 = http.get("explicitHttpConfig", {}).get("http2ProtocolOptions")
        if http2 is not None:
            pings[cluster["name"].partition("/")[0]] = http2.get("connectionKeepalive")

    expected = {"interval": "5s", "timeout": "4s"}
    assert pings == {"accesslog_als_0_0": expected, "envoyextensionpolicy": expected}


@pytest.mark.long
@pytest.mark.skipif(bool(no_helm()), reason=no_helm())
async def test_in_mode_epp_a_response_has_no_limit_and_idle_connections_close_first() -> None:
    """As Envoy Gateway hands it to AI Gateway, with a Service for the pool that only that knows."""
    kinds = ("Gateway", "HTTPRoute", "BackendTrafficPolicy")
    found = [each for each in rendered({"mode": "epp"}) if each["kind"] in kinds]
    for each in found:
        each["metadata"]["namespace"] = "llm"
        each["spec"].pop("infrastructure", None)
        for rule in each["spec"].get("rules", ()):
            rule["backendRefs"] = [{"name": "vllm", "port": 8000}]
    text = yaml.safe_dump_all(found)
    made = await asyncio.to_thread(translate, text, {"vllm": ["127.0.0.1:9"]})
    (cluster,) = (each for each in made.clusters if each["name"].startswith("httproute/"))
    (http,) = cluster["typedExtensionProtocolOptions"].values()
    manager = made.listeners[0]["defaultFilterChain"]["filters"][0]["typedConfig"]
    (host,) = manager["routeConfig"]["virtualHosts"]

    assert made.refusals == ()
    assert http["commonHttpProtocolOptions"]["idleTimeout"] == "0.500s"
    assert [each["route"]["timeout"] for each in host["routes"]] == ["0s"], "Envoy's own is 15 s"


@pytest.mark.parametrize("overlay", [OVERRIDE, ORIGINAL])
async def test_connections_to_pods_are_closed_before_the_pods_close_them(overlay: str) -> None:
    """Pods keep theirs for a second or more."""
    routers = ["127.0.0.1:9"]
    services = {"extproc": routers, "extproc-log": routers, "vllm": routers}
    text = build(MANIFESTS / "overlays" / overlay)
    found = await asyncio.to_thread(translate, text, services)
    static = found.bootstrap["staticResources"]["clusters"]
    idle = {
        cluster["name"]: http["commonHttpProtocolOptions"]["idleTimeout"]
        for cluster in (*found.clusters, *static)  # Envoy keeps the bootstrap's
        if cluster["name"].startswith("httproute/")
        for http in cluster["typedExtensionProtocolOptions"].values()
    }

    assert idle
    assert set(idle.values()) == {"0.500s"}


async def test_a_request_id_of_a_client_is_replaced(gateway: Gateway) -> None:
    gateway.pods[1].pod.last_requests.clear()
    await gateway.client.chat("only-1", headers={"x-request-id": "mine"})

    [seen] = gateway.pods[1].pod.last_requests
    headers = dict(seen["headers"])
    assert headers["x-request-id"] not in ("", "mine")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *product(["POST"], ["/v1/load_lora_adapter", "/metrics", "/sleep", "/v1%2fmodels"]),
        *product(["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"], [CHAT]),
    ],
)
async def test_a_path_or_method_that_is_not_served_reaches_no_pod(
    gateway: Gateway, method: str, path: str
) -> None:
    for pod in gateway.pods:
        pod.pod.last_requests.clear()
    answer = await gateway.client.request(method, path, b"{}" if method == "POST" else None)

    assert answer.status in (400, 404, 405)
    assert [pod.name for pod in gateway.pods if pod.pod.last_requests] == []


# --- faults -------------------------------------------------------------------


async def test_a_killed_pod_is_replaced_by_another_that_has_the_adapter(
    tmp_path: Path,
) -> None:
    """Also while the router still chooses the pod, which has the adapter loaded."""
    # A pod that a scrape finds gone, or whose kept connection closes, is not chosen.
    scrape = {"interval_s": 60, "expiry_s": 600}
    async with (
        running_pods(pod_config(3)) as (server,),
        running(OVERRIDE, tmp_path, scrape=scrape, pods=pages_of(server)) as gateway,
    ):
        first = await gateway.client.chat("shared")
        (served,) = (pod for pod in gateway.pods if pod.name == first.served_by)
        await served.kill()
        answer = await gateway.client.chat("shared")
        retries = await gateway.envoy.stats(r"upstream_rq_retry$")

    assert answer.status == 200
    assert answer.served_by in {pod.name for pod in gateway.pods} - {served.name}
    assert max(retries.values()) >= 1


@pytest.mark.parametrize(("path", "status", "num_pods"), [(CHAT, 200, 2), (RESPONSES, 503, 1)])
async def test_a_request_whose_pod_dies_before_it_answers_is_tried_on_one_other(
    path: str, status: int, num_pods: int, tmp_path: Path
) -> None:
    async with running(OVERRIDE, tmp_path, profile=SLOW) as gateway:
        answer = await killed_by(gateway.client, path, gateway.pods, at_most=1)

    assert answer.status == status
    assert len(with_requests(gateway.pods)) == num_pods


async def test_a_killed_pod_is_a_clear_503(tmp_path: Path) -> None:
    async with running(ORIGINAL, tmp_path, request={"max_hold_s": 0.5}) as gateway:
        await gateway.pods[0].kill()
        answer = await gateway.client.chat("only-0")
        other = await gateway.client.chat("only-1")

    # Envoy's words, or the router's where it knows already.
    assert answer.status == 503
    assert answer.error_code in ("endpoint_unavailable", "adapter_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (other.status, other.served_by) == (200, "pod-1")


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["dead", "hangs"])
async def test_without_the_router_nothing_is_served_though_envoy_knows_the_pods(
    tmp_path: Path, state: str
) -> None:
    """Only the router knows whose an adapter is."""
    async with running(OVERRIDE, tmp_path) as gateway:
        if state == "dead":
            await gateway.router.kill()
        else:
            gateway.router.send(signal.SIGSTOP)
        answer = await gateway.client.chat("shared")
        gateway.router.send(signal.SIGCONT)

    codes = {"router_unavailable", "router_timeout"} if state == "hangs" else {"router_unavailable"}
    assert answer.status in (503, 504)
    assert answer.error_code in codes
    assert answer.served_by == ""


async def test_a_router_that_hangs_is_a_clear_503(tmp_path: Path) -> None:
    async with running(ORIGINAL, tmp_path) as gateway:
        gateway.router.send(signal.SIGSTOP)
        answer = await gateway.client.chat("shared")
        gateway.router.send(signal.SIGCONT)

    assert (answer.status, answer.error_code) == (503, "endpoint_unavailable")
    assert (answer.served_by, answer.headers["retry-after"]) == ("", "1")


@pytest.mark.parametrize("header", [DESTINATION, "x-envoy-original-dst-host"])
async def test_without_the_router_nobody_is_dialled(tmp_path: Path, header: str) -> None:
    async with running(ORIGINAL, tmp_path) as gateway:
        await gateway.router.kill()
        victim = gateway.pods[1].address
        answer = await gateway.client.chat("shared", headers={header: victim})

    assert (answer.status, answer.error_code) == (503, "endpoint_unavailable")
    assert (answer.served_by, answer.headers["retry-after"]) == ("", "1")


# --- Envoy Gateway's own conditions ---------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("overlay", [OVERRIDE, ORIGINAL])
async def test_without_a_ready_router_envoy_gateway_reports_it(overlay: str) -> None:
    """A headless Service without endpoints: what docs/envoy-gateway.md warns of."""
    text = build(MANIFESTS / "overlays" / overlay)
    nobody = f"127.0.0.1:{free_port()}"
    services = {name: [nobody] for name in ("extproc", "extproc-log", "vllm")}
    found = await asyncio.to_thread(translate, text, services, headless=["extproc"])

    (refusal,) = found.refusals
    assert refusal.startswith("envoyExtensionPolicies/llm: Invalid: ExtProc: no ready endpoints")
