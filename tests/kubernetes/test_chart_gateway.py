"""From nothing to a routed request, by what the page has a newcomer type.

On a real API server, with Envoy Gateway's own controller and the Envoy that it configures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from extproc.lab.fakepod.podserver import PodConfig
from tests.commandline import output_of
from tests.e2e.harness import Client
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import no_helm, texts
from tests.kubernetes.envoygateway import Controller, own_api_server, why_not
from tests.kubernetes.installed import LISTENER_PORT, PODS, PROXY, ROUTERS
from tests.kubernetes.released import ROOT, run_release, type_it, typed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not() or no_helm()), reason=why_not() or no_helm()),
]

PAGE = ROOT / "docs" / "envoy-gateway.md"
ADAPTERS = ("customer-01", "customer-02", "")
"""What each pod has, of those that manifests/llmroutes.yaml declares."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A cluster where Envoy Gateway is installed, and no more."""
    with own_api_server(*PODS, *ROUTERS, PROXY) as server:
        yield server


def asked_as_noted() -> str:
    """The answer to the request that Helm's notes show, at the proxy's own address and port."""
    notes = texts({})["extproc/templates/NOTES.txt"]
    [curl] = [line for line in notes.splitlines() if "curl" in line]
    env = {"ADDRESS": PROXY, "PATH": "/usr/bin:/bin"}
    return output_of("bash", "-c", curl.replace(":80/", f":{LISTENER_PORT}/"), env=env)


async def test_what_the_page_says_leads_from_nothing_to_a_routed_request(
    server: ApiServer,
) -> None:
    *commands, curl = typed(PAGE, "With Helm")
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
        await run_release(stack, server, controller)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(f"http://{PROXY}:{LISTENER_PORT}", http)
        answer = await client.request("POST", path, curl[-1].encode(), {name: kind})
        noted = await asyncio.to_thread(asked_as_noted)
        others = [await client.chat(name) for name in ("customer-02", "customer-03")]

    assert (answer.status, answer.served_by) == (200, "pod-0")
    assert "customer-01" in noted
    assert (others[0].status, others[0].served_by) == (200, "pod-1")
    assert (others[1].status, others[1].error_code) == (404, "model_not_found")


def test_the_chart_needs_fewer_commands_than_the_overlay_and_no_file_of_one_s_own() -> None:
    """By either section of the page: from a cluster with Envoy Gateway to a request."""
    by_chart = typed(PAGE, "With Helm")
    by_overlay = typed(PAGE, "With kubectl")

    assert [words[0] for words in by_chart] == ["helm", "kubectl", "kubectl", "curl"]
    # And before those a namespace, a class, and two lines of the overlay to edit.
    assert [words[0] for words in by_overlay] == ["kubectl"] * 4
