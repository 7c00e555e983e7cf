"""LLMRoutes that a router cannot read, in a real API server: unknown is not absent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.discovery.kubernetes.objects import ROUTE_GROUP
from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig
from tests.e2e.conftest import behind_envoy, running_envoy
from tests.e2e.harness import Client, RouterProcess, free_port
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import NEW, ROUTES, put_rewrite, put_route, route_path
from tests.kubernetes.faultyproxy import Faults, FaultyProxy
from tests.kubernetes.manifests import MANIFESTS
from tests.kubernetes.test_epp import announce
from tests.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TENANT = "x-llm-d-inference-fairness-id"
GRANTS = (
    "--resource=pods",
    "--resource=inferencepools.inference.networking.k8s.io",
    f"--resource=inferencemodelrewrites.{NEW}",
    f"--resource=llmroutes.{ROUTE_GROUP}",
)
ROLE_OF_ROUTES = f"it-{len(GRANTS) - 1}"
CONFIGURED = {"name": "c", "models": ["configured"], "adapter": {}}


@dataclass
class Scene:
    """A router, which is not started, before pods that list adapters; and a client of its Envoy.

    The adapter `private` is of the tenant `acme` by an LLMRoute, `configured` is declared by the
    configuration, and `own` by nobody.
    """

    cluster: Cluster
    proxy: FaultyProxy
    router: RouterProcess
    client: Client

    async def ask(self, model: str, tenant: str = "") -> int:
        return (await self.client.chat(model, headers={TENANT: tenant} if tenant else {})).status

    async def answers(self, model: str) -> list[int]:
        """The answers to its tenant, to another one, and to nobody in particular."""
        return [await self.ask(model, tenant) for tenant in ("acme", "other", "")]

    async def listed(self, tenant: str = "") -> set[str]:
        headers = {TENANT: tenant} if tenant else {}
        answer = await self.client.request("GET", "/v1/models", headers=headers)
        return {model["id"] for model in answer.json["data"]}

    async def until(self, model: str, tenant: str, status: int) -> None:
        async def is_so() -> bool:
            return await self.ask(model, tenant) == status

        await eventually(is_so)

    async def health(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.router.admin("/healthz")
        return found

    async def known(self) -> dict[str, bool]:
        sources = (await self.router.admin("/debug/adapters"))["sources"]
        return {each["name"]: each["is_complete"] for each in sources}

    async def is_behind(self) -> bool:
        """Whether LLMRoutes that were read before cannot be read now, as the router says."""
        warnings = (await self.health())["warnings"]
        return any(each.startswith("LLMRoutes: as of ") for each in warnings)

    async def is_unread(self) -> bool:
        """Health says so, and why: once a first try has ended."""
        (warning,) = (await self.health())["warnings"]
        return bool(warning.startswith("LLMRoutes: not read yet: "))

    async def check_that_nothing_is_known(self) -> None:
        """Nobody gets what may be somebody's; everybody else is served, from the first request."""
        for model in ("private", "own"):
            assert await self.answers(model) == [503] * 3
        refused = await self.client.chat("private")
        assert refused.json["error"]["code"] == "adapters_unknown"
        assert int(refused.headers["retry-after"]) > 0
        for model in ("base", "configured"):
            assert await self.answers(model) == [200] * 3
        assert await self.listed("acme") == await self.listed() == {"base", "configured"}
        await eventually(self.is_unread)

    async def check_that_all_is_known(self, *aliases: str) -> None:
        assert await self.answers("private") == [200, 404, 404]
        for model in ("base", "configured", "own"):
            assert await self.answers(model) == [200] * 3
        assert "private" in await self.listed("acme")
        assert await self.listed() == {"base", "configured", "own", *aliases}


@asynccontextmanager
async def scene(cluster: Cluster, proxy: FaultyProxy, **adapters: Any) -> AsyncIterator[Scene]:
    server, namespace = cluster.server, cluster.namespace
    token = await asyncio.to_thread(server.account, namespace, "it", *GRANTS)
    kubeconfig = server.kubeconfig_for(token, url=proxy.url, namespace=namespace)
    backend, tenants = [{"name": "pool"}], ["acme"]
    for name in ("private", "private-too"):
        spec = {"backendRefs": backend, "adapter": {"name": name}, "tenants": tenants}
        await cluster.put(ROUTES, "LLMRoute", name, spec)
    names = ["private", "private-too", "configured", "own"]
    configs = [PodConfig(name=f"pod-{number}", adapters=names) for number in range(2)]
    hosts = ("127.0.0.2", "127.0.0.3")
    async with running_pods(*configs, hosts=hosts, port=free_port()) as pods:
        await cluster.put_pool("pool", {"app": "vllm"}, [await announce(cluster, pods)])
        router = RouterProcess(
            {
                "discovery": {
                    "kubernetes": {"kubeconfig": str(kubeconfig), "inference_pool": "pool"}
                },
                "scrape": {"expiry_s": 30.0},
                "request": {"trusted_headers": ["fairness_id"]},
                "routes": [CONFIGURED],
                "adapters": {"undeclared": "admit", "ready_wait_s": 0, **adapters},
            }
        )
        try:
            async with (
                running_envoy(Mode.ORIGINAL_DST, router.address, num_pods=2) as envoy,
                aiohttp.ClientSession() as http,
            ):
                yield Scene(cluster, proxy, router, Client(envoy.url, http))
        finally:
            await router.close()


Trouble = Callable[[Scene, bool], Awaitable[None]]


async def right(scene: Scene, is_lost: bool) -> None:
    """The Role loses `llmroutes`, or gets it back."""
    server, where = scene.cluster.server, ("-n", scene.cluster.namespace)
    grant = f"--role={ROLE_OF_ROUTES}", f"--serviceaccount={scene.cluster.namespace}:it"
    what = ("delete",) if is_lost else ("create",)
    command = (*what, "rolebinding", ROLE_OF_ROUTES, *where, *(() if is_lost else grant))
    await asyncio.to_thread(server.kubectl, *command)


async def half_a_list(scene: Scene, is_broken: bool) -> None:
    """Lists of LLMRoutes fail at their second page."""
    scene.proxy.page_size = 1
    scene.proxy.breaks = partial(_is_of_routes, is_broken, "continue")


async def server_error(scene: Scene, is_broken: bool) -> None:
    scene.proxy.breaks = partial(_is_of_routes, is_broken, "")


def _is_of_routes(is_broken: bool, parameter: str, request: web.Request) -> bool:
    is_asked = not parameter or bool(request.query.get(parameter))
    return is_broken and request.path.endswith("/llmroutes") and is_asked


@pytest.mark.few(1)
@pytest.mark.usefixtures("crds", "definition")
@pytest.mark.parametrize("trouble", [right, half_a_list, server_error])
async def test_routes_that_cannot_be_read_are_unknown_at_a_start_and_stay_as_they_were_later(
    cluster: Cluster, proxy: FaultyProxy, trouble: Trouble
) -> None:
    """No restart is needed for them to be read."""
    async with scene(cluster, proxy) as it:
        await trouble(it, True)
        await it.router.start()
        await it.check_that_nothing_is_known()

        await trouble(it, False)
        await it.until("private", "acme", 200)
        await it.check_that_all_is_known()
        assert (await it.known())["LLMRoutes"]

        await trouble(it, True)
        proxy.faults = Faults(end=1.0, gone_status=1.0)  # watches end, and lists follow
        await put_route(cluster, "later", "later")
        await eventually(it.is_behind)
        await it.check_that_all_is_known()
        assert (await it.health())["reasons"] == []


@pytest.mark.usefixtures("crds", "definition")
async def test_a_router_that_cannot_read_them_is_not_ready_and_serves_what_reaches_it(
    cluster: Cluster, proxy: FaultyProxy
) -> None:
    async with scene(cluster, proxy, ready_wait_s=None) as it:
        await right(it, True)
        starting = asyncio.ensure_future(it.router.start())
        try:
            await it.until("base", "", 200)
            await it.check_that_nothing_is_known()
            (reason,) = (await it.health())["reasons"]
            assert "LLMRoutes: not read yet: 403" in reason
            assert not starting.done()
            await right(it, False)
            await starting
            await it.check_that_all_is_known()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.few(1)
@pytest.mark.usefixtures("crds", "definition")
@pytest.mark.parametrize("overlay", ["inference-pool", "envoy-gateway"])
async def test_a_route_that_is_deleted_while_no_router_runs_leaves_nothing_public(
    cluster: Cluster, proxy: FaultyProxy, overlay: str
) -> None:
    """As the overlays are set. What others declare is served."""
    path = MANIFESTS / "overlays" / overlay / "extproc.yaml"
    adapters = yaml.safe_load(path.read_text())["adapters"]
    async with scene(cluster, proxy, **adapters) as it:
        await it.router.start()
        await it.until("private", "acme", 200)
        await it.router.stop()
        for name in ("private", "private-too"):
            await cluster.request("DELETE", route_path(name))
        await it.router.start()

        assert await it.answers("private") == [404] * 3
        assert await it.listed("acme") == await it.listed() == {"base", "configured"}
        for model in ("base", "configured"):
            assert await it.answers(model) == [200] * 3


@pytest.mark.usefixtures("crds", "definition")
async def test_by_default_the_last_route_with_tenants_leaves_nothing_public_while_routers_run(
    cluster: Cluster, proxy: FaultyProxy
) -> None:
    async with scene(cluster, proxy, undeclared="auto") as it:
        await it.router.start()
        await it.until("private", "acme", 200)
        for name in ("private", "private-too"):
            await cluster.request("DELETE", route_path(name))
        await it.until("private", "acme", 404)

        assert await it.answers("private") == [404] * 3
        assert await it.answers("configured") == [200] * 3


@pytest.mark.long
@pytest.mark.usefixtures("crds", "definition")
async def test_rewrites_that_cannot_be_read_restrict_nobody_and_their_names_are_unknown(
    cluster: Cluster, proxy: FaultyProxy
) -> None:
    async with scene(cluster, proxy) as it:
        proxy.breaks = lambda request: request.path.endswith("/inferencemodelrewrites")
        await put_rewrite(cluster, NEW, "alias", alias="own")
        await it.router.start()
        await it.until("private", "acme", 200)
        assert await it.answers("private") == [200, 503, 503]
        assert await it.answers("own") == [200] * 3
        assert await it.ask("alias") == 503

        proxy.breaks = lambda request: False
        await it.until("alias", "", 200)
        await it.check_that_all_is_known("alias")


@pytest.mark.long
@pytest.mark.usefixtures("crds")
async def test_a_role_of_others_without_our_kind_is_no_matter_where_that_is_not_defined(
    crds_folder: Path,
) -> None:
    """As where llm-d's chart made the Role: pods' own adapters are served as ever."""
    with ApiServer() as server:
        server.kubectl("create", "namespace", "n")
        for crd in crds_folder.glob("*inferencepools.yaml"):
            await asyncio.to_thread(server.kubectl, "apply", "--server-side", "-f", str(crd))
        async with Cluster(server, "n") as cluster:
            established = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
            await asyncio.to_thread(server.kubectl, *established)
            token = await asyncio.to_thread(server.account, "n", "it", *GRANTS[:2])
            kubeconfig = server.kubeconfig_for(token, namespace="n")
            configs = [PodConfig(name="pod-0", adapters=["own"])]
            async with running_pods(*configs, hosts=["127.0.0.2"], port=free_port()) as pods:
                await cluster.put_pool("pool", {"app": "vllm"}, [await announce(cluster, pods)])
                kubernetes = {"kubeconfig": str(kubeconfig), "inference_pool": "pool"}
                config = {"discovery": {"kubernetes": kubernetes}}
                async with (
                    aiohttp.ClientSession() as http,
                    behind_envoy(config, http, num_pods=1) as (_, client),
                ):
                    assert (await client.chat("own")).status == 200
                    assert (await client.chat("nobody")).status == 404
