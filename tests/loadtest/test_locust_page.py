"""Our page of locust's web UI, in a real browser, beside a running test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig, RunningPod, start_pod
from tests.browser import Browser, Page, Scheme, running_browser
from tests.e2e.harness import eventually, free_port
from tests.loadtest.locusts import PATIENCE_S, Ui, locust, with_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ADAPTERS = ("support-de", "support-en", "legal", "summaries")


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    config = PodConfig(name="pod-1", adapters=list(ADAPTERS), profile=INSTANT)
    started = await start_pod(config)
    yield started
    await started.stop()


@asynccontextmanager
async def web_ui(url: str, *arguments: str) -> AsyncIterator[Ui]:
    port = str(free_port())
    web = ("--web-host", "127.0.0.1", "--web-port", port)
    async with (
        locust("--host", url, *web, *arguments) as process,
        aiohttp.ClientSession() as http,
    ):
        ui = Ui(http, f"http://127.0.0.1:{port}", process)
        await eventually(ui.is_up, within_s=PATIENCE_S, every_s=0.1)
        yield ui


async def until_stopped(ui: Ui) -> dict[str, Any]:
    async def stopped() -> dict[str, Any] | None:
        data = await ui.data()
        return data if data["state"] == "stopped" and data["is_over"] else None

    data: dict[str, Any] = await eventually(stopped, within_s=PATIENCE_S, every_s=0.2)
    return data


async def under_way(ui: Ui) -> dict[str, Any] | None:
    data = await ui.data()
    return data if data["figures"] and data["figures"]["whole"]["sent"] > 5 else None


async def test_a_test_stops_by_itself_and_another_can_begin(pod: RunningPod) -> None:
    async with web_ui(pod.url) as ui:
        before = await ui.data()
        await ui.start(rate=40, requests=60)
        first = await until_stopped(ui)
        await ui.start(rate=40, requests=30, seed=2, workload="zipf", adapters=5)
        await eventually(lambda: _is_another(ui, first), within_s=PATIENCE_S)
        second = await until_stopped(ui)

    assert before["figures"] is None
    for data in (first, second):
        assert data["figures"]["whole"]["sent"] == data["num_requests"]
        assert data["words"] == []
    assert first["num_requests"] > second["num_requests"] > 0


async def _is_another(ui: Ui, first: dict[str, Any]) -> bool:
    return bool((await ui.data()).get("num_requests") != first["num_requests"])


async def test_a_test_that_is_stopped_in_the_ui_counts_what_it_has_not_sent(
    pod: RunningPod,
) -> None:
    async with web_ui(pod.url) as ui:
        await ui.start(rate=20, requests=2000)
        await eventually(lambda: under_way(ui), within_s=PATIENCE_S, every_s=0.2)
        await ui.stop()
        data = await until_stopped(ui)

    (words,) = data["words"]
    num_cut, num_unsent = (int(word) for word in words.split() if word.isdigit())
    assert data["figures"]["whole"]["over"] + num_unsent == data["num_requests"]
    assert num_cut == data["figures"]["errors"].get("stopped", 0)


async def test_a_test_that_cannot_begin_says_why_on_the_page_and_the_next_one_does(
    pod: RunningPod,
) -> None:
    async with web_ui(pod.url) as ui:
        await ui.start(workload="nothing")
        data = await eventually(lambda: _problem(ui), within_s=PATIENCE_S, every_s=0.2)
        await eventually(lambda: _is_stopped(ui), within_s=PATIENCE_S, every_s=0.2)
        await ui.start(workload="zipf", rate=40, requests=20)
        after = await until_stopped(ui)

    assert "no workload 'nothing'" in data["problem"]
    assert after["problem"] == ""
    assert after["figures"]["whole"]["sent"] == after["num_requests"]


async def _problem(ui: Ui) -> dict[str, Any] | None:
    data = await ui.data()
    return data if data["problem"] else None


async def _is_stopped(ui: Ui) -> bool:
    return bool((await ui.data())["state"] == "stopped")


async def test_a_second_test_works_with_workers_as_well(pod: RunningPod) -> None:
    async with web_ui(pod.url, *with_workers(2)) as ui:
        await eventually(lambda: _has_workers(ui, 2), within_s=PATIENCE_S, every_s=0.2)
        await ui.start(rate=40, requests=60)
        first = await until_stopped(ui)
        await eventually(lambda: _has_workers(ui, 4), within_s=PATIENCE_S, every_s=0.2)
        await ui.start(rate=40, requests=30)
        await eventually(lambda: _is_another(ui, first), within_s=PATIENCE_S)
        second = await until_stopped(ui)

    for data in (first, second):
        assert data["words"] == []
        assert data["figures"]["whole"]["sent"] == data["num_requests"]


async def _has_workers(ui: Ui, num: int) -> bool:
    return ui.process.log.count("reported as ready") == num


# --- in a browser ---------------------------------------------------------------------------


def endpoint(name: str, *, pending: dict[str, int], gpu: list[str]) -> dict[str, Any]:
    return {
        "address": "127.0.0.1:1",
        "name": name,
        "registered": sorted({*ADAPTERS, *gpu}),
        "gpu_adapters": gpu,
        "cpu_adapters": ["legal"],
        "pending_by_adapter": pending,
        "num_in_flight": sum(pending.values()),
        "num_waiting": 3,
    }


@asynccontextmanager
async def router_admin() -> AsyncIterator[str]:
    """An admin port with two pods."""
    endpoints = [
        endpoint("pod-1", pending={"support-de": 4, "legal": 1}, gpu=["support-de", "legal"]),
        endpoint("pod-2", pending={"support-en": 2}, gpu=["support-en", "<b>sly</b>"]),
    ]

    async def snapshot(_: web.Request) -> web.Response:
        return web.json_response({"endpoints": endpoints})

    app = web.Application()
    app.router.add_get("/debug/snapshot", snapshot)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as started:
        yield started


DRAWN = "document.querySelectorAll('svg path').length === 1 && document.body.dataset.sent > 20"


async def text_of(page: Page, selector: str) -> str:
    text: str = await page.evaluate(f"document.querySelector({selector!r}).innerText")
    return text


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 900, "light"), (390, 1900, "dark")])
async def test_the_page_shows_a_running_test(
    pod: RunningPod,
    browser: Browser,
    tmp_path: Path,
    width: int,
    height: int,
    scheme: Scheme,
) -> None:
    async with router_admin() as admin, web_ui(pod.url, "--router-admin", admin) as ui:
        await ui.start(rate=20, requests=400)
        page = await browser.open(f"{ui.url}/extproc", width=width, height=height, scheme=scheme)
        await page.wait_for(DRAWN)
        await page.screenshot(tmp_path / "page.png")
        tiles = await text_of(page, "#tiles")
        heat = await text_of(page, "#heat")
        overflow = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

        assert page.problems == []

    assert (tmp_path / "page.png").stat().st_size > 10_000
    for name in (
        "requests sent",
        "in flight",
        "met the SLO",
        "failed",
    ):
        assert name in tiles
    assert "pod-2" in heat
    assert "<b>sly</b>" in heat
    assert overflow <= 0


async def test_without_a_router_the_page_counts_answers_by_pod(
    pod: RunningPod, browser: Browser
) -> None:
    async with web_ui(pod.url, "--router-admin", "http://127.0.0.1:1") as ui:
        await ui.start(rate=30, requests=60)
        page = await browser.open(f"{ui.url}/extproc", width=1280, height=900)
        await page.wait_for(DRAWN)
        words = await text_of(page, "#words")
        heat = await text_of(page, "#heat")

        assert page.problems == []

    assert "--router-admin: http://127.0.0.1:1/debug/snapshot: Cannot connect" in words
    assert all(name in heat for name in ("pod-1", "legal"))


async def test_locust_s_own_page_has_a_link_to_ours_and_the_options(
    pod: RunningPod, browser: Browser
) -> None:
    async with web_ui(pod.url) as ui:
        page = await browser.open(ui.url, width=1280, height=900)
        await page.wait_for("document.querySelector('#root').innerText.includes('START')")
        link = await page.evaluate("document.querySelector('a[href=\"extproc\"]').href")
        html = await page.evaluate("document.documentElement.outerHTML")

    assert link == f"{ui.url}/extproc"
    assert all(name in html for name in ("router_admin", "workload", "ignore_eos"))
