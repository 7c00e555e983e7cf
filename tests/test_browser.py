"""The browser that tests use tells what a page shows and what went wrong on it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests import browser as browsers
from tests.browser import Browser, BrowserError, processes_of, running_browser

PAGE = """<!doctype html><title>Hello</title>
<meta name="viewport" content="width=device-width"><style>
body { margin: 0 } @media (prefers-color-scheme: dark) { body { background: rgb(1, 2, 3) } }
</style><p id="text">one</p>
<script>setTimeout(() => { document.getElementById("text").textContent = "two" }, 50)</script>"""
BROKEN = """<!doctype html><script>
console.error("first", 1); fetch("/absent"); fetch("http://example.test/x").catch(() => 0);
setTimeout(() => { throw new Error("second") }, 0)</script>"""


@pytest.fixture
async def site() -> AsyncIterator[str]:
    async def page(request: web.Request) -> web.Response:
        text = {"/": PAGE, "/broken": BROKEN}.get(request.path)
        if text is None:
            raise web.HTTPNotFound
        return web.Response(text=text, content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as started:
        yield started


async def test_a_page_is_shown_as_asked_for(browser: Browser, site: str, tmp_path: Path) -> None:
    page = await browser.open(f"{site}/", width=400, height=700, scheme="dark")
    await page.wait_for("document.getElementById('text').textContent === 'two'")
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    await page.screenshot(tmp_path / "page.png", is_whole=False)

    assert await page.evaluate("[innerWidth, innerHeight, document.title]") == [400, 700, "Hello"]
    assert background == "rgb(1, 2, 3)"
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert [each for each in page.problems if "favicon" not in each] == []


async def test_what_goes_wrong_on_a_page_is_told(browser: Browser, site: str) -> None:
    page = await browser.open(f"{site}/broken")
    wanted = ("console: first 1", "exception: Error: second", "status 404", "left this machine")
    async with asyncio.timeout(browsers.PATIENCE_S):
        while not all(any(each in problem for problem in page.problems) for each in wanted):
            await asyncio.sleep(browsers.POLL_S)


async def test_a_script_that_throws_and_a_page_that_is_not_there_are_errors(
    browser: Browser, site: str
) -> None:
    page = await browser.open(f"{site}/")

    with pytest.raises(BrowserError, match="no such thing"):
        await page.evaluate("(() => { throw new Error('no such thing') })()")
    with pytest.raises(BrowserError, match="net::ERR"):
        await browser.open("http://127.0.0.1:1/")
    with pytest.raises(AssertionError, match="2 > 3"):
        await page.wait_for("2 > 3", timeout_s=0.2)


async def test_it_leaves_neither_processes_nor_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with running_browser():
        assert processes_of(str(tmp_path))

    assert processes_of(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


async def test_without_a_browser_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    with pytest.raises(pytest.skip.Exception, match="no browser on PATH"):
        async with running_browser():
            pass
