"""From an alert to its cause by the pages alone, on a running stack: the ways in faults.yaml."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from tests.e2e.conftest import behind_envoy, own_pods, router_config
from tests.e2e.forwarder import Switch
from tests.e2e.harness import RouterProcess
from tests.e2e.prometheus import watched
from tests.e2e.trouble import asked, thrashing
from tests.e2e.typed import addresses, type_it
from tests.fakepods import running_pods
from tests.pages import anchor, blocks
from tests.test_runbooks import sections
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
FAULTS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8")
)


@dataclass
class Broken:
    """A running stack with a fault.

    Attributes:
        bad: The address of the pod at fault, where one is.
        model: The name that its clients write.
        break_it: Breaks it, once Prometheus has seen it whole.
    """

    router: RouterProcess
    bad: str = ""
    model: str = ""
    break_it: Callable[[], object] = lambda: None


@asynccontextmanager
async def slow_pod(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    pods_like = [
        PodConfig(
            name=f"pod-{number}",
            adapters=[f"only-{number}", "shared"],
            profile=replace(INSTANT, step_s=0.02),
        )
        for number in range(3)
    ]
    async with running_pods(*pods_like) as pods:
        config = router_config(pods, admin={"slo_ttft_s": 0.3})
        config["pods"] = {"slow_for_s": 3.0}
        async with (
            behind_envoy(config, http) as (router, client),
            asked(client, "only-0", "only-1", num_clients=2, pause_s=1.0, max_tokens=10),
            asked(client, "only-2", num_clients=6, pause_s=1.0, max_tokens=10, stream=True),
        ):
            engine, slow = pods[2].pod.runner.engine, replace(INSTANT, step_s=0.4)
            yield Broken(
                router, pods[2].address, "only-2", break_it=lambda: engine.change_profile(slow)
            )


@asynccontextmanager
async def thrashing_adapters(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    async with thrashing(http) as (router, pod, ask), ask:
        yield Broken(router, pod.address)


@asynccontextmanager
async def one_tenant(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    slow = replace(INSTANT, step_s=0.1, max_num_seqs=2)
    async with own_pods(1, profile=slow) as pods:
        config = router_config(pods, queue={"max_requests": 10}, request={"max_hold_s": 20})
        async with (
            behind_envoy(config, http, num_pods=1) as (router, client),
            asked(client, "shared", num_clients=30, pause_s=0.5),
            asked(client, "only-0", num_clients=1, pause_s=2.0),
        ):
            yield Broken(router)


@asynccontextmanager
async def dead_store(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    store = folder / "store"
    store.mkdir()
    async with own_pods(1) as pods:
        adapters = {"store": {"directory": {"path": str(store), "interval_s": 0.2}}}
        config = router_config(pods, adapters=adapters)
        async with behind_envoy(config, http, num_pods=1) as (router, _):
            yield Broken(router, break_it=lambda: store.rename(folder / "away"))


@asynccontextmanager
async def wrong_configuration(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    async with (
        own_pods(1) as pods,
        behind_envoy(router_config(pods), http, num_pods=1) as (router, _),
    ):
        wrong = {"max_requests": "many"}
        yield Broken(router, break_it=lambda: router.change_config(queue=wrong))


@asynccontextmanager
async def hung_pod(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Broken]:
    """The pod that alone has an adapter takes connections, and answers nothing."""
    async with own_pods(2) as pods, Switch() as switch:
        bad = await switch.to(pods[1].address)
        config = router_config(pods, scrape={"timeout_s": 1.0, "expiry_s": 3.0})
        config["discovery"]["static"][1]["address"] = bad
        async with (
            behind_envoy(config, http, num_pods=2) as (router, client),
            asked(client, "only-1", num_clients=2, pause_s=0.5),
        ):
            yield Broken(router, bad, "only-1", break_it=lambda: switch.turn(on=False))


CAUSED: dict[str, Callable[[aiohttp.ClientSession, Path], AbstractAsyncContextManager[Broken]]] = {
    each.__name__: each
    for each in (
        *(slow_pod, thrashing_adapters, one_tenant),
        *(dead_store, wrong_configuration, hung_pod),
    )
}


def test_each_way_is_one_that_the_pages_lead() -> None:
    """It begins at the alert, each section says what is run and read, and links lead on."""
    assert [fault["fault"] for fault in FAULTS] == list(CAUSED)
    for fault in FAULTS:
        here, at = "docs/alerts.md", fault["alert"].lower()
        for step in fault["way"]:
            assert (step["page"], anchor(step["section"])) == (here, at), fault["fault"]
            level = "###" if here == "docs/alerts.md" else "##"
            text = sections(ROOT / here, level)[step["section"]]
            assert step["run"] in "".join(blocks(text, "sh")).splitlines(), step["run"]
            assert step["says"] in " ".join(text.split()), step["says"]
            if link := step.get("follow"):
                assert f"]({link})" in text, link
                page, _, at = link.partition("#")
                here = f"docs/{page}" if page else here


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"])
async def test_the_way_leads_from_the_alert_to_the_cause(
    fault: dict[str, Any], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with (
        CAUSED[fault["fault"]](http, tmp_path) as broken,
        watched(broken.router) as prometheus,
    ):
        broken.break_it()
        fired = await prometheus.until_firing([fault["alert"]])
        leads_to = fired[fault["alert"]]["annotations"]["runbook_url"]
        assert leads_to == f"docs/alerts.md#{fault['alert'].lower()}"
        env = addresses(tmp_path, broken.router, prometheus) | {"MODEL": broken.model}
        for step in fault["way"]:
            if "$ID" in step["run"]:
                env["ID"] = await _request_of(broken)
            await _read(step, env, broken.bad)


async def _request_of(broken: Broken) -> str:
    """The `x-request-id` of a request that the pod at fault has served."""
    for _ in range(300):
        for each in (await broken.router.admin("/debug/decisions?n=500"))["decisions"]:
            outcome = each["outcome"]
            if outcome is not None and outcome["served_by"] == broken.bad:
                return str(outcome["request_id"])
        await asyncio.sleep(0.1)
    raise AssertionError(f"no request of {broken.bad} has ended")


async def _read(step: dict[str, Any], env: dict[str, str], bad: str) -> None:
    """Run a step's command until its output has what the page says is read there."""
    wanted = re.compile(step["read"].replace("BAD", re.escape(bad)))
    seen: list[str] = []

    async def has_it() -> bool:
        said = await type_it(step["run"], env)
        seen.append(said.output + said.errors)
        return bool(wanted.search(seen[-1]))

    try:
        await eventually(has_it, every_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{step['run']}\nlast said:\n{seen[-1]}") from error
