"""From nothing to a routed request, by what the page has a newcomer type.

On a real API server, with Envoy Gateway's own controller and the Envoy that it configures. What a
kubelet would do is done by the test: it starts routers and pods, and writes their addresses.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.lab.fakepod.podserver import PodConfig
from tests.e2e.forwarder import Switch
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import no_helm
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.envoygateway import WITHIN_S, Controller, Proxy, own_api_server, why_not
from tests.kubernetes.installed import (
    LISTENER_PORT,
    PODS,
    PROXY,
    ROUTERS,
    address_of,
    put_pods,
    put_routers,
)
from tests.kubernetes.manifests import MANIFESTS
from tests.pages import blocks
from tests.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not() or no_helm()), reason=why_not() or no_helm()),
]

PAGE = MANIFESTS.parent / "docs" / "envoy-gateway.md"
NAMESPACE = "llm"
ADAPTERS = ("customer-01", "customer-02", "")
"""What each pod has, of those that manifests/llmroutes.yaml declares."""


def typed(heading: str) -> list[list[str]]:
    """The commands of a section's first shell block, in words."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    first, *_ = blocks(section.split("\n## ")[0], "sh")
    return [shlex.split(line) for line in first.splitlines() if line]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster where Envoy Gateway is installed, and no more."""
    with own_api_server(*PODS, *ROUTERS, PROXY) as server:
        yield server


def type_it(server: ApiServer, words: list[str]) -> None:
    """Run a command of the page, from the root of the repository."""
    program, *arguments = words
    if program == "kubectl":
        files = [str(MANIFESTS.parent / each) if "/" in each else each for each in arguments]
        server.kubectl(*files)
        return
    assert program == "helm"
    command = [sys.executable, "-m", "tests.kubernetes.helm", *arguments]
    # Helm keeps what it learns of an API server at home.
    home = str(server.kubeconfig.parent)
    env = {"KUBECONFIG": str(server.kubeconfig), "PATH": "/usr/bin:/bin", "HOME": home}
    root = MANIFESTS.parent
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


class ReleasedRouter(RouterProcess):
    """A router by the release's own file and account, at the address of its pod."""

    def __init__(self, server: ApiServer, ip: str) -> None:
        get = ("get", "configmap", "extproc", "-n", NAMESPACE, "-o", "json")
        config: dict[str, Any] = yaml.safe_load(
            json.loads(server.kubectl(*get))["data"]["extproc.yaml"]
        )
        config["server"] |= {"address": f"{ip}:9002", "health_address": f"{ip}:9003"}
        config["admin"] |= {"address": f"{ip}:9901", "metrics_address": f"{ip}:9090"}
        super().__init__(config, address=f"{ip}:9002")
        self.admin_url = f"http://{ip}:9901"
        token = server.token(NAMESPACE, "extproc")
        self.env = {"KUBECONFIG": str(server.kubeconfig_for(token, namespace=NAMESPACE))}


async def test_what_the_page_says_leads_from_nothing_to_a_routed_request(
    server: ApiServer,
) -> None:
    *commands, curl = typed("With Helm")
    path = curl[1].removeprefix("http://GATEWAY")
    name, _, kind = curl[3].partition(": ")
    async with AsyncExitStack() as stack:
        controller = Controller(server)
        stack.push_async_callback(controller.close)
        await controller.start()
        for words in commands:
            await asyncio.to_thread(type_it, server, words)
        configs = [
            PodConfig(name=f"pod-{number}", adapters=[name] if name else [])
            for number, name in enumerate(ADAPTERS)
        ]
        await stack.enter_async_context(running_pods(*configs, hosts=PODS, port=8000))
        client = await follow(stack, server, controller)
        answer = await client.request("POST", path, curl[-1].encode(), {name: kind})
        others = [await client.chat(name) for name in ("customer-02", "customer-03")]

    assert (answer.status, answer.served_by) == (200, "pod-0")
    assert (others[0].status, others[0].served_by) == (200, "pod-1")
    assert (others[1].status, others[1].error_code) == (404, "model_not_found")


async def follow(stack: AsyncExitStack, server: ApiServer, controller: Controller) -> Client:
    """Do as kubelet, kube-proxy and a load balancer would; return a client of the gateway."""
    cluster = await stack.enter_async_context(Cluster(server, NAMESPACE))
    await put_pods(cluster)
    await put_routers(cluster, ROUTERS)
    service = await stack.enter_async_context(Switch())
    await service.to(f"{ROUTERS[0]}:9002", listen=await address_of(cluster, "extproc-log"))
    routers = [ReleasedRouter(server, ip) for ip in ROUTERS]
    for router in routers:
        stack.push_async_callback(router.close)
    await asyncio.gather(*(router.start() for router in routers))

    async def is_there() -> bool:
        return await asyncio.to_thread(controller.write_infrastructure, NAMESPACE, PROXY)

    await eventually(is_there, within_s=WITHIN_S, every_s=0.5)
    proxy = Proxy(controller, NAMESPACE)
    stack.push_async_callback(proxy.close)
    await proxy.start()
    http = await stack.enter_async_context(aiohttp.ClientSession())
    return Client(f"http://{PROXY}:{LISTENER_PORT}", http)


def test_the_chart_needs_fewer_commands_than_the_overlay_and_no_file_of_one_s_own() -> None:
    """By either section of the page: from a cluster with Envoy Gateway to a request."""
    by_chart = typed("With Helm")
    by_overlay = typed("With kubectl")

    assert [words[0] for words in by_chart] == ["helm", "kubectl", "kubectl", "curl"]
    # And before those a namespace, a class, and two lines of the overlay to edit.
    assert [words[0] for words in by_overlay] == ["kubectl"] * 4
