"""A real browser for tests: Debian's chromium, driven by playwright.

    async with running_browser() as browser:
        page = await browser.open("http://127.0.0.1:9090/", width=400, scheme="dark")
        await page.wait_for("document.querySelectorAll('tr').length > 2")
        await page.screenshot(tmp_path / "page.png")
        assert page.problems == []

It resolves no names but loopback's, so that nothing can leave this machine; requests of a page to
other hosts are listed in `Page.problems`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright import async_api

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
_POLL_MS = 50
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FLAGS = (
    *("--disable-gpu", "--disable-quic", "--no-proxy-server"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)

Scheme = Literal["light", "dark"]


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """A browser with a profile of its own. Skips the test where there is none."""
    playwright = pytest.importorskip("playwright.async_api")
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser on PATH: {', '.join(NAMES)} (Debian: apt-get install chromium)")
    # A home of its own: it would write its crash reports into the user's.
    with tempfile.TemporaryDirectory(prefix="extproc-browser-", ignore_cleanup_errors=True) as home:
        env = {**os.environ, **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), home)}
        async with playwright.async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=program, args=_FLAGS, env=env)
            try:
                yield Browser(browser)
            finally:
                await browser.close()


class Browser:
    """A running browser."""

    def __init__(self, browser: async_api.Browser) -> None:
        self._browser = browser

    async def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 800,
        scheme: Scheme = "light",
        reduced_motion: bool = False,
    ) -> Page:
        """Open a page in a window of its own, `width` x `height` CSS pixels.

        Below 600 pixels it is a phone: touch, two device pixels a CSS pixel.
        """
        is_phone = width < 600
        context = await self._browser.new_context(
            viewport={"width": width, "height": height},
            is_mobile=is_phone,
            has_touch=is_phone,
            device_scale_factor=2 if is_phone else 1,
            color_scheme=scheme,
            reduced_motion="reduce" if reduced_motion else "no-preference",
        )
        page = Page(await context.new_page())
        await page.go(url)
        return page


class Page:
    """One tab.

    Attributes:
        problems: Errors on the console, exceptions, requests that
            failed or were answered with an error, requests to anything but loopback.
    """

    def __init__(self, page: async_api.Page) -> None:
        self.problems: list[str] = []
        self._page = page
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", self._on_request)
        page.on("requestfailed", self._on_failure)
        page.on("response", self._on_response)

    async def go(self, url: str) -> None:
        """Open another page."""
        await self._page.goto(url)

    async def set_size(self, width: int, height: int) -> None:
        """Change the window, CSS pixels."""
        await self._page.set_viewport_size({"width": width, "height": height})

    async def fill(self, selector: str, text: str) -> None:
        """Type into a field."""
        await self._page.locator(selector).fill(text)

    async def evaluate(self, script: str) -> Any:
        """Return the plain value of an expression, or of its promise."""
        return await self._page.evaluate(script)

    async def wait_for(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an expression holds.

        Raises:
            AssertionError: It did not within `timeout_s`; with the text of the page.
        """
        try:
            # A function: an expression would be evaluated again each time, and a page's policy may
            # forbid that.
            await self._page.wait_for_function(
                f"() => !!({condition})", timeout=1000 * timeout_s, polling=_POLL_MS
            )
        except Exception as error:
            text = await self.evaluate("document.body ? document.body.innerText : ''")
            raise AssertionError(f"{error}\nproblems: {self.problems}\n{text[:3000]}") from None

    async def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        await self._page.screenshot(path=path, full_page=True)

    def _on_console(self, message: async_api.ConsoleMessage) -> None:
        if message.type in ("error", "assert"):
            self.problems.append(f"console: {message.text}")

    def _on_request(self, request: async_api.Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in _LOOPBACK:
            self.problems.append(f"left this machine: {request.url}")

    def _on_failure(self, request: async_api.Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # cancelled by the page
            self.problems.append(f"failed: {request.url}: {request.failure}")

    def _on_response(self, response: async_api.Response) -> None:
        if response.status >= 400:
            self.problems.append(f"status {response.status}: {response.url}")
