"""InferenceModelRewrites and LLMRoutes of a real API server: read, refused, ranked and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.adapters.declared import Declaration
from extproc.config.configured import kubernetes_settings
from extproc.config.discovery import KubernetesConfig
from extproc.discovery.kubernetes import declarations
from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.discovery.kubernetes.declarations import Declarations
from extproc.discovery.kubernetes.kubewatch import WatchTimes
from extproc.discovery.kubernetes.objects import ROUTE_GROUP, PoolRef
from extproc.discovery.kubernetes.objectstatus import AdapterReport, VersionReport
from extproc.discovery.kubernetes.source import KubernetesDiscovery
from extproc.routing.conflicts import Merged, Offer, RuleSet, merge
from extproc.routing.merging import NOT_PRIVATE
from extproc.routing.modelroutes import Objective
from extproc.routing.rewrites import Rewrites
from tests.discovery.kubernetes.test_llmroutes import PROPOSED
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import (
    ACCEPTED,
    DEFINITION,
    NEW,
    OLD,
    PATIENCE_S,
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
from tests.logs import warnings
from tests.waiting import beside, eventually

TIMES = WatchTimes(watch_s=20.0, relist_s=1.0)
POOL = PoolRef("pool")


class Router:
    """What a router does with declarations: merge, and answer."""

    def __init__(self, kubernetes: Kubernetes, pool: PoolRef) -> None:
        self.kubernetes = kubernetes
        self.configured: Sequence[Offer] = ()
        self.states: Mapping[str, AdapterReport] | None = None
        self.rules: Sequence[RuleSet] | None = None
        self.offers: Sequence[Offer] | None = None
        self.merged: Merged = merge()
        self.declarations: Declarations = Declarations(
            kubernetes,
            [pool],
            engine="vllm",
            fails_open=True,
            on_rules=self._on_rules,
            on_offers=self._on_offers,
            wall_clock=time.time,
        )

    def _on_rules(self, rules: Sequence[RuleSet]) -> None:
        self.rules = rules
        self.answer()

    def _on_offers(self, offers: Sequence[Offer], _withheld: frozenset[str]) -> None:
        self.offers = offers
        self.answer()

    def answer(self) -> None:
        self.merged = merge(
            configured=self.configured,
            routes=self.offers or (),
            rewrites=self.rules or (),
        )
        self.declarations.report(self.merged.lost, self.states)

    def target(self, model: str) -> str:
        return Rewrites(self.merged.rules, rng=Random(1)).draw(model).model

    async def rewrites(self, **targets: str) -> None:
        """Wait until these models, and no others, are rewritten."""

        def are_rewritten() -> bool:
            known = {model for rule in self.merged.rules for model in rule.models}
            return known == set(targets) and all(
                self.target(model) == target for model, target in targets.items()
            )

        await eventually(are_rewritten, within_s=PATIENCE_S)

    async def offers_are(self, **origins: str) -> None:
        """Wait until these adapters, and no others, are declared, by these."""
        wanted = {name.replace("_", "-"): origin for name, origin in origins.items()}

        def are_offered() -> bool:
            offers = self.merged.offers.items()
            return {name: each.declaration.origin for name, each in offers} == wanted

        await eventually(are_offered, within_s=PATIENCE_S)


@asynccontextmanager
async def routing(
    kubeconfig: Path, times: WatchTimes = TIMES, pool: PoolRef = POOL
) -> AsyncIterator[Router]:
    kubernetes = Kubernetes(kubeconfig, clock=time.monotonic, rng=Random(1), times=times)
    router = Router(kubernetes, pool)
    try:
        async with beside(router.declarations.run()):
            yield router
    finally:
        await kubernetes.aclose()


# --- rewrites -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("crds", "definition")
async def test_where_both_groups_are_served_the_first_alone_counts(
    cluster: Cluster, kubeconfig: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await put_rewrite(cluster, OLD, "it", old="x")
    await put_rewrite(cluster, NEW, "it", new="x")
    await put_rewrite(cluster, NEW, "other", pool="another-pool", other="x")
    async with routing(kubeconfig) as router:
        await router.rewrites(new="x")
        found = await conditions_become(cluster, rewrite_path(NEW, "it"), Accepted=ACCEPTED)
        assert found["Accepted"]["observedGeneration"] == 1
        await put_rewrite(cluster, NEW, "it", new="y", more="z")
        await router.rewrites(new="y", more="z")
        await eventually(lambda: is_seen(cluster, rewrite_path(NEW, "it"), 2), within_s=PATIENCE_S)
        await delete_rewrite(cluster, NEW, "it")
        await router.rewrites()

    for unread in (rewrite_path(OLD, "it"), rewrite_path(NEW, "other")):
        assert await status_of(cluster, unread) == {}
    [line] = warnings(caplog)
    assert line.startswith("InferenceModelRewrites: of those in two API groups, those under /apis/")


async def is_seen(cluster: Cluster, path: str, generation: int) -> bool:
    status = await status_of(cluster, path)
    return {each["observedGeneration"] for each in status["conditions"]} == {generation}


@pytest.mark.slow
async def test_definitions_may_come_and_go(crds_folder: Path) -> None:
    """None at first, then the older group's, both, the older one again; then our own kind's."""
    with ApiServer() as server:
        server.kubectl("create", "namespace", "n")
        kubeconfig = server.kubeconfig_for(server.admin_token, namespace="n")

        async def define(group: str) -> None:
            path = crds_folder / f"{group}_inferencemodelrewrites.yaml"
            await asyncio.to_thread(install, server, path)

        async with Cluster(server, "n") as cluster, routing(kubeconfig) as router:
            await define(OLD)
            await put_rewrite(cluster, OLD, "it", old="x")
            await router.rewrites(old="x")
            await conditions_become(cluster, rewrite_path(OLD, "it"), Accepted=ACCEPTED)
            await define(NEW)
            await put_rewrite(cluster, NEW, "it", new="x")
            await router.rewrites(new="x")
            name = f"inferencemodelrewrites.{NEW}"
            await asyncio.to_thread(server.kubectl, "delete", "crd", name)
            await router.rewrites(old="x")
            await asyncio.to_thread(install, server, DEFINITION)
            await put_route(cluster, "r", "a")
            await router.offers_are(a="llmroute n/r")


@pytest.mark.usefixtures("crds", "definition")
async def test_rewrites_of_either_group_are_followed_and_answered(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """Of one age the first name counts; what loses says to whom."""
    await put_rewrite(cluster, NEW, "a", one="from-a")
    await put_rewrite(cluster, NEW, "b", one="from-b", two="from-b")
    await put_rewrite(cluster, NEW, "c", adapter="from-c")
    async with routing(kubeconfig) as router:
        await router.rewrites(one="from-a", two="from-b", adapter="from-c")
        await put_route(cluster, "r", "adapter")
        await router.rewrites(one="from-a", two="from-b")
        path, partly = rewrite_path(NEW, "b"), ("True", "NoEffect")
        found = await conditions_become(cluster, path, Accepted=ACCEPTED, PartiallyIgnored=partly)
        lost = ("False", "Conflicted")
        other = await conditions_become(cluster, rewrite_path(NEW, "c"), Accepted=lost)
        await delete_rewrite(cluster, NEW, "a")
        await router.rewrites(one="from-b", two="from-b")
        await conditions_become(cluster, path, Accepted=ACCEPTED)

    namespace = cluster.namespace
    assert f"one (inferencemodelrewrite {namespace}/a)" in found["PartiallyIgnored"]["message"]
    assert f"adapter (llmroute {namespace}/r)" in other["Accepted"]["message"]


# --- LLMRoutes ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("definition")
async def test_an_llmroute_is_followed_from_its_first_apply_to_its_deletion(
    cluster: Cluster, kubeconfig: Path
) -> None:
    origin = f"llmroute {cluster.namespace}/r"
    async with routing(kubeconfig) as router:
        await put_route(cluster, "r", "a", source="/adapters/a-1", version="1")
        await router.offers_are(a=origin)
        assert router.merged.offers["a"].declaration.min_replicas == 1
        await conditions_become(cluster, route_path("r"), Accepted=ACCEPTED)
        await put_route(cluster, "r", "a", source="/adapters/a-2", version="2")
        await eventually(lambda: router.merged.offers["a"].declaration.served_name == "a@2")
        await put_route(cluster, "twin", "a")
        lost = ("False", "Conflicted")
        await conditions_become(cluster, route_path("twin"), Accepted=lost)
        await cluster.request("DELETE", route_path("r"))
        await router.offers_are(a=f"llmroute {cluster.namespace}/twin")
        await conditions_become(cluster, route_path("twin"), Accepted=ACCEPTED)


@pytest.mark.usefixtures("definition")
async def test_the_configuration_counts_before_an_llmroute(
    cluster: Cluster, kubeconfig: Path
) -> None:
    await put_route(cluster, "r", "a")
    async with routing(kubeconfig) as router:
        await conditions_become(cluster, route_path("r"), Accepted=ACCEPTED)
        router.configured = [Offer(Declaration("a", source="/elsewhere"))]
        router.answer()
        lost = ("False", "Conflicted")
        found = await conditions_become(cluster, route_path("r"), Accepted=lost)

    assert router.merged.offers["a"].declaration.source == "/elsewhere"
    assert found["Accepted"]["message"] == "a is declared by config already"


@pytest.mark.usefixtures("definition")
async def test_the_founding_proposal_s_object_applies_but_for_its_version(
    cluster: Cluster, kubeconfig: Path
) -> None:
    spec = PROPOSED | {"backendRefs": [{"name": "pool"}]}
    await cluster.put(ROUTES, "LLMRoute", "proposed", PROPOSED)
    await cluster.put(ROUTES, "LLMRoute", "ours", spec)
    async with routing(kubeconfig) as router:
        await router.offers_are(sentiment=f"llmroute {cluster.namespace}/ours")
        partly = ("True", "NoEffect")
        found = await conditions_become(
            cluster, route_path("ours"), Accepted=ACCEPTED, PartiallyIgnored=partly
        )
        [claims] = router.merged.routes

    assert (claims.priority, claims.tpot) == (100, Objective(2.0, 99.0))
    assert found["PartiallyIgnored"]["message"].startswith("parentRefs has no effect")
    assert await status_of(cluster, route_path("proposed")) == {}


@pytest.mark.usefixtures("definition")
async def test_where_envoy_fails_open_an_object_is_told_that_its_tenants_alone_do_not_get_it(
    cluster: Cluster, kubeconfig: Path
) -> None:
    spec = {"backendRefs": [{"name": "pool"}], "adapter": {"name": "a"}, "tenants": ["t"]}
    await cluster.put(ROUTES, "LLMRoute", "r", spec)
    async with routing(kubeconfig):
        partly = ("True", "NoEffect")
        found = await conditions_become(
            cluster, route_path("r"), Accepted=ACCEPTED, PartiallyIgnored=partly
        )

    assert found["PartiallyIgnored"]["message"] == NOT_PRIVATE


@pytest.mark.usefixtures("definition")
async def test_metrics_in_another_format_are_refused_by_a_condition(
    cluster: Cluster, kubeconfig: Path
) -> None:
    await put_route(cluster, "r", "a", metrics={"format": "Graphite"})
    async with routing(kubeconfig) as router:
        invalid = ("False", "Invalid")
        found = await conditions_become(cluster, route_path("r"), Accepted=invalid)
        assert router.merged.offers == {}
        await put_route(cluster, "r", "a", metrics={"format": "vllm"})
        await conditions_become(cluster, route_path("r"), Accepted=ACCEPTED)

    assert "must be Prometheus, or one of vllm, sglang" in found["Accepted"]["message"]


REFUSED: Sequence[tuple[str, dict[str, Any], str]] = (
    ("commas", {"name": "a,b"}, "without commas"),
    ("blanks", {"name": " a"}, "without blanks at its ends"),
    ("min-max", {"replicas": {"min": 2, "max": 1}}, "must be at least min"),
    ("default-min-max", {"replicas": {"max": 0}}, "greater than or equal to 1"),
    *(
        (scheme, {"source": f"{scheme}://x/y"}, "mount the files into the pods")
        for scheme in ("s3", "gs", "oci", "https")
    ),
    ("relative", {"source": "adapters/a"}, "must be an absolute path, or hf:ORG/REPO"),
    ("up", {"source": "/adapters/../etc"}, "below /, without"),
    ("hub", {"source": "hf:a"}, "must be hf:ORG/REPO"),
    ("revision", {"source": "hf:a/b@v1"}, "no engine takes a revision"),
    ("rank", {"rank": 0}, "rank"),
    ("load", {"load": "never"}, "supported values"),
    (
        "latency",
        {"objectives": [{"type": "OutputTokenLatency", "latency": {"value": "2h"}}]},
        "must be from 1ms to 1h",
    ),
    (
        "quantile",
        {
            "objectives": [
                {
                    "type": "OutputTokenLatency",
                    "latency": {"value": "2s", "quantile": {"numerator": 100}},
                }
            ]
        },
        "must be below 1",
    ),
)


@pytest.mark.usefixtures("definition")
async def test_an_api_server_refuses_what_cannot_be_served(cluster: Cluster) -> None:
    for name, given, why in REFUSED:
        adapter = dict(given)
        with pytest.raises(AssertionError, match=why):
            await put_route(cluster, name, adapter.pop("name", "a"), **adapter)
    fallback = {"backendRefs": [{"name": "pool"}], "adapter": {"name": "a"}, "fallback": "a"}
    with pytest.raises(AssertionError, match="must be another model"):
        await cluster.put(ROUTES, "LLMRoute", "fallback", fallback)
    service = {"backendRefs": [{"name": "s", "kind": "Service"}], "adapter": {"name": "a"}}
    with pytest.raises(AssertionError, match="must be an InferencePool"):
        await cluster.put(ROUTES, "LLMRoute", "service", service)


# --- status -------------------------------------------------------------------------------------

SERVED = AdapterReport(
    True,
    versions=(VersionReport("a@1", "draining", 0, 1), VersionReport("a@2", "ready", 2, 2, False)),
)


@pytest.mark.usefixtures("definition")
async def test_how_an_adapter_is_served_is_in_its_status(
    cluster: Cluster, kubeconfig: Path
) -> None:
    path, ready = route_path("r"), ("True", "Serving")
    await put_route(cluster, "r", "a", version="2")
    async with routing(kubeconfig) as router:
        router.states = {"a": SERVED}
        router.answer()
        degraded = {"Degraded": ("False", "AsDesired")}
        await conditions_become(cluster, path, Accepted=ACCEPTED, Ready=ready, **degraded)
        assert (await status_of(cluster, path))["versions"] == [
            {"name": "a@1", "state": "draining", "desired": 0, "ready": 1, "removable": False},
            {"name": "a@2", "state": "ready", "desired": 2, "ready": 2, "removable": False},
        ]
        router.states = {
            "a": AdapterReport(False, "no files", (VersionReport("a@2", "failed", 2),))
        }
        router.answer()
        degraded = {"Degraded": ("True", "FewerThanDesired")}
        lost = ("False", "NotServing")
        await conditions_become(cluster, path, Accepted=ACCEPTED, Ready=lost, **degraded)
        router.states = {}
        router.answer()
        await conditions_become(cluster, path, Accepted=ACCEPTED)
        assert "versions" not in await status_of(cluster, path)


@pytest.mark.usefixtures("definition")
async def test_two_routers_leave_one_status_and_each_other_alone(cluster: Cluster) -> None:
    """One loads and says how; the other only reads. A status that is right is not written again."""
    server, namespace, path = cluster.server, cluster.namespace, route_path("r")
    token = server.token(namespace, account(cluster, "it", *WRITES))
    kubeconfig = server.kubeconfig_for(token, namespace=namespace)
    await put_route(cluster, "r", "a", version="2")
    times = WatchTimes(watch_s=1.0, relist_s=0.1)
    async with routing(kubeconfig, times) as one, routing(kubeconfig, times) as two:

        async def both_list_again() -> None:
            before = [router.kubernetes.lists["llmroutes"] for router in (one, two)]

            def have_listed() -> bool:
                now = [router.kubernetes.lists["llmroutes"] for router in (one, two)]
                return all(new > old + 1 for old, new in zip(before, now, strict=True))

            await eventually(have_listed, within_s=PATIENCE_S)

        one.states = {"a": SERVED}
        one.answer()
        expected = {"Accepted": ACCEPTED, "Ready": ("True", "Serving")}
        expected["Degraded"] = ("False", "AsDesired")
        await conditions_become(cluster, path, **expected)
        await both_list_again()
        before = num_patches(server, namespace)
        for router in (one, two):
            router.answer()
        await both_list_again()
        after = num_patches(server, namespace)
        await conditions_become(cluster, path, **expected)

    assert before <= 3  # both may have said `Accepted` at once
    assert after == before


SERVICE = {"group": "", "kind": "Service", "name": "pool"}


@pytest.mark.usefixtures("definition")
async def test_an_llmroute_whose_backends_are_not_read_says_so_in_its_status(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """Also one that was followed before it named others."""
    path, none = route_path("r"), ("False", "NoMatchingPool")
    other = {"backendRefs": [SERVICE], "adapter": {"name": "a"}}
    await cluster.put(ROUTES, "LLMRoute", "r", other)
    async with routing(kubeconfig) as router:
        found = await conditions_become(cluster, path, Accepted=none)
        here, there = "this router serves InferencePool pool", "backendRefs has Service pool"
        assert found["Accepted"]["message"] == f"{there}; {here}"

        router.states = {"a": SERVED}
        await put_route(cluster, "r", "a")
        expected = {"Ready": ("True", "Serving"), "Degraded": ("False", "AsDesired")}
        await conditions_become(cluster, path, Accepted=ACCEPTED, **expected)
        await cluster.put(ROUTES, "LLMRoute", "r", other)
        await conditions_become(cluster, path, Accepted=none)


@pytest.mark.usefixtures("definition")
async def test_a_router_leaves_an_llmroute_to_the_one_that_reads_its_backends(
    cluster: Cluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever of them writes first, and though both list again and again."""
    monkeypatch.setattr(declarations, "PATIENCE_S", 0.0)
    times = WatchTimes(watch_s=1.0, relist_s=0.1)
    service = PoolRef("pool", "", "Service")
    async with routing(kubeconfig, times) as one, routing(kubeconfig, times, service) as two:
        for number in range(10):
            refs = [SERVICE] if number % 2 else [{"name": "pool"}]
            spec = {"backendRefs": refs, "adapter": {"name": f"a{number}"}}
            await cluster.put(ROUTES, "LLMRoute", "r", spec)
            await conditions_become(cluster, route_path("r"), Accepted=ACCEPTED)
        before = one.kubernetes.lists["llmroutes"], two.kubernetes.lists["llmroutes"]

        def have_listed() -> bool:
            lists = one.kubernetes.lists["llmroutes"], two.kubernetes.lists["llmroutes"]
            return all(new > old + 1 for old, new in zip(before, lists, strict=True))

        await eventually(have_listed, within_s=PATIENCE_S)
        await conditions_become(cluster, route_path("r"), Accepted=ACCEPTED)


READS = (
    *("--resource=inferencemodelrewrites.llm-d.ai", f"--resource=llmroutes.{ROUTE_GROUP}"),
    f"--resource=inferencemodelrewrites.{OLD}",
)
WRITES = (
    "--resource=inferencemodelrewrites.llm-d.ai/status",
    f"--resource=llmroutes.{ROUTE_GROUP}/status",
)


def account(cluster: Cluster, name: str, *writes: str) -> str:
    """A service account that may read what is declared, and patch these."""
    server, where = cluster.server, ("-n", cluster.namespace)
    server.account(cluster.namespace, name, *READS)
    if writes:
        server.kubectl("create", "role", f"{name}-writes", "--verb=patch", *writes, *where)
        who = (f"--role={name}-writes", f"--serviceaccount={cluster.namespace}:{name}")
        server.kubectl("create", "rolebinding", f"{name}-writes", *who, *where)
    return name


def patches(server: ApiServer, namespace: str) -> Iterator[int]:
    for event in server.requests_of(namespace, "it"):
        if event["verb"] == "patch" and "responseStatus" in event:
            yield event["responseStatus"]["code"]


def num_patches(server: ApiServer, namespace: str) -> int:
    return len(list(patches(server, namespace)))


@pytest.mark.usefixtures("crds", "definition")
async def test_a_role_without_status_costs_one_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Declarations count all the same; no storm of attempts; once it may, the status is there."""
    server, namespace = cluster.server, cluster.namespace
    token = server.token(namespace, account(cluster, "it"))
    for number in range(20):
        await put_route(cluster, f"r{number}", f"a{number}")
    kubeconfig = server.kubeconfig_for(token, namespace=namespace)
    async with routing(kubeconfig, WatchTimes(watch_s=20.0, relist_s=2.0)) as router:
        started_s = time.monotonic()
        await eventually(lambda: len(router.merged.offers) == 20, within_s=PATIENCE_S)
        await eventually(lambda: num_patches(server, namespace) >= 2, within_s=PATIENCE_S)
        refused = list(patches(server, namespace))
        taken_s = time.monotonic() - started_s
        server.kubectl("create", "role", "more", "--verb=patch", *WRITES, "-n", namespace)
        who = ("--role=more", f"--serviceaccount={namespace}:it")
        server.kubectl("create", "rolebinding", "more", *who, "-n", namespace)
        for number in range(20):
            await conditions_become(cluster, route_path(f"r{number}"), Accepted=ACCEPTED)

    assert set(refused) == {403}
    assert len(refused) <= 2 + taken_s / 2.0
    [line] = [each for each in warnings(caplog) if "two API groups" not in each]
    assert line.startswith("status not written: 403:")


# --- as the router is configured ----------------------------------------------------------------


@pytest.mark.usefixtures("definition")
@pytest.mark.parametrize(
    ("source", "ref"),
    [
        ({"inference_pool": "pods"}, {"name": "pods"}),
        ({"service": "pods"}, {"group": "", "kind": "Service", "name": "pods"}),
    ],
    ids=["pool", "service"],
)
async def test_what_is_declared_for_the_source_of_endpoints_is_handed_on_and_answered(
    cluster: Cluster, kubeconfig: Path, source: dict[str, str], ref: dict[str, str]
) -> None:
    spec = {"backendRefs": [ref], "adapter": {"name": "a"}}
    await cluster.put(ROUTES, "LLMRoute", "r", spec)
    seen: list[str] = []

    def on_offers(offers: Sequence[Offer], _withheld: frozenset[str]) -> None:
        seen[:] = [each.declaration.origin for each in offers]
        discovery.report({}, {"a": SERVED})

    discovery = KubernetesDiscovery(
        kubernetes_settings(KubernetesConfig(kubeconfig=kubeconfig, **source)),
        on_endpoints=lambda _: None,
        on_priorities=lambda _: None,
        scheme="http",
        engine="vllm",
        fails_open=False,
        clock=time.monotonic,
        wall_clock=time.time,
        rng=Random(1),
        on_rules=lambda _: None,
        on_offers=on_offers,
    )
    assert not any(each.is_read for each in discovery.sources())
    task = asyncio.ensure_future(discovery.run())
    try:
        expected = {"Accepted": ACCEPTED, "Ready": ("True", "Serving")}
        expected["Degraded"] = ("False", "AsDesired")
        await conditions_become(cluster, route_path("r"), **expected)
        # Of rewrites, too: those are read beside.
        await eventually(
            lambda: all(each.is_read for each in discovery.sources()), within_s=PATIENCE_S
        )
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert seen == [f"llmroute {cluster.namespace}/r"]
