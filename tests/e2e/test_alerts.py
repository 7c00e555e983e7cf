"""Each alert fires for real: the fault is caused, and a real Prometheus reads a real router.

Durations of the rules are a hundredth (tests/e2e/prometheus.py). That each fires only when it
should is tested in tests/kubernetes/alerts.yaml.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, render
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from extproc.stack.processes import free_port
from tests.e2e.conftest import behind_envoy, own_pods, router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, connection_manager
from tests.e2e.prometheus import PrometheusProcess, rules, watched
from tests.e2e.test_canaries import canary
from tests.e2e.test_canaries import pod as failing_version
from tests.e2e.test_outliers import failing_pod
from tests.e2e.trouble import asked, never_ready, thrashing, unreachable_cluster
from tests.fakepods import running_pods
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CROWDED = (
    "ExtprocOverload",
    "ExtprocManyRefused",
    "ExtprocQueueNearlyFull",
    "ExtprocHeldLong",
    "ExtprocSloBurnsFast",
    "ExtprocSloBurnsSlowly",
)
THRASHING = ("ExtprocAdapterThrash",)
ALONE = (
    "ExtprocNotRedundant",
    "ExtprocConfigRefused",
    "ExtprocAdaptersFailed",
    "ExtprocDeclarationsUnread",
    "ExtprocPeersApart",
)
DOWN = ("ExtprocDown",)
FAULTY = (
    "ExtprocPolicyFails",
    "ExtprocDecisionsSlow",
    "ExtprocStreamsBroken",
    "ExtprocBodyNotSent",
)
ONE_POD_FAILS = (
    "ExtprocScrapeFailures",
    "ExtprocEndpointUnknown",
    "ExtprocEndpointEjected",
)
ALL_PODS_FAIL = ("ExtprocCompletionsFailed",)
ALL_PODS_LOST = ("ExtprocAllPodsLost", "ExtprocNoEndpoints")
NO_API = ("ExtprocNotReady", "ExtprocKubernetesSilent")
NO_LOG = ("ExtprocAccessLogSilent",)
SLOW = ("ExtprocSlowPod",)
LEFT_OUT = ("ExtprocPodsLeftOut",)
WORSE = ("ExtprocCanaryTakenBack", "ExtprocTrialWorse")
NOT_CAUSED: dict[str, str] = {}
"""Alerts that no test here causes, and why."""

BUGGY = """
from extproc.request import stream
def begin(*_, **__): raise RuntimeError("a bug")
stream.begin = begin
from extproc.commands.main import main
main()
"""
"""A router that fails at every request: what no configuration can make it do."""


def test_every_alert_is_caused_or_said_not_to_be() -> None:
    named = [
        rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule
    ]
    caused = [
        *(*CROWDED, *THRASHING, *ALONE, *DOWN, *FAULTY),
        *(*ONE_POD_FAILS, *ALL_PODS_FAIL, *ALL_PODS_LOST, *NO_API, *NO_LOG, *SLOW, *LEFT_OUT),
        *WORSE,
    ]

    assert sorted([*caused, *NOT_CAUSED]) == sorted(named)


async def fires(prometheus: PrometheusProcess, *names: str) -> None:
    """Wait until these fire, and check that what they say could be filled in."""
    fired = await prometheus.until_firing(names)
    for name in names:
        annotations = fired[name]["annotations"]
        assert annotations["runbook_url"].endswith(name.lower())
        assert "error" not in annotations["summary"]
        assert not re.search("%!|<", str(annotations)), annotations


async def is_quiet(prometheus: PrometheusProcess, *names: str) -> None:
    """Wait until none of these fires, as before the first scrape."""

    async def does_not_fire() -> bool:
        return not {*names} & (await prometheus.firing()).keys()

    await eventually(does_not_fire)


@pytest.mark.long
async def test_a_crowd_at_one_pod(http: aiohttp.ClientSession) -> None:
    slow = replace(INSTANT, step_s=0.2, max_num_seqs=2)
    async with own_pods(1, profile=slow) as pods:
        config = router_config(pods, queue={"max_requests": 20}, request={"max_hold_s": 8})
        async with (
            behind_envoy(config, http, num_pods=1) as (router, client),
            watched(router) as prometheus,
        ):
            await is_quiet(prometheus, *CROWDED)
            async with asked(client, "shared", num_clients=30, pause_s=0.5, max_tokens=4):
                await fires(prometheus, *CROWDED)


async def test_more_adapters_than_slots(http: aiohttp.ClientSession) -> None:
    async with thrashing(http) as (router, _, ask), watched(router) as prometheus:
        await is_quiet(prometheus, *THRASHING)
        async with ask:
            await fires(prometheus, *THRASHING)


async def test_a_router_alone_with_a_dead_store_and_a_wrong_configuration(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    wrong = {"name": "wrong", "models": ["wrong"], "adapter": {"source": "/adapters/nowhere"}}
    own, dead = (f"127.0.0.1:{free_port()}" for _ in range(2))
    pod = PodConfig(name="pod-0", ranks_by_path={})
    async with running_pods(pod) as pods:
        config = router_config(
            pods,
            adapters={"store": {"directory": {"path": str(store), "interval_s": 0.2}}},
            peers={"static": [own, dead]},
        )
        async with RouterProcess(config, address=own) as router, watched(router) as prometheus:
            await is_quiet(prometheus, *ALONE, *DOWN)
            router.change_config(routes=[wrong])
            store.rename(tmp_path / "away")
            await fires(prometheus, "ExtprocAdaptersFailed", "ExtprocDeclarationsUnread")
            router.change_config(policy={"name": "nobody's"})
            await fires(prometheus, *ALONE)
            await router.kill()
            await fires(prometheus, *DOWN)


async def test_a_policy_a_router_and_a_filter_with_faults(http: aiohttp.ClientSession) -> None:
    faulty = {"name": "tests.e2e.policies:Faulty", "args": {"adapter": "only-0"}}
    async with own_pods(1) as pods, AsyncExitStack() as stack:
        start = stack.enter_async_context
        by_policy, client = await start(
            behind_envoy(router_config(pods, policy=faulty), http, num_pods=1)
        )
        buggy = RouterProcess(router_config(pods))
        buggy.command[1:3] = ["-c", BUGGY]
        await start(buggy)
        filters: list[tuple[RouterProcess, dict[str, Any]]] = [
            (buggy, {}),
            (by_policy, {"request_body": BodyDelivery.STREAMED_STRICT}),
        ]
        others = [
            Client((await start(running_envoy(Mode.ORIGINAL_DST, router, **options))).url, http)
            for router, options in filters
        ]
        prometheus = await start(watched(by_policy, buggy))
        await is_quiet(prometheus, *FAULTY)
        for each in (client, *others):
            await start(asked(each, "only-0", "shared", num_clients=2))
        await fires(prometheus, *FAULTY)


async def test_of_three_pods_one_is_killed_and_one_fails(http: aiohttp.ClientSession) -> None:
    slow = replace(INSTANT, step_s=0.02)
    async with (
        own_pods(2, profile=slow) as pods,
        failing_pod(PodConfig(name="bad", adapters=["shared"]), "500") as bad,
    ):
        config = router_config(
            pods,
            policy={"name": "random"},
            scrape={"timeout_s": 1.0, "expiry_s": 2.0},
            outliers={"base_ejection_s": 1, "max_ejected_ratio": 0.9, "min_requests": 2},
            request={"max_hold_s": 2},
        )
        config["discovery"]["static"].append(bad)
        async with (
            behind_envoy(config, http) as (router, client),
            watched(router) as prometheus,
            asked(client, "shared"),
        ):
            await is_quiet(prometheus, *ONE_POD_FAILS)
            await pods[0].kill()
            await fires(prometheus, *ONE_POD_FAILS)


@pytest.mark.long
async def test_a_slow_pod(http: aiohttp.ClientSession) -> None:
    steps_s = (0.02, 0.02, 0.1)
    pods_like = [
        PodConfig(name=f"pod-{number}", profile=replace(INSTANT, step_s=step_s))
        for number, step_s in enumerate(steps_s)
    ]
    async with running_pods(*pods_like) as pods:
        config = router_config(pods, policy={"name": "round_robin"})
        async with (
            behind_envoy(config, http) as (router, client),
            watched(router) as prometheus,
        ):
            await is_quiet(prometheus, *SLOW)
            async with asked(client, "base", num_clients=9, max_tokens=40):
                await fires(prometheus, *SLOW)


@pytest.mark.long
async def test_a_canary_and_a_policy_on_trial_that_fail(http: aiohttp.ClientSession) -> None:
    trial = {"name": "tests.e2e.policies:Faulty", "args": {"adapter": "good"}, "share": 0.5}
    async with failing_version() as address:
        config = {
            **router_config([], policy={"name": "random", "trial": trial}),
            "discovery": {"static": [address]},
            "outliers": {"enabled": False},
            "routes": [canary("bad", "good", "failing")],
        }
        async with (
            behind_envoy(config, http, num_pods=1) as (router, client),
            watched(router) as prometheus,
        ):
            await is_quiet(prometheus, *WORSE)
            async with asked(client, "bad", num_clients=4):
                await fires(prometheus, *WORSE)


async def test_all_pods_fail(http: aiohttp.ClientSession) -> None:
    async with failing_pod(PodConfig(name="bad"), "500") as bad:
        config = {**router_config([]), "discovery": {"static": [bad]}}
        async with (
            behind_envoy(config, http, num_pods=1) as (router, client),
            watched(router) as prometheus,
        ):
            await is_quiet(prometheus, *ALL_PODS_FAIL)
            async with asked(client, "base"):
                await fires(prometheus, *ALL_PODS_FAIL)


async def test_all_pods_are_lost(http: aiohttp.ClientSession) -> None:
    async with own_pods(2) as pods:
        config = router_config(
            pods, scrape={"timeout_s": 1.0, "expiry_s": 2.0}, request={"max_hold_s": 2}
        )
        async with (
            behind_envoy(config, http, num_pods=2) as (router, client),
            watched(router) as prometheus,
            asked(client, "shared"),
        ):
            await is_quiet(prometheus, *ALL_PODS_LOST)
            for pod in pods:
                await pod.kill()
            await fires(prometheus, *ALL_PODS_LOST)


async def test_more_pods_than_a_router_may_use() -> None:
    async with own_pods(2) as pods:
        config = router_config(pods)
        config["discovery"]["max_endpoints"] = 1
        async with RouterProcess(config) as router, watched(router) as prometheus:
            await fires(prometheus, *LEFT_OUT)


async def test_no_kubernetes_api(tmp_path: Path) -> None:
    async with (
        never_ready(unreachable_cluster(tmp_path)) as router,
        watched(router) as prometheus,
    ):
        await fires(prometheus, *NO_API)


async def test_a_gateway_without_an_access_log(http: aiohttp.ClientSession) -> None:
    async with own_pods(1) as pods:
        completions = {"source": "access_log", "lost_after_s": 60, "max_age_s": 1}
        async with RouterProcess(router_config(pods, completions=completions)) as router:
            options = BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,))
            document = yaml.safe_load(render(options))
            del connection_manager(document)["access_log"]
            async with (
                EnvoyProcess(yaml.safe_dump(document)) as envoy,
                watched(router) as prometheus,
            ):
                await is_quiet(prometheus, *NO_LOG)
                async with asked(Client(envoy.url, http), "shared"):
                    await fires(prometheus, *NO_LOG)
