"""Writes objects to the API server in place of kubelet and controllers, many and quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp

from extproc.files.tls import client_context
from tests.kubernetes.apiserver import ApiServer

SLICES = "discovery.k8s.io/v1"
POOLS = "inference.networking.k8s.io/v1"
MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}


class Cluster:
    """A namespace of an API server, with an administrator's rights."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace

    async def __aenter__(self) -> Self:
        context = client_context(self.server.ca_file)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=16, ssl=context),
            headers={"Authorization": f"Bearer {self.server.admin_token}"},
            timeout=aiohttp.ClientTimeout(total=60),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Send a request in this namespace; return the object.

        Raises:
            AssertionError: The API server refused.
        """
        group, _, rest = path.rpartition("//")
        prefix = f"/apis/{group}" if group else "/api/v1"
        url = f"{self.server.url}{prefix}/namespaces/{self.namespace}/{rest}"
        async with self._session.request(method, url, json=body, **more) as response:
            answer = await response.json()
            assert response.status < 300, f"{method} {url}: {answer}"
            return answer

    # --- pods --------------------------------------------------------------------------------

    async def create_pod(self, name: str, labels: Mapping[str, str]) -> None:
        """A pod that was scheduled and has no address yet."""
        container = {"name": "vllm", "image": "vllm", "ports": [{"containerPort": 8000}]}
        spec = {"nodeName": "node", "containers": [container], "terminationGracePeriodSeconds": 30}
        metadata = {"name": name, "labels": dict(labels)}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self.request("POST", "pods", pod)

    async def set_pod(self, name: str, *, ip: str, is_ready: bool, phase: str = "Running") -> None:
        """Write a pod's status."""
        conditions = [{"type": "Ready", "status": "True" if is_ready else "False"}]
        status: dict[str, Any] = {"phase": phase, "conditions": conditions}
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        await self.request("PATCH", f"pods/{name}/status", {"status": status}, headers=MERGE_PATCH)

    async def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Change labels; None takes one away."""
        patch = {"metadata": {"labels": dict(labels)}}
        await self.request("PATCH", f"pods/{name}", patch, headers=MERGE_PATCH)

    async def delete_pod(self, name: str, *, is_graceful: bool = False) -> None:
        """Delete a pod; a graceful deletion leaves it terminating until it is done by force."""
        options = {} if is_graceful else {"params": {"gracePeriodSeconds": "0"}}
        await self.request("DELETE", f"pods/{name}", **options)

    # --- slices ------------------------------------------------------------------------------

    async def put_slice(
        self,
        name: str,
        service: str,
        endpoints: Sequence[Mapping[str, Any]],
        *,
        ports: Sequence[Mapping[str, Any]] = ({"name": "http", "port": 8000},),
        family: str = "IPv4",
    ) -> None:
        """Create or replace an EndpointSlice."""
        body = {
            "apiVersion": SLICES,
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": family,
            "endpoints": list(endpoints),
            "ports": list(ports),
        }
        await self._put(f"{SLICES}//endpointslices", name, body)

    async def delete_slice(self, name: str) -> None:
        await self.request("DELETE", f"{SLICES}//endpointslices/{name}")

    # --- pools -------------------------------------------------------------------------------

    async def put_pool(self, name: str, labels: Mapping[str, str], ports: Sequence[int]) -> None:
        """Create or replace an InferencePool."""
        spec = {
            "selector": {"matchLabels": dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "extproc", "port": {"number": 9002}},
        }
        await self.put(POOLS, "InferencePool", name, spec)

    async def delete_pool(self, name: str) -> None:
        await self.request("DELETE", f"{POOLS}//inferencepools/{name}")

    # --- any ---------------------------------------------------------------------------------

    async def put(self, api: str, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        """Create or replace an object of an API group and version."""
        body = {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}
        await self._put(f"{api}//{kind.lower()}s", name, body)

    async def _put(self, path: str, name: str, body: dict[str, Any]) -> None:
        """Server-side apply: as good for a new object as for an old one."""
        await self.request(
            "PATCH",
            f"{path}/{name}",
            body,
            params={"fieldManager": "test", "force": "true"},
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
