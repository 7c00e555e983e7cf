"""The live page in a real browser, of a real router with fake pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc import aio

from extproc.lab.fakepod.podserver import PodConfig, RunningPod, start_pod
from extproc.observe.livepage import FEED_PATH, MAX_VIEWERS
from tests import clients
from tests.browser import Browser, Page, running_browser
from tests.e2e.harness import RouterProcess
from tests.waiting import beside

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ADAPTERS = [f"customer-{number:02}" for number in range(1, 41)]
HOSTILE = '<img src=x onerror="document.title=1"><script>alert(1)</script>'
LIVE = "document.getElementById('feed').textContent === 'live'"
FITS = "document.documentElement.scrollWidth <= innerWidth"


class Scene:
    """A router, its pods, a browser, and requests that a test makes."""

    def __init__(self, router: RouterProcess, pods: list[RunningPod], browser: Browser) -> None:
        self.router = router
        self.pods = pods
        self._browser = browser

    async def open(self, until: str = LIVE, **options: Any) -> Page:
        page = await self._browser.open(f"{self.router.admin_url}/", **options)
        await page.wait_for(until)
        return page

    async def route(self, *models: str) -> list[clients.Routed]:
        async with aio.insecure_channel(self.router.address) as channel:
            return [await clients.route(channel, model) for model in models]


@asynccontextmanager
async def showing(
    num_pods: int = 2,
    adapters: Sequence[str] = ADAPTERS,
    policy: str = "least_harm",
    shadow: dict[str, Any] | None = None,
) -> AsyncIterator[Scene]:
    pods = [
        await start_pod(PodConfig(name=f"pod-{n}", adapters=list(adapters), max_loras=2))
        for n in range(1, num_pods + 1)
    ]
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    config = {
        "discovery": {"static": static},
        "policy": {"name": policy, "shadow": shadow},
        "scrape": {"expiry_s": 1.0},
        "completions": {"source": "access_log", "lost_after_s": 600},
    }
    try:
        async with RouterProcess(config) as router, running_browser() as browser:
            yield Scene(router, pods, browser)
    finally:
        for pod in pods:
            await pod.stop()


def text_of(selector: str) -> str:
    return f"[...document.querySelectorAll('{selector}')].map(e => e.textContent).join('|')"


async def test_pods_activity_and_reasons_appear_and_a_dead_pod_is_shown() -> None:
    async with showing() as scene:
        page = await scene.open()
        await page.wait_for("document.querySelectorAll('#pods tbody tr').length === 2")
        assert "✓ up" in await page.evaluate(text_of("#pods .state"))
        assert await page.evaluate(text_of("#health")) == "ready"
        assert (await page.evaluate(text_of("#slo-note"))).startswith("Not known: no access log")

        (pick,) = await scene.route("customer-07")
        chosen = next(pod for pod in scene.pods if pod.address == pick.destination)
        await page.wait_for(
            f"document.querySelector('#heat td.active[title^=\"customer-07 on {chosen.name}: 1\"]')"
        )
        await page.wait_for(
            f"{text_of('#decisions .what')}.includes('customer-07 → {chosen.name}')"
        )
        assert (await page.evaluate(text_of("#decisions .text"))).startswith(
            f"{chosen.name}: customer-07 is not loaded there, where a slot is free: "
            "the least harm by estimate, 0 pending, 0 elsewhere. Its score is "
        )

        await scene.route("nobody")
        await page.wait_for(f"{text_of('#decisions .rejected')}.includes('Rejected with 404')")
        assert page.problems == []

        await scene.pods[0].stop()
        await page.wait_for(f"{text_of('#pods tr.bad')}.includes('✕ unreachable')")
        await page.wait_for("document.querySelector('#heat thead th.bad')")
        assert "pod-1" in await page.evaluate(text_of("#pods tr.bad th"))


@pytest.mark.long
async def test_what_is_held_is_shown_with_its_adapters_as_long_as_it_is() -> None:
    async with showing(policy="tests.e2e.room:Room") as scene:
        page = await scene.open()
        await page.wait_for(
            f"{text_of('#queue-note')} === 'No request is held: there is room for all.'"
        )
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(scene.route("customer-07"))
            await page.wait_for(f"{text_of('#num-held')} === '1 of at most 20000'")
            await page.wait_for(
                f"{text_of('#queue-note')}.endsWith('Adapters needed next: customer-07.')"
            )
            rows = await page.evaluate(text_of("#queue tbody tr > *"))
            held.cancel()
        await page.wait_for(f"{text_of('#num-held')} === '0 of at most 20000'")

        assert rows == "no route|0|1"
        assert page.problems == []


async def test_a_policy_in_shadow_is_shown_with_its_answers_by_adapter() -> None:
    shadow = {"name": "least_pending", "share": 1.0, "cpu_budget": 1.0}
    async with showing(shadow=shadow) as scene:
        page = await scene.open()
        async with beside(asked_again(scene)):
            await page.wait_for(f"{text_of('#shadow-note')}.includes('agree with the policy')")
            await page.wait_for(f"{text_of('#shadow tbody tr > *')}.startsWith('customer-07|')")
        assert await page.evaluate(text_of("#shadow-policy")) == "least_pending"
        assert page.problems == []


async def asked_again(scene: Scene) -> None:
    while True:
        await scene.route("customer-07")
        await asyncio.sleep(0.05)


async def test_when_the_router_is_gone_it_says_so_and_recovers_by_itself() -> None:
    async with showing() as scene:
        page = await scene.open()
        await scene.route(*ADAPTERS[:3])
        await page.wait_for("document.querySelectorAll('#decisions li').length === 3")

        await scene.router.kill()
        await page.wait_for(
            "document.getElementById('feed').textContent.startsWith('no updates for')"
        )
        assert await page.evaluate("document.body.classList.contains('stale')")
        assert await page.evaluate(text_of("#said")) == "no updates: the page is out of date"

        await scene.router.start()
        await page.wait_for(LIVE)
        await page.wait_for("document.querySelectorAll('#decisions li').length === 0")
        await scene.route("customer-02")
        await page.wait_for("document.querySelectorAll('#decisions li').length === 1")
        assert not await page.evaluate("document.body.classList.contains('stale')")


@pytest.mark.long
async def test_on_a_small_screen_nothing_is_wider_than_it() -> None:
    names = [f"{name}-with-a-name-that-is-rather-long" for name in ADAPTERS]
    async with showing(num_pods=6, adapters=names) as scene:
        page = await scene.open(width=400, height=800)
        await scene.route(*names[:8], "an-unknown-model-whose-name-has-no-place-to-break" * 3)
        await page.wait_for("document.querySelectorAll('#decisions li').length === 9")

        assert await page.evaluate(FITS)
        for width in (320, 700, 1000, 1600):
            await page.set_size(width, 800)
            assert await page.evaluate(FITS), width


def contrast(selector: str) -> str:
    """Of an element's text to what is behind it, as WCAG 2 computes it."""
    return f"""(() => {{
      const parse = (color) => {{
        const parts = color.match(/[\\d.]+/g).map(Number);
        const unit = color.startsWith('color(') ? 1 : 255;
        return [...parts.slice(0, 3).map((part) => part / unit), parts[3] ?? 1];
      }};
      const over = (top, below) =>
        top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
      const light = (color) => {{
        const [r, g, b] = color.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      }};
      return [...document.querySelectorAll({selector!r})].map((element) => {{
        const layers = [];
        for (let e = element; e; e = e.parentElement) {{
          layers.unshift(parse(getComputedStyle(e).backgroundColor));
        }}
        const back = layers.reduce((below, top) => over(top, below), [1, 1, 1]);
        const text = over(parse(getComputedStyle(element).color), back);
        const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      }});
    }})()"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_stands_out_in_either_scheme(scheme: str) -> None:
    async with showing(policy="least_pending") as scene:
        await scene.route(*ADAPTERS[:6], *ADAPTERS[:1] * 9, "nobody")
        page = await scene.open(scheme=scheme)
        await page.wait_for("document.querySelectorAll('#decisions li.rejected').length === 1")
        await scene.pods[0].stop()
        await page.wait_for("document.querySelector('#pods tr.bad')")
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(background.removeprefix("rgb(").split(",")[0])
        selectors = (
            "#about, .badge, .note, dt, dd span, th, td, .cell, .text, .what, .reason, .time, a"
        )
        ratios = await page.evaluate(contrast(selectors))

    assert (red > 128) == (scheme == "light")
    assert len(ratios) > 100
    assert min(ratios) >= 4.5


@pytest.mark.long
async def test_states_differ_without_their_colours() -> None:
    async with showing(num_pods=1, policy="least_pending") as scene:
        page = await scene.open()
        await scene.route(*ADAPTERS[:5])  # more than the pod has slots
        await page.wait_for("document.querySelectorAll('#heat td.active').length === 5")
        glyphs = await page.evaluate(
            "[...document.querySelectorAll('#legend .cell')].map(e => e.textContent)"
        )
        cells = await page.evaluate(
            "[...document.querySelectorAll('#heat td.active')].map(e =>"
            " [e.ariaLabel, getComputedStyle(e).borderTopStyle])"
        )

    assert glyphs == ["", "·", "○", "●", "3", "3", "?"]
    assert ["1 request, in a GPU slot", "solid"] in cells
    assert {style for said, style in cells if "GPU" not in said} == {"dashed"}


async def test_hostile_names_are_text() -> None:
    adapters = [HOSTILE, "'\"><svg onload=alert(1)>", "${alert(1)}"]
    async with showing(adapters=adapters) as scene:
        page = await scene.open()
        await scene.route(*adapters, f"{HOSTILE}-unknown")
        await page.wait_for("document.querySelectorAll('#decisions li').length === 4")
        shown = await page.evaluate(text_of("#heat tbody th"))
        decided = await page.evaluate(text_of("#decisions .text"))
        smuggled = await page.evaluate(
            "document.querySelectorAll('main :is(img, script, [onload], [onerror])').length"
        )
        title = await page.evaluate("document.title")

    assert set(shown.split("|")) == set(adapters)
    assert f"`{HOSTILE}-unknown` does not exist" in decided
    assert (smuggled, title) == (0, "extproc")
    assert page.problems == []


async def test_the_policy_of_the_port_keeps_injected_scripts_from_running() -> None:
    """Were a name ever taken for HTML, it still could not run."""
    async with showing(num_pods=1) as scene:
        page = await scene.open()
        await page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=/x onerror=\"hacked = 1\">')"
        )
        await page.wait_for("performance.getEntriesByName(location.origin + '/x').length")

        assert await page.evaluate("typeof hacked") == "undefined"
        assert any("Content Security Policy" in problem for problem in page.problems)


@pytest.mark.long
async def test_many_adapters_are_cut_and_the_filter_finds_the_rest() -> None:
    async with showing() as scene:
        page = await scene.open()
        await scene.route("customer-40")
        await page.wait_for(f"{text_of('#heat tbody th')}.startsWith('customer-40')")
        assert await page.evaluate("document.querySelectorAll('#heat tbody tr').length") == 25
        assert await page.evaluate(text_of("#more-adapters")) == "and 15 more"

        await page.evaluate(
            "(() => { const f = document.getElementById('filter'); f.value = 'R-39';"
            " f.dispatchEvent(new Event('input')); })()"
        )
        assert await page.evaluate(text_of("#heat tbody th")) == "customer-39"

        await page.evaluate(
            "(() => { const f = document.getElementById('filter'); f.value = '';"
            " f.dispatchEvent(new Event('input'));"
            " document.getElementById('more-adapters').click(); })()"
        )
        assert await page.evaluate("document.querySelectorAll('#heat tbody tr').length") == 40


@pytest.mark.long
async def test_the_filter_is_for_the_decisions_too() -> None:
    async with showing() as scene:
        page = await scene.open()
        await scene.route(*ADAPTERS[:4])
        await page.wait_for("document.querySelectorAll('#decisions li').length === 4")
        await page.evaluate(
            "(() => { const f = document.getElementById('filter'); f.value = 'R-03';"
            " f.dispatchEvent(new Event('input')); })()"
        )

        assert (await page.evaluate(text_of("#decisions .what"))).startswith("customer-03 → pod-")
        assert await page.evaluate("document.querySelectorAll('#decisions li').length") == 1


@pytest.mark.long
async def test_on_a_phone_a_decision_is_a_line_that_a_click_opens() -> None:
    height = "document.querySelector('#decisions li').offsetHeight"
    async with showing(num_pods=4) as scene:
        page = await scene.open(width=400, height=800)
        await scene.route(*ADAPTERS[:20])
        await page.wait_for("document.querySelectorAll('#decisions li').length === 12")
        closed = await page.evaluate(height)
        whole = await page.evaluate("document.documentElement.scrollHeight")
        await page.evaluate("document.querySelector('#decisions summary').click()")
        opened = await page.evaluate(height)

    assert closed < 40
    assert opened > 2 * closed
    assert whole < 3500


@pytest.mark.long
async def test_tiles_fill_their_rows() -> None:
    async with showing(num_pods=1) as scene:
        page = await scene.open(width=1200)
        tops = "[...document.querySelectorAll('#tiles > div')].map(e => e.offsetTop)"
        for width in (400, 1200):
            await page.set_size(width, 800)
            found = await page.evaluate(tops)
            assert len({found.count(top) for top in found}) == 1, width


@pytest.mark.long
async def test_a_hidden_tab_disconnects_and_comes_back_when_seen() -> None:
    hide = (
        "(value) => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    async with showing(num_pods=1) as scene:
        page = await scene.open()
        await page.evaluate(f"({hide})(true)")
        assert await page.evaluate(text_of("#feed")) == "paused"
        assert await page.evaluate("source") is None

        await page.evaluate(f"({hide})(false)")
        await page.wait_for(LIVE)


async def test_refused_for_too_many_viewers_the_page_says_so_and_takes_the_next_place() -> None:
    async with showing(num_pods=1) as scene, aiohttp.ClientSession() as http:
        url = f"{scene.router.admin_url}{FEED_PATH}"
        feeds = [await http.get(url) for _ in range(MAX_VIEWERS)]
        page = await scene.open(until="feed.textContent.startsWith('refused')")
        feeds[0].close()
        await page.wait_for(LIVE)
        for feed in feeds:
            feed.close()


async def test_hundreds_of_decisions_a_second_leave_it_going_and_bounded() -> None:
    async with showing() as scene:
        page = await scene.open()
        async with aio.insecure_channel(scene.router.address) as channel:

            async def send() -> None:
                while True:
                    await clients.route(channel, ADAPTERS[0])

            senders = [asyncio.ensure_future(send()) for _ in range(8)]
            try:
                await page.wait_for(f"{text_of('#decisions-note')}.includes('faster than')")
                first = await page.evaluate("frame.decisions[0].n")
                await page.wait_for(f"items.size && Math.min(...items.keys()) > {first} + 200")
                shown = await page.evaluate("document.querySelectorAll('#decisions li').length")
                kept = await page.evaluate("[items.size, heatRows.size]")
                live = await page.evaluate(LIVE)
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)

    assert shown == 12
    assert kept == [12, 25]
    assert live
    assert page.problems == []


@pytest.mark.long
async def test_it_looks_the_same_without_motion(tmp_path: Path) -> None:
    async with showing(num_pods=1) as scene:
        page = await scene.open(reduced_motion=True)
        moving = await page.evaluate(
            "[...document.querySelectorAll('*')].filter(e =>"
            " parseFloat(getComputedStyle(e).transitionDuration) > 0).length"
        )
        await page.screenshot(tmp_path / "page.png")

    assert moving == 0
    assert (tmp_path / "page.png").stat().st_size > 10_000
