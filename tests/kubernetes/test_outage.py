"""The whole service on pods of a real API server, while that is down, and while pods terminate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from extproc.lab.fakepod.podserver import RunningPod, start_pod
from tests import clients
from tests.e2e.conftest import pod_config
from tests.e2e.harness import RouterProcess, free_port
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.waiting import eventually

OUTAGE_S = float(os.environ.get("EXTPROC_OUTAGE_S", "10"))
PATIENCE_S = 60.0

StartPod = Callable[[int], Awaitable[RunningPod]]


@pytest.fixture
async def start(cluster: Cluster) -> AsyncIterator[StartPod]:
    """A function that starts pod N at 127.0.0.(N + 2), on one port, and announces it."""
    running: list[RunningPod] = []
    port = free_port()

    async def start(number: int) -> RunningPod:
        pod = await start_pod(pod_config(number), f"127.0.0.{number + 2}", port)
        running.append(pod)
        await cluster.create_pod(pod.name, {"app": "vllm"})
        await cluster.set_pod(pod.name, ip=f"127.0.0.{number + 2}", is_ready=True)
        return pod

    yield start
    for pod in running:
        await pod.stop()


@asynccontextmanager
async def serving(
    cluster: Cluster, pod: RunningPod, **sections: Any
) -> AsyncIterator[tuple[RouterProcess, clients.Channel]]:
    """A router under a Role that grants pods only, and a channel to it."""
    token = cluster.server.account(cluster.namespace, "it", "--resource=pods")
    kubeconfig = cluster.server.kubeconfig_for(token, namespace=cluster.namespace)
    source = {
        "kubeconfig": str(kubeconfig),
        "pod_selector": "app=vllm",
        "port": int(pod.address.rpartition(":")[2]),
    }
    router = RouterProcess({"discovery": {"kubernetes": source}, **sections})
    async with router, aio.insecure_channel(router.address) as channel:
        yield router, channel


async def knows(router: RouterProcess, **ready: bool) -> None:
    """Wait until the endpoints are these, by the pods' names, ready or not."""

    async def check() -> bool:
        endpoints = (await router.admin("/debug/snapshot"))["endpoints"]
        return {each["name"]: each["ready"] for each in endpoints} == {
            name.replace("_", "-"): is_ready for name, is_ready in ready.items()
        }

    await eventually(check, within_s=PATIENCE_S)


async def goes_to(channel: clients.Channel, model: str, pod: RunningPod) -> bool:
    return (await clients.route(channel, model)).destination == pod.address


async def test_routing_goes_on_without_the_api_server_and_catches_up_after(
    api_server: ApiServer, cluster: Cluster, start: StartPod
) -> None:
    pods = [await start(0), await start(1)]
    async with serving(cluster, pods[0]) as (router, channel):
        await knows(router, pod_0=True, pod_1=True)
        api_server.stop()
        try:
            num_routed, end_s = 0, time.monotonic() + OUTAGE_S
            while time.monotonic() < end_s or num_routed < 2:
                number = num_routed % 2
                assert await goes_to(channel, f"only-{number}", pods[number])
                num_routed += 1
                await asyncio.sleep(0.02)
            assert await router.counter("extproc_kubernetes_failures_total") > 1
            age_s = await router.counter("extproc_kubernetes_contact_age_seconds")
            assert age_s > OUTAGE_S / 2
        finally:
            api_server.launch()
            await asyncio.to_thread(api_server.wait_until_ready)
        await knows(router, pod_0=True, pod_1=True)
        await cluster.delete_pod("pod-0")
        pods.append(await start(2))
        await knows(router, pod_1=True, pod_2=True)
        await eventually(lambda: goes_to(channel, "only-2", pods[2]), within_s=PATIENCE_S)
        assert (await clients.route(channel, "only-0")).status == 404


async def test_a_terminating_pod_gets_no_new_requests_and_finishes_those_it_has(
    cluster: Cluster, start: StartPod
) -> None:
    pods = [await start(0), await start(1)]
    async with serving(cluster, pods[0], completions={"source": "access_log"}) as (router, channel):
        log = clients.AccessLog(channel)
        await knows(router, pod_0=True, pod_1=True)
        running = await clients.route(channel, "only-0")
        await cluster.delete_pod("pod-0", is_graceful=True)
        await knows(router, pod_0=False, pod_1=True)

        for _ in range(10):
            pick = await clients.route(channel, "shared")
            assert pick.destination == pods[1].address
            await log.tell(pick.pick_id, pick.destination)
        await log.tell(running.pick_id, running.destination)
        await eventually(router.has_none_in_flight, within_s=PATIENCE_S)
        assert await router.counter('extproc_completions_total{outcome="completed"}') == 11
        await cluster.delete_pod("pod-0")
        await knows(router, pod_1=True)
        await log.close()
