"""Replicas of this router by the EndpointSlices of their own Service.

An API server refuses loopback addresses in slices: nobody answers at these, and they count.
"""

from __future__ import annotations

import asyncio
import random
import time

from extproc.app.observers import Observers
from extproc.app.peering import Peering
from extproc.config import Config
from tests.e2e.harness import eventually
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster


async def test_routers_are_counted_as_their_own_service_lists_them_ready(
    api_server: ApiServer, namespace: str
) -> None:
    token, counts = api_server.admin_token, list[int]()
    kubeconfig = api_server.kubeconfig_for(token, namespace=namespace)
    section = {"service": "extproc", "kubeconfig": str(kubeconfig), "port": 9002}
    peering = Peering(
        Config.model_validate({"discovery": {"static": []}, "peers": section}),
        router_id="aa",
        on_entries=lambda _: None,
        on_num_routers=counts.append,
        on_garbage=lambda: None,
        clock=time.monotonic,
        rng=random.Random(1),
        observers=Observers(),
    )
    task = asyncio.ensure_future(peering.run())
    async with Cluster(api_server, namespace) as cluster:
        for num_ready in (2, 3, 1):
            await list_routers(cluster, num_ready=num_ready, num_starting=1)
            await until(peering, num_ready)
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await peering.aclose()

    assert counts == [2, 3, 1]


async def until(peering: Peering, num_routers: int) -> None:
    async def is_so() -> bool:
        return peering.num_routers == num_routers

    await eventually(is_so)


async def list_routers(cluster: Cluster, *, num_ready: int, num_starting: int) -> None:
    endpoints = [
        {"addresses": [f"192.0.2.{number}"], "conditions": {"ready": number <= num_ready}}
        for number in range(1, num_ready + num_starting + 1)
    ]
    ports = ({"name": "grpc", "port": 9002}, {"name": "metrics", "port": 9090})
    await cluster.put_slice("extproc-1", "extproc", endpoints, ports=ports)
