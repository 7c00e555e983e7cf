"""`extproc epp` as a chart starts it, against a real API server and behind a real Envoy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.sim.pod import RunningPod, start_pod
from tests.e2e.charts import Chart, EppProcess, gateway_config
from tests.e2e.conftest import pod_config
from tests.e2e.harness import Client, EnvoyProcess, eventually, free_port
from tests.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    """Two pods with an address each and the same port."""
    port = free_port()
    running = [
        await start_pod(pod_config(number), host=f"127.0.0.{number + 2}", port=port)
        for number in range(2)
    ]
    yield running
    for pod in running:
        await pod.stop()


async def announce(cluster: Cluster, pods: list[RunningPod]) -> int:
    """Write the pods to the API server, ready; their port."""
    for pod in pods:
        ip = pod.address.rpartition(":")[0]
        await cluster.create_pod(pod.name, {"app": "vllm"})
        await cluster.set_pod(pod.name, ip=ip, is_ready=True)
    return int(pods[0].address.rpartition(":")[2])


@asynccontextmanager
async def serving(kubeconfig: Path, *flags: str) -> AsyncIterator[tuple[EppProcess, Client]]:
    """A picker with these flags, and a client of the Envoy before it."""
    config: dict[str, Any] = {"discovery": {"kubernetes": {"kubeconfig": str(kubeconfig)}}}
    async with (
        EppProcess(config, *flags) as picker,
        EnvoyProcess(gateway_config(Chart.ORIGINAL_DST, picker.address)) as envoy,
        aiohttp.ClientSession() as http,
    ):
        yield picker, Client(envoy.url, http)


async def served_by(client: Client, model: str) -> str:
    """The pod that serves `model`, once one does."""

    async def ask() -> str:
        return (await client.chat(model)).served_by

    name: str = await eventually(ask, within_s=30)
    return name


@pytest.mark.usefixtures("crds")
async def test_an_inference_pool_is_served_by_the_flags_of_a_chart(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    port = await announce(cluster, pods)
    await cluster.put_pool("pool", {"app": "vllm"}, [port])
    flags = ("--pool-name", "pool", "--pool-namespace", cluster.namespace)
    async with serving(kubeconfig, *flags) as (_, client):
        served = [await served_by(client, f"only-{number}") for number in range(2)]
        await cluster.delete_pool("pool")

        async def is_refused() -> bool:
            return (await client.chat("only-0")).status == 503

        await eventually(is_refused, within_s=30)

    assert served == ["pod-0", "pod-1"]


async def test_pods_by_a_selector_are_served_without_a_pool(
    cluster: Cluster, pods: list[RunningPod], kubeconfig: Path
) -> None:
    port = await announce(cluster, pods)
    flags = (
        *("--endpoint-selector", "app in (vllm),!retired"),
        *("--endpoint-target-ports", f"{port},1", "--pool-namespace", cluster.namespace),
    )
    async with serving(kubeconfig, *flags) as (picker, client):
        served = [await served_by(client, f"only-{number}") for number in range(2)]
        known = await picker.in_flight()

    assert served == ["pod-0", "pod-1"]
    assert len(known) == 4
