"""LLMRoutes of a real API server, for `tests.e2e.chaos.run`: its watches fail as clusters' do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from tests.e2e.chaos.stores import Keeper, as_declared
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import ROUTES, route_path
from tests.kubernetes.faultyproxy import HARSH, NONE, Faults, FaultyProxy

_POOL = "pool"
_SERVED = {("Accepted", "True"), ("Ready", "True"), ("Degraded", "False")}
_numbers = count()


class InCluster(Keeper):
    """LLMRoutes in a namespace, which routers read by a proxy that makes faults.

    `watch`: events come twice, late, or after newer ones, and watches end in every way. `break`:
    no answer.
    """

    kinds = ("watch", "watch", "break")

    def __init__(self, cluster: Cluster, proxy: FaultyProxy) -> None:
        super().__init__()
        self._cluster, self._proxy = cluster, proxy

    async def sections(self, pods: Sequence[str]) -> dict[str, Any]:
        """See `Keeper`."""
        for number, pod in enumerate(pods):
            ip, _, port = pod.rpartition(":")
            await self._cluster.create_pod(f"pod-{number}", {"app": "vllm"})
            await self._cluster.set_pod(f"pod-{number}", ip=ip, is_ready=True)
        await self._cluster.put_pool(_POOL, {"app": "vllm"}, [int(port)])
        server, namespace = self._cluster.server, self._cluster.namespace
        kubeconfig = server.kubeconfig_for(
            server.admin_token, url=self._proxy.url, namespace=namespace
        )
        section = {"kubeconfig": str(kubeconfig), "inference_pool": _POOL}
        return {"discovery": {"kubernetes": section}}

    async def put(self, name: str, version: int, routers: Sequence[str]) -> None:
        """See `Keeper`."""
        spec = {"backendRefs": [{"name": _POOL}], "adapter": as_declared(name, version)}
        await self._cluster.put(ROUTES, "LLMRoute", name, spec)

    async def delete(self, name: str, routers: Sequence[str]) -> None:
        """See `Keeper`."""
        await self._cluster.request("DELETE", route_path(name))

    async def unready(self) -> list[str]:
        """See `Keeper`: by their conditions."""
        found = []
        for route in await self._routes():
            generation, said = route["metadata"]["generation"], route.get("status", {})
            conditions = said.get("conditions", ())
            held = {(each["type"], each["status"]) for each in conditions}
            seen = {each["observedGeneration"] for each in conditions}
            if not held >= _SERVED or seen != {generation}:
                found.append(f"{route['metadata']['name']} at {generation}: {conditions}")
        return found

    async def _routes(self) -> list[dict[str, Any]]:
        found = await self._cluster.request("GET", f"{ROUTES}//llmroutes")
        items: list[dict[str, Any]] = found["items"]
        return items

    async def declared(self, router: str) -> dict[str, str]:
        """See `Keeper`."""
        adapters = [each["spec"]["adapter"] for each in await self._routes()]
        return {each["name"]: each.get("version", "") for each in adapters}

    async def suffer(self, kind: str, for_s: float) -> None:
        """See `Keeper`."""
        self._proxy.faults = HARSH if kind == "watch" else Faults(refused=1.0, cut=1.0)
        await asyncio.sleep(for_s)
        self._proxy.faults = NONE


@asynccontextmanager
async def in_cluster(server: ApiServer) -> AsyncIterator[InCluster]:
    """A new namespace."""
    namespace = f"chaos-{next(_numbers)}"
    await asyncio.to_thread(server.kubectl, "create", "namespace", namespace)
    async with (
        Cluster(server, namespace) as cluster,
        FaultyProxy(server.url, server.ca_file, seed=7) as proxy,
    ):
        yield InCluster(cluster, proxy)
