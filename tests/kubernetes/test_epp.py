"""`extproc epp` as a chart starts it, against a real API server and behind a real Envoy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc import aio

from extproc.lab.fakepod.podserver import RunningPod
from tests import clients
from tests.e2e.charts import (
    HEALTH_NAMES,
    NOT_SERVING,
    SERVING,
    Chart,
    EppProcess,
    gateway_config,
    health,
)
from tests.e2e.conftest import SLOW, pod_config
from tests.e2e.harness import Client, EnvoyProcess, free_port
from tests.fakepods import running_pods
from tests.kubernetes.cluster import Cluster
from tests.waiting import eventually

NEW_GROUP = "llm-d.ai"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    """Two pods with an address each and the same port."""
    configs, hosts = [pod_config(0), pod_config(1)], ("127.0.0.2", "127.0.0.3")
    async with running_pods(*configs, hosts=hosts, port=free_port()) as running:
        yield running


async def announce(cluster: Cluster, pods: list[RunningPod]) -> int:
    """Write the pods to the API server, ready; return their port."""
    for pod in pods:
        ip = pod.address.rpartition(":")[0]
        await cluster.create_pod(pod.name, {"app": "vllm"})
        await cluster.set_pod(pod.name, ip=ip, is_ready=True)
    return int(pods[0].address.rpartition(":")[2])


async def healths(router: EppProcess) -> dict[str, int]:
    """Return the status of each health name."""
    async with aio.insecure_channel(router.health_address) as channel:
        return {name: await health(channel, name) for name in HEALTH_NAMES}


def flags_of(cluster: Cluster, pool: str = "pool") -> tuple[str, ...]:
    return ("--pool-name", pool, "--pool-namespace", cluster.namespace)


@asynccontextmanager
async def serving(
    kubeconfig: Path, *flags: str, **sections: Any
) -> AsyncIterator[tuple[EppProcess, Client]]:
    """A router with these flags, and a client of the Envoy before it."""
    config = {"discovery": {"kubernetes": {"kubeconfig": str(kubeconfig)}}, **sections}
    async with (
        EppProcess(config, *flags) as router,
        EnvoyProcess(gateway_config(Chart.ORIGINAL_DST, router.address)) as envoy,
        aiohttp.ClientSession() as http,
    ):
        yield router, Client(envoy.url, http)


async def served_by(client: Client, model: str) -> str:
    """Return the name of the pod that serves `model`, once one does."""

    async def ask() -> str:
        return (await client.chat(model)).served_by

    name: str = await eventually(ask)
    return name


async def is_refused(client: Client) -> bool:
    return (await client.chat("only-0")).status == 503


@pytest.mark.usefixtures("crds")
async def test_an_inference_pool_is_served_by_the_flags_of_a_chart(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    port = await announce(cluster, pods)
    await cluster.put_pool("pool", {"app": "vllm"}, [port])
    at_once = {"max_hold_s": 0}
    async with serving(kubeconfig, *flags_of(cluster), request=at_once) as (_, client):
        served = [await served_by(client, f"only-{number}") for number in range(2)]
        await cluster.delete_pool("pool")
        await eventually(lambda: is_refused(client))

    assert served == ["pod-0", "pod-1"]


@pytest.mark.usefixtures("crds")
async def test_a_pool_that_does_not_exist_is_not_served_before_it_does(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    """It is not ready, so that gateways fail open, and the log names the pool."""
    port, name = await announce(cluster, pods), f"{cluster.namespace}/pol"
    config = {"discovery": {"kubernetes": {"kubeconfig": str(kubeconfig)}}}
    router = EppProcess(config, *flags_of(cluster, "pol"), "--secure-serving=false")
    try:
        with pytest.raises(AssertionError):
            await router.start(within_s=0.0)
        why = f"InferencePool {name} does not exist: not ready"
        await eventually(lambda: why in router.log)
        missing = await healths(router), await router.admin("/healthz"), await router.metrics()
        with pytest.raises(aio.AioRpcError) as turned_away:
            async with aio.insecure_channel(router.address) as channel:
                await clients.get(channel, "/v1/models")
        await cluster.put_pool("pol", {"app": "vllm"}, [port])

        async def is_ready() -> bool:
            return await healths(router) == dict.fromkeys(HEALTH_NAMES, SERVING)

        await eventually(is_ready)
        found = await router.metrics()
    finally:
        await router.close()

    assert missing[0] == dict.fromkeys(HEALTH_NAMES, NOT_SERVING) | {"liveness": SERVING}
    assert f"InferencePool {name} does not exist" in missing[1]["reasons"]
    assert f'extproc_inference_pool_found{{pool="{name}"}} 0.0' in missing[2]
    assert turned_away.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f'extproc_inference_pool_found{{pool="{name}"}} 1.0' in found


@pytest.mark.usefixtures("crds")
async def test_a_pool_that_is_deleted_leaves_the_router_ready_to_say_503(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    """Log and metric say that it was deleted, and it is served again once it is back."""
    port = await announce(cluster, pods)
    await cluster.put_pool("pool", {"app": "vllm"}, [port])
    request = {"max_hold_s": 0}
    async with serving(kubeconfig, *flags_of(cluster), request=request) as (router, client):
        await served_by(client, "only-0")
        await cluster.delete_pool("pool")
        await eventually(lambda: is_refused(client))
        gone = await healths(router), await router.metrics()
        await cluster.put_pool("pool", {"app": "vllm"}, [port])

        assert await served_by(client, "only-0") == "pod-0"
        assert gone[0] == dict.fromkeys(HEALTH_NAMES, SERVING)
        assert f'_pool_found{{pool="{cluster.namespace}/pool"}} 0.0' in gone[1]
        assert f"InferencePool {cluster.namespace}/pool was deleted" in router.log


@pytest.mark.usefixtures("crds")
async def test_an_objective_makes_its_requests_sheddable_while_it_is_there(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """429 while the pod is loaded; the router runs on as the object comes and goes."""
    headers = {"x-llm-d-inference-objective": "batch"}
    slow, host, port = pod_config(0, profile=SLOW), "127.0.0.2", free_port()
    admission = {"sheddable_max_kv_usage_ratio": 0.0}
    async with running_pods(slow, hosts=(host,), port=port) as pods:
        await cluster.put_pool("pool", {"app": "vllm"}, [await announce(cluster, pods)])
        async with serving(kubeconfig, *flags_of(cluster), admission=admission) as (_, client):
            await served_by(client, "only-0")

            async def answers(status: int) -> bool:
                return (await client.chat("only-0", headers=headers)).status == status

            async with client.streaming("only-0", max_tokens=2000):
                assert await answers(200)
                spec = {"poolRef": {"name": "pool"}, "priority": -1}
                await cluster.put(f"{NEW_GROUP}/v1alpha2", "InferenceObjective", "batch", spec)
                await eventually(lambda: answers(429))
                assert (await client.chat("only-0")).status == 200
                path = f"{NEW_GROUP}/v1alpha2//inferenceobjectives/batch"
                await cluster.request("DELETE", path)
                await eventually(lambda: answers(200))


async def test_pods_by_a_selector_are_served_without_a_pool(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    port = await announce(cluster, pods)
    flags = (
        *("--endpoint-selector", "app in (vllm),!retired"),
        *("--endpoint-target-ports", f"{port},1", "--pool-namespace", cluster.namespace),
    )
    async with serving(kubeconfig, *flags) as (router, client):
        served = [await served_by(client, f"only-{number}") for number in range(2)]
        known = await router.in_flight()

    assert served == ["pod-0", "pod-1"]
    assert len(known) == 4
