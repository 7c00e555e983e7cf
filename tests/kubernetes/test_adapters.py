"""InferenceModelRewrites and LLMRoutes of a real API server, under requests through the router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.discovery.kubernetes.objects import ROUTE_GROUP
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import behind_envoy
from tests.e2e.harness import Answer, Client, RouterProcess, free_port
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import (
    ACCEPTED,
    DEFINITION,
    NEW,
    OLD,
    ROUTES,
    conditions_become,
    delete_rewrite,
    install,
    put_rewrite,
    put_route,
    rewrite_path,
    route_path,
    status_of,
)
from tests.kubernetes.test_epp import announce, flags_of, serving
from tests.waiting import beside, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PATHS = dict.fromkeys(("/adapters/a", "/adapters/a-2", "/adapters/v1", "/adapters/v2"), 8)
"""What pods find on their disks, with ranks."""
SERVED = {"Ready": ("True", "Serving"), "Degraded": ("False", "AsDesired")}
TENANT = "x-llm-d-inference-fairness-id"
DELETED_S = 2.0
"""Within which no router admits requests for an adapter that is deleted."""


@asynccontextmanager
async def pool(cluster: Cluster, **config: Any) -> AsyncIterator[list[RunningPod]]:
    """An InferencePool of two pods, which have some models and can load others."""
    config = {"adapters": ["v1", "v2"], "ranks_by_path": PATHS, **config}
    configs = [PodConfig(name=f"pod-{number}", **config) for number in range(2)]
    hosts = ("127.0.0.2", "127.0.0.3")
    async with running_pods(*configs, hosts=hosts, port=free_port()) as pods:
        await cluster.put_pool("pool", {"app": "vllm"}, [await announce(cluster, pods)])
        yield pods


@asynccontextmanager
async def asking(client: Client, *models: str) -> AsyncIterator[list[Answer]]:
    """The answers to requests that come while something else is done."""
    answers: list[Answer] = []

    async def ask(model: str) -> None:
        while True:
            answers.append(await client.chat(model))

    tasks = [asyncio.ensure_future(ask(model)) for model in models]
    try:
        yield answers
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert {answer.status for answer in answers} == {200}


async def until_read(client: Client, model: str, read: str) -> None:
    """Wait until a pod reads `read` where a client writes `model`."""

    async def is_read() -> bool:
        answer = await client.chat(model)
        return answer.headers.get("x-served-model") == read

    await eventually(is_read)


async def asked_for_ever(client: Client, model: str) -> None:
    """Ask for a model, whatever the answer is."""
    while True:
        await client.chat(model)


async def until_unknown(client: Client, model: str, *, within_s: float = 60.0) -> None:
    async def is_unknown() -> bool:
        return (await client.chat(model)).status == 404

    await eventually(is_unknown, within_s=within_s)


async def listed(client: Client, tenant: str = "") -> set[str]:
    headers = {TENANT: tenant} if tenant else {}
    answer = await client.request("GET", "/v1/models", headers=headers)
    return {model["id"] for model in answer.json["data"]}


# --- InferenceModelRewrite ----------------------------------------------------------------------


@contextmanager
def api_server_with(group: str, shared: ApiServer, crds: Path) -> Iterator[ApiServer]:
    """One that serves this group: the tests' own serves both, of which the newer one counts."""
    if group == NEW:
        yield shared
        return
    with ApiServer() as server:
        for kind in ("inferencemodelrewrites", "inferencepools"):
            for path in crds.glob(f"*{kind}.yaml"):
                if not path.name.startswith(NEW):
                    install(server, path)
        install(server, DEFINITION)
        yield server


async def put_canary(cluster: Cluster, group: str, **weights: int) -> None:
    """As in the inference extension's rollout guide."""
    targets = [{"modelRewrite": name, "weight": weight} for name, weight in weights.items()]
    matches = [{"model": {"type": "Exact", "value": "food-review"}}]
    reference = {"group": "inference.networking.k8s.io", "name": "pool"}
    spec = {"poolRef": reference, "rules": [{"matches": matches, "targets": targets}]}
    await cluster.put(f"{group}/v1alpha2", "InferenceModelRewrite", "rollout", spec)


async def until_seen(cluster: Cluster, path: str, generation: int) -> None:
    """Wait until a router says that it accepted this generation of an object."""

    async def is_seen() -> bool:
        found = (await status_of(cluster, path)).get("conditions", ())
        said = {(each["type"], each["status"], each.get("observedGeneration")) for each in found}
        return said == {("Accepted", "True", generation)}

    await eventually(is_seen)


async def share_of(client: Client, model: str, *, of: int = 2000) -> float:
    """Which part of so many requests for `food-review` pods read as `model`."""
    answers = await client.ask(of, "food-review", max_tokens=1)
    read = Counter(answer.headers["x-served-model"] for answer in answers)
    assert read.total() == of == read["v1"] + read["v2"]
    return read[model] / of


@pytest.mark.usefixtures("definition")
@pytest.mark.parametrize(
    ("group", "has_resolver"),
    [
        (NEW, True),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((NEW, False), (OLD, True))),
    ],
    ids=str,
)
async def test_a_rollout_moves_requests_by_its_weights_and_none_fails(
    api_server: ApiServer, crds: Path, group: str, has_resolver: bool
) -> None:
    """An alias, then 90/10, 50/50 and 100, while requests flow.

    Resolvers load what is declared on the first request that names it, and nobody else does.
    """
    path, name = rewrite_path(group, "rollout"), "rollout"
    config = {"adapters": [], "resolver_dir": "/adapters"} if has_resolver else {}
    with api_server_with(group, api_server, crds) as server:
        namespace = f"{name}-{len(group)}-{len(config)}"
        await asyncio.to_thread(server.kubectl, "create", "namespace", namespace)
        kubeconfig = server.kubeconfig_for(server.admin_token, namespace=namespace)
        async with (
            Cluster(server, namespace) as cluster,
            pool(cluster, **config) as pods,
            serving(kubeconfig, *flags_of(cluster), pods={"resolver": has_resolver}) as (
                router,
                client,
            ),
        ):
            if has_resolver:
                for version in ("v1", "v2"):
                    await put_route(cluster, version, version)
            await until_read(client, "v1", "v1")
            assert (await client.chat("food-review")).status == 404
            await put_canary(cluster, group, v1=100)
            await until_read(client, "food-review", "v1")
            async with asking(client, "food-review", "v1"):
                await until_seen(cluster, path, 1)
                assert await share_of(client, "v1") == 1
                assert any("v2" in pod.pod.registry.paths for pod in pods) is not has_resolver
                await put_canary(cluster, group, v1=90, v2=10)
                await until_seen(cluster, path, 2)
                assert await share_of(client, "v2") == pytest.approx(0.1, abs=0.03)
                await put_canary(cluster, group, v1=50, v2=50)
                await until_seen(cluster, path, 3)
                # Of 2,000 one run in 140 would be further away by chance, of 4,000 one in 7,000.
                assert await share_of(client, "v2", of=4000) == pytest.approx(0.5, abs=0.03)
                await put_canary(cluster, group, v2=100)
                await until_seen(cluster, path, 4)
                assert await share_of(client, "v2") == 1
            assert await router.counter("extproc_adapter_calls_total") == 0
            await delete_rewrite(cluster, group, "rollout")
            await until_unknown(client, "food-review")


@pytest.mark.usefixtures("crds", "definition")
async def test_a_canary_that_fails_is_taken_back_and_its_object_says_so_until_it_changes(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """No pod has this one."""
    path = rewrite_path(NEW, "rollout")

    async def is_refused() -> bool:
        return (await client.chat("food-review")).status == 404

    async with (
        pool(cluster, adapters=["v1"]),
        serving(kubeconfig, *flags_of(cluster)) as (_, client),
    ):
        await until_read(client, "v1", "v1")
        await put_canary(cluster, NEW, v1=80, v2=20)
        async with beside(asked_for_ever(client, "food-review")):
            partly = ("True", "NoEffect")
            found = await conditions_become(
                cluster, path, Accepted=ACCEPTED, PartiallyIgnored=partly
            )
        assert not any([await is_refused() for _ in range(100)])
        await put_canary(cluster, NEW, v1=70, v2=30)
        await conditions_become(cluster, path, Accepted=ACCEPTED)
        await eventually(is_refused)

    message = found["PartiallyIgnored"]["message"]
    assert message.startswith("the canary v2 is taken back: it fails, ")
    assert "more often than v1" in message


# --- LLMRoute -----------------------------------------------------------------------------------


@asynccontextmanager
async def configured(
    cluster: Cluster, kubeconfig: Path, **sections: Any
) -> AsyncIterator[tuple[RouterProcess, Client]]:
    """`extproc serve` over the pool, and a client of the Envoy before it."""
    kubernetes = {"kubeconfig": str(kubeconfig), "inference_pool": "pool"}
    scrape = {"expiry_s": 30.0}
    config = {"discovery": {"kubernetes": kubernetes}, "scrape": scrape, **sections}
    async with (
        aiohttp.ClientSession() as http,
        behind_envoy(config, http, num_pods=2) as (router, client),
    ):
        await until_read(client, "v1", "v1")
        yield router, client


@pytest.mark.usefixtures("crds", "definition")
async def test_an_llmroute_is_served_from_its_first_apply_to_its_deletion(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """Its adapter is loaded, listed, replaced by a new version and unloaded, as its status says."""
    path = route_path("r")
    async with (
        pool(cluster),
        configured(cluster, kubeconfig) as (_, client),
        asking(client, "v1", "v2"),
    ):
        await put_route(cluster, "r", "a", source="/adapters/a", version="1")
        await until_read(client, "a", "a@1")
        assert await listed(client) == {"base", "v1", "v2", "a"}
        await conditions_become(cluster, path, Accepted=ACCEPTED, **SERVED)
        async with asking(client, "a", "a"):
            await put_route(cluster, "r", "a", source="/adapters/a-2", version="2")
            await until_read(client, "a", "a@2")
            await eventually(lambda: is_removable(cluster, "a@1"))
        old, new = (await status_of(cluster, path))["versions"]
        assert (old["name"], old["state"], old["ready"]) == ("a@1", "removed", 0)
        assert (new["name"], new["state"], new["ready"] > 0) == ("a@2", "serving", True)
        await cluster.request("DELETE", path)
        await until_unknown(client, "a", within_s=DELETED_S)
        assert await listed(client) == {"base", "v1", "v2"}


async def is_removable(cluster: Cluster, name: str) -> bool:
    versions = (await status_of(cluster, route_path("r"))).get("versions", ())
    return any(each["name"] == name and each["removable"] for each in versions)


@pytest.mark.usefixtures("crds", "definition")
async def test_an_llmroute_is_for_its_tenants_and_falls_back_where_it_cannot_be_loaded(
    cluster: Cluster, kubeconfig: Path
) -> None:
    ours, theirs = {TENANT: "ours"}, {TENANT: "theirs"}
    spec = {"backendRefs": [{"name": "pool"}], "adapter": {"name": "a", "source": "/adapters/a"}}
    await cluster.put(ROUTES, "LLMRoute", "r", {**spec, "tenants": ["ours"]})
    missing = {"name": "missing", "source": "/adapters/missing"}
    await cluster.put(ROUTES, "LLMRoute", "f", {**spec, "adapter": missing, "fallback": "v1"})
    sections = {
        "adapters": {"undeclared": "admit"},  # v1, to which one falls back, is the pods' own
        "request": {"trusted_headers": ["fairness_id"]},
    }
    async with (
        pool(cluster),
        serving(kubeconfig, *flags_of(cluster), **sections) as (_, client),
    ):

        async def is_served() -> bool:
            return (await client.chat("a", headers=ours)).status == 200

        await eventually(is_served)
        for headers in (theirs, {}):
            assert (await client.chat("a", headers=headers)).status == 404
        assert "a" in await listed(client, "ours")
        assert "a" not in await listed(client, "theirs")
        await until_read(client, "missing", "v1")
        lost = {"Ready": ("False", "NotServing"), "Degraded": ("True", "FewerThanDesired")}
        found = await conditions_become(cluster, route_path("f"), Accepted=ACCEPTED, **lost)
        assert "files: " in found["Ready"]["message"]


# --- precedence ---------------------------------------------------------------------------------

CONFLICTED = ("False", "Conflicted")


@pytest.mark.usefixtures("crds", "definition")
async def test_the_file_counts_before_llmroutes_and_these_before_rewrites(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """Whatever loses says to whom, and takes over once that has gone."""
    routes = [
        {"name": "file", "models": ["a"], "adapter": {"source": "/adapters/a", "version": "file"}},
        {"name": "alias", "models": ["c"], "targets": [{"model": "v1"}]},
    ]
    await put_route(cluster, "a", "a", source="/adapters/a-2", version="route")
    await put_route(cluster, "b", "b", source="/adapters/a-2", version="route")
    for model in ("a", "b", "c"):
        await put_rewrite(cluster, NEW, model, **{model: "v2"})
    async with pool(cluster), configured(cluster, kubeconfig, routes=routes) as (_, client):
        for model, read in (("a", "a@file"), ("b", "b@route"), ("c", "v1")):
            await until_read(client, model, read)
            found = await conditions_become(cluster, rewrite_path(NEW, model), Accepted=CONFLICTED)
            assert f"{model} (" in found["Accepted"]["message"]
        await conditions_become(cluster, route_path("a"), Accepted=CONFLICTED)
        await cluster.request("DELETE", route_path("b"))
        await until_read(client, "b", "v2")
        await conditions_become(cluster, rewrite_path(NEW, "b"), Accepted=ACCEPTED)


# --- rights -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("crds", "definition")
async def test_a_role_that_may_not_write_status_costs_a_warning_for_each_kind(
    cluster: Cluster,
) -> None:
    server, namespace = cluster.server, cluster.namespace
    reads = (
        "--resource=pods",
        "--resource=inferencepools.inference.networking.k8s.io",
        f"--resource=inferencemodelrewrites.{NEW}",
        f"--resource=llmroutes.{ROUTE_GROUP}",
    )
    token = await asyncio.to_thread(server.account, namespace, "it", *reads)
    kubeconfig = server.kubeconfig_for(token, namespace=namespace)
    async with pool(cluster), configured(cluster, kubeconfig) as (router, client):
        async with asking(client, "v1"):
            await put_route(cluster, "r", "a", source="/adapters/a")
            await put_rewrite(cluster, NEW, "alias", alias="v2")
            await until_read(client, "a", "a")
            await until_read(client, "alias", "v2")
            await eventually(lambda: "status not written: 403" in router.log)
            await put_rewrite(cluster, NEW, "alias", alias="v1")
            await until_read(client, "alias", "v1")
        assert await status_of(cluster, route_path("r")) == {}
        assert router.log.count("status not written") == 2  # once for each kind
