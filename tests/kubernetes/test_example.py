"""examples/envoy-gateway: the overlay beside a platform's own Gateway class and Service."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import own_pods, router_config
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess
from tests.kubernetes import manifests
from tests.kubernetes.apiserver import ApiServer, missing_programs
from tests.kubernetes.manifests import MANIFESTS, build, namespaced, only
from tests.kubernetes.translated import translate

EXAMPLE = MANIFESTS.parent / "examples" / "envoy-gateway"
OVERLAY = MANIFESTS / "overlays" / "envoy-gateway"


def test_only_the_marked_lines_of_the_router_s_configuration_differ_from_the_overlay() -> None:
    ours, theirs = (manifests.router_config(build(each)) for each in (OVERLAY, EXAMPLE))
    marked = re.findall(
        r"^ *(\w+): .*# yours", (EXAMPLE / "extproc.yaml").read_text(encoding="utf-8"), re.M
    )

    assert marked == ["kubernetes", "pods"]
    for changed in ("discovery", "pods"):
        assert theirs.pop(changed) != ours.pop(changed, None)
    assert theirs == ours


def test_every_reference_is_to_the_platform_s_own_service_and_namespace() -> None:
    text = build(EXAMPLE)
    network = only(text, "NetworkPolicy", "extproc")["spec"]
    rules = only(text, "HTTPRoute")["spec"]["rules"]
    proxies = network["ingress"][2]["from"][0]["podSelector"]["matchLabels"]

    assert {each["metadata"]["namespace"] for each in namespaced(text)} == {"models"}
    assert proxies["gateway.envoyproxy.io/owning-gateway-namespace"] == "models"
    assert [each["backendRefs"] for each in rules] == [[{"name": "qwen", "port": 8000}]] * 2
    assert manifests.router_config(text)["discovery"] == {"kubernetes": {"service": "qwen"}}
    assert [rule["to"] for rule in network["egress"] if rule["ports"] == [{"port": 8000}]] == [
        [{"podSelector": {"matchLabels": {"app": "qwen"}}}]
    ]


def test_a_cluster_accepts_it_by_one_command(api_server: ApiServer, crds: Path) -> None:
    api_server.kubectl("create", "namespace", "models")
    api_server.kubectl("apply", "--server-side", "--validate=strict", "-k", str(EXAMPLE))

    assert api_server.kubectl("get", "httproute", "llm", "-n", "models", "-o", "name")


@pytest.mark.e2e
@pytest.mark.timeout(240)  # Envoy Gateway's translation, and three programs to start
@pytest.mark.skipif(
    bool(missing_programs("kubectl", "egctl")), reason=missing_programs("kubectl", "egctl")
)
async def test_envoy_gateway_routes_its_host_to_the_pod_of_the_adapter(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(own_pods())
        config = router_config(pods, destination={"num_fallbacks": 2})
        router = await stack.enter_async_context(RouterProcess(config))
        services = {"extproc": [router.address], "extproc-log": [router.address]}
        services["qwen"] = [pod.address for pod in pods]
        found = await asyncio.to_thread(translate, build(EXAMPLE), services)
        envoy = await stack.enter_async_context(EnvoyProcess(found.write(tmp_path)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(envoy.url, http)
        answers = [
            await client.chat(f"only-{n}", headers={"host": "llm.example.com"}) for n in range(3)
        ]
        elsewhere = await client.chat("only-0", headers={"host": "other.example.com"})

    assert found.refusals == ()
    assert [answer.served_by for answer in answers] == [pod.name for pod in pods]
    assert elsewhere.status == 404
