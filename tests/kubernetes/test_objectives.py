"""InferenceObjectives of a real API server: their priorities, whoever defines them, and Roles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.discovery.kubernetes.kubewatch import WatchTimes
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.logs import warnings
from tests.waiting import beside, eventually

OLD, NEW = "inference.networking.x-k8s.io", "llm-d.ai"
TIMES = WatchTimes(watch_s=20.0, relist_s=1.0)
PATIENCE_S = 60.0


class Told:
    """The priorities that were handed on last; None before."""

    def __init__(self) -> None:
        self.priorities: Mapping[str, int] | None = None

    async def until(self, priorities: Mapping[str, int]) -> None:
        await eventually(lambda: self.priorities == priorities, within_s=PATIENCE_S)


@asynccontextmanager
async def following(kubeconfig: Path) -> AsyncIterator[Told]:
    kubernetes = Kubernetes(kubeconfig, clock=time.monotonic, rng=Random(1), times=TIMES)
    told = Told()

    def on_priorities(priorities: Mapping[str, int]) -> None:
        told.priorities = priorities

    try:
        async with beside(kubernetes.follow_objectives(["pool"], on_priorities)):
            yield told
            assert kubernetes.contact_age_s == 0.0, "the age is that of the endpoints"
    finally:
        await kubernetes.aclose()


async def put(
    cluster: Cluster, group: str, name: str, priority: int | None, pool: str = "pool"
) -> None:
    spec: dict[str, Any] = {"poolRef": {"name": pool}}
    if priority is not None:
        spec["priority"] = priority
    await cluster.put(f"{group}/v1alpha2", "InferenceObjective", name, spec)


async def delete(cluster: Cluster, group: str, name: str) -> None:
    await cluster.request("DELETE", f"{group}/v1alpha2//inferenceobjectives/{name}")


@pytest.mark.usefixtures("crds")
async def test_priorities_follow_the_objectives_of_the_pool(
    cluster: Cluster, kubeconfig: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both groups are served: the newer one alone counts, and a warning says so."""
    await put(cluster, OLD, "old", 1)
    await put(cluster, NEW, "batch", -1)
    await put(cluster, NEW, "others", 7, "another-pool")
    async with following(kubeconfig) as told:
        await told.until({"batch": -1})
        await put(cluster, NEW, "batch", -5)
        await put(cluster, NEW, "unset", None)
        await told.until({"batch": -5, "unset": 0})
        await delete(cluster, NEW, "batch")
        await told.until({"unset": 0})

    [line] = warnings(caplog)
    assert "in two API groups, those under /apis/llm-d.ai/v1alpha2 alone count" in line


@pytest.mark.long
@pytest.mark.slow
async def test_definitions_may_come_and_go(crds_folder: Path) -> None:
    """None at first, then that of the older group, then both, then the older one again."""
    with ApiServer() as server:
        server.kubectl("create", "namespace", "n")

        def install(group: str) -> None:
            path = crds_folder / f"{group}_inferenceobjectives.yaml"
            server.kubectl("apply", "--server-side", "-f", str(path))
            name = f"crd/inferenceobjectives.{group}"
            server.kubectl("wait", "--for=condition=Established", name, "--timeout=90s")

        kubeconfig = server.kubeconfig_for(server.admin_token, namespace="n")
        async with Cluster(server, "n") as cluster, following(kubeconfig) as told:
            await asyncio.to_thread(install, OLD)
            await put(cluster, OLD, "old", 1)
            await told.until({"old": 1})
            await asyncio.to_thread(install, NEW)
            await put(cluster, NEW, "new", 2)
            await told.until({"new": 2})
            name = f"inferenceobjectives.{NEW}"
            await asyncio.to_thread(server.kubectl, "delete", "crd", name)
            await told.until({"old": 1})


@pytest.mark.usefixtures("crds")
async def test_a_role_that_may_not_list_them_costs_one_warning_until_it_may(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    server, namespace = cluster.server, cluster.namespace
    token = server.account(namespace, "it", "--resource=pods")
    kubeconfig = server.kubeconfig_for(token, namespace=namespace)
    await put(cluster, OLD, "old", 1)
    async with following(kubeconfig) as told:

        def num_refused() -> int:
            refused = [
                event
                for event in server.requests_of(namespace, "it")
                if event.get("responseStatus", {}).get("code") == 403
            ]
            return len(refused)

        await eventually(lambda: num_refused() >= 6, within_s=PATIENCE_S)
        refused = warnings(caplog)
        assert told.priorities is None
        what = ("--verb=list,watch", f"--resource=inferenceobjectives.{OLD}")
        server.kubectl("create", "role", "more", *what, "-n", namespace)
        who = ("--role=more", f"--serviceaccount={namespace}:it")
        server.kubectl("create", "rolebinding", "more", *who, "-n", namespace)
        await told.until({"old": 1})

    assert len(refused) == 1
    assert "InferenceObjectives: not read: 403" in refused[0]
    assert warnings(caplog) == refused
