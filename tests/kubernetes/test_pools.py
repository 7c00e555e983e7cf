"""The endpoints of an InferencePool, through the faulty proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.discovery.kubernetes.inferencepool import PoolPresence
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.faultyproxy import HARSH, NONE, FaultyProxy
from tests.kubernetes.following import following
from tests.waiting import eventually


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("is_faulty", [False, True], ids=["healthy", "faulty"])
async def test_the_pool_decides_which_pods_and_ports(
    cluster: Cluster, proxy: FaultyProxy, kubeconfig: Path, is_faulty: bool
) -> None:
    """Several ports, another selector, other ports, deleted, made again, pods that come and go."""
    ips = {"x": ["10.2.0.1", "10.2.0.2"], "y": ["10.2.0.3"]}
    for app, addresses in ips.items():
        for index, ip in enumerate(addresses):
            await cluster.create_pod(f"{app}-{index}", {"app": app, "tier": "gpu"})
            await cluster.set_pod(f"{app}-{index}", ip=ip, is_ready=True)
    proxy.faults = HARSH if is_faulty else NONE

    def truth(app: str, *ports: int) -> dict[str, bool]:
        return {f"{ip}:{port}": True for ip in ips[app] for port in ports}

    async with following(
        kubeconfig, lambda it, on: it.follow_pool(PoolPresence("pool"), on)
    ) as followed:
        await eventually(lambda: followed.kubernetes.lists.get("inferencepools"))
        assert followed.num_reports == 0, "nobody knows before the pool is there"
        await cluster.put_pool("other", {"app": "y"}, [1])
        await cluster.put_pool("pool", {"tier": "gpu", "app": "x"}, [8000, 8001])
        await followed.until(truth("x", 8000, 8001))
        assert {each.name for each in followed.endpoints or ()} == {
            f"x-{pod}:{port}" for pod in (0, 1) for port in (8000, 8001)
        }
        await cluster.put_pool("pool", {"tier": "gpu", "app": "y"}, [8000, 8001])
        await followed.until(truth("y", 8000, 8001))
        await cluster.put_pool("pool", {"app": "y"}, [9000])
        await followed.until(truth("y", 9000))
        await cluster.delete_pool("pool")
        await followed.until({})
        await cluster.put_pool("pool", {"app": "x"}, [8000])
        await followed.until(truth("x", 8000))
        await cluster.delete_pod("x-1")
        ips["x"].pop()
        await followed.until(truth("x", 8000))
        await cluster.set_pod("x-0", ip="10.2.0.1", is_ready=False)
        await followed.until({"10.2.0.1:8000": False})


@pytest.mark.usefixtures("crds")
async def test_the_pods_stay_while_the_new_selection_is_not_known(
    cluster: Cluster, proxy: FaultyProxy, kubeconfig: Path
) -> None:
    """Another selector never empties the pool on the way."""
    for number, app in enumerate(("x", "y")):
        await cluster.create_pod(app, {"app": app})
        await cluster.set_pod(app, ip=f"10.2.0.{number}", is_ready=True)
    await cluster.put_pool("pool", {"app": "x"}, [8000])
    async with following(
        kubeconfig, lambda it, on: it.follow_pool(PoolPresence("pool"), on)
    ) as followed:
        await followed.until({"10.2.0.0:8000": True})
        for app, truth in (("y", {"10.2.0.1:8000": True}), ("x", {"10.2.0.0:8000": True})):
            await cluster.put_pool("pool", {"app": app}, [8000])
            await followed.until(truth)

        assert followed.least == 1


@pytest.mark.usefixtures("crds")
async def test_a_role_that_names_the_pool_and_lists_pods_is_enough(
    cluster: Cluster, proxy: FaultyProxy
) -> None:
    """List and watch of one InferencePool by name, list and watch of pods: no 403."""
    namespace = cluster.namespace
    pools = "--resource=inferencepools.inference.networking.k8s.io --resource-name=pool"
    token = cluster.server.account(namespace, "it", pools, "--resource=pods")
    kubeconfig = cluster.server.kubeconfig_for(token, url=proxy.url, namespace=namespace)
    await cluster.create_pod("x", {"app": "x"})
    await cluster.set_pod("x", ip="10.2.0.1", is_ready=True)
    await cluster.put_pool("pool", {"app": "x"}, [8000])

    async with (
        following(kubeconfig, lambda it, on: it.follow_pool(PoolPresence("pool"), on)) as followed,
        following(
            kubeconfig, lambda it, on: it.follow_pool(PoolPresence("another"), on)
        ) as refused,
    ):
        await followed.until({"10.2.0.1:8000": True})
        await cluster.put_pool("pool", {"app": "x"}, [8001])
        await followed.until({"10.2.0.1:8001": True})
        await eventually(lambda: refused.kubernetes.failures["status_403"])
        assert not followed.kubernetes.failures
        assert refused.endpoints is None
