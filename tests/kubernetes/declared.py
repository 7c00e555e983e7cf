"""InferenceModelRewrites and LLMRoutes of a test, and what their status says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from extproc.discovery.kubernetes.objects import ROUTE_GROUP
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.manifests import MANIFESTS
from tests.waiting import eventually

OLD, NEW = "inference.networking.x-k8s.io", "llm-d.ai"
ROUTES = f"{ROUTE_GROUP}/v1alpha1"
DEFINITION = MANIFESTS / "definitions" / "llmroutes.yaml"
PATIENCE_S = 60.0
ACCEPTED = ("True", "Accepted")


def install(server: ApiServer, path: Path) -> None:
    server.kubectl("apply", "--server-side", "-f", str(path))
    name = yaml.safe_load(path.read_text())["metadata"]["name"]
    server.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=90s")


async def put_rewrite(
    cluster: Cluster, group: str, name: str, *, pool: str = "pool", **targets: str
) -> None:
    """Each model, rewritten to one target."""
    rules = [
        {"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": target}]}
        for model, target in targets.items()
    ]
    spec = {"poolRef": {"name": pool}, "rules": rules}
    await cluster.put(f"{group}/v1alpha2", "InferenceModelRewrite", name, spec)


async def delete_rewrite(cluster: Cluster, group: str, name: str) -> None:
    await cluster.request("DELETE", f"{group}/v1alpha2//inferencemodelrewrites/{name}")


async def put_route(cluster: Cluster, name: str, adapter: str, **more: Any) -> None:
    spec = {"backendRefs": [{"name": "pool"}], "adapter": {"name": adapter, **more}}
    await cluster.put(ROUTES, "LLMRoute", name, spec)


async def status_of(cluster: Cluster, path: str) -> dict[str, Any]:
    found = await cluster.request("GET", path)
    status: dict[str, Any] = found.get("status", {})
    return status


async def conditions_become(
    cluster: Cluster, path: str, **expected: tuple[str, str]
) -> dict[str, Any]:
    """Wait until these are the conditions, by their types; return them."""
    found: dict[str, Any] = {}

    async def are_there() -> bool:
        status = await status_of(cluster, path)
        found.clear()
        found.update({each["type"]: each for each in status.get("conditions", ())})
        said = {type_: (each["status"], each["reason"]) for type_, each in found.items()}
        return said == expected

    try:
        await eventually(are_there, within_s=PATIENCE_S, every_s=0.05)
    except AssertionError:
        raise AssertionError(f"{path}: {found}") from None
    return found


def rewrite_path(group: str, name: str) -> str:
    return f"{group}/v1alpha2//inferencemodelrewrites/{name}"


def route_path(name: str) -> str:
    return f"{ROUTES}//llmroutes/{name}"
