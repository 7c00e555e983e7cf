"""Two InferencePools with different base models, served by one router process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import behind_envoy
from tests.e2e.harness import Client, free_port
from tests.fakepods import running_pods
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import ACCEPTED, ROUTES, conditions_become, route_path
from tests.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BASES = ("llama", "qwen")
NUM_PODS = 2  # of each
SERVED = {
    "Accepted": ACCEPTED,
    "Ready": ("True", "Serving"),
    "Degraded": ("False", "AsDesired"),
}


@asynccontextmanager
async def two_pools(cluster: Cluster) -> AsyncIterator[list[RunningPod]]:
    """A pool of pods with each base model, of its name; every pod could load every adapter."""
    configs = [
        PodConfig(name=f"{base}-{number}", base_model=base)
        for base in BASES
        for number in range(NUM_PODS)
    ]
    hosts = [f"127.0.0.{number + 2}" for number in range(len(configs))]
    port = free_port()
    async with running_pods(*configs, hosts=hosts, port=port) as pods:
        for pod, host in zip(pods, hosts, strict=True):
            await cluster.create_pod(pod.name, {"app": base_of(pod)})
            await cluster.set_pod(pod.name, ip=host, is_ready=True)
        for base in BASES:
            await cluster.put_pool(base, {"app": base}, [port])
        yield pods


@asynccontextmanager
async def one_router(kubeconfig: Path) -> AsyncIterator[Client]:
    """A client of an Envoy before one router of both pools."""
    kubernetes = {"kubeconfig": str(kubeconfig), "inference_pool": list(BASES)}
    config = {"discovery": {"kubernetes": kubernetes}, "scrape": {"expiry_s": 30.0}}
    async with (
        aiohttp.ClientSession() as http,
        behind_envoy(config, http, num_pods=NUM_PODS * len(BASES)) as (_, client),
    ):
        yield client


async def declare(cluster: Cluster, name: str, *pools: str) -> None:
    """An adapter that as many pods as one pool has should have."""
    adapter = {"name": name, "source": f"/adapters/{name}", "replicas": {"min": NUM_PODS}}
    spec = {"backendRefs": [{"name": pool} for pool in pools], "adapter": adapter}
    await cluster.put(ROUTES, "LLMRoute", name, spec)


def base_of(pod: RunningPod) -> str:
    return pod.name.partition("-")[0]


def bases_with(pods: Sequence[RunningPod], adapter: str) -> list[str]:
    """The base model of each pod that has an adapter."""
    return [base_of(pod) for pod in pods if adapter in pod.pod.registry.paths]


async def served_by(client: Client, model: str) -> set[str]:
    """The base models of the pods that answer requests for a model."""
    answers = [await client.chat(model) for _ in range(20)]
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-served-model"] for answer in answers} == {model}
    return {answer.served_by.partition("-")[0] for answer in answers}


@pytest.mark.usefixtures("crds", "definition")
async def test_two_base_models_on_two_pools_are_served_by_one_process(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """Adapters go to pods of the pools that their LLMRoute names, and so do their requests."""
    await declare(cluster, "sql", "llama")
    await declare(cluster, "law", "qwen")
    await declare(cluster, "any", *BASES)
    async with two_pools(cluster) as pods, one_router(kubeconfig) as client:
        for name in ("sql", "law", "any"):
            await conditions_become(cluster, route_path(name), **SERVED)

        assert bases_with(pods, "sql") == ["llama", "llama"]
        assert bases_with(pods, "law") == ["qwen", "qwen"]
        for model, base in (("llama",) * 2, ("qwen",) * 2, ("sql", "llama"), ("law", "qwen")):
            assert await served_by(client, model) == {base}, model
        assert await served_by(client, "any") <= set(bases_with(pods, "any"))
        listed = (await client.request("GET", "/v1/models")).json["data"]
        assert {each["id"]: each["parent"] for each in listed} == {
            **{"llama": None, "qwen": None},
            **{"sql": "llama", "law": "qwen", "any": ""},
        }


@pytest.mark.usefixtures("crds", "definition")
async def test_an_llmroute_that_names_another_pool_moves_its_adapter_there(
    cluster: Cluster, kubeconfig: Path
) -> None:
    await declare(cluster, "sql", "llama")
    async with two_pools(cluster) as pods, one_router(kubeconfig) as client:
        await conditions_become(cluster, route_path("sql"), **SERVED)
        assert await served_by(client, "sql") == {"llama"}
        await declare(cluster, "sql", "qwen")
        await eventually(lambda: bases_with(pods, "sql") == ["qwen", "qwen"])

        assert await served_by(client, "sql") == {"qwen"}
