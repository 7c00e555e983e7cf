"""A real browser for tests: headless chromium, driven over its DevTools protocol.

    async with running_browser() as browser:
        page = await browser.open("http://127.0.0.1:9090/", width=400, scheme="dark")
        await page.wait_for("document.querySelectorAll('tr').length > 2")
        await page.screenshot(tmp_path / "page.png")
        assert page.problems == []

It resolves no names but loopback's, so that nothing can leave this machine, and what a page tries
to fetch from elsewhere is told in `Page.problems`.
Source: chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.e2e.harness import ChildProcess

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 30.0
POLL_S = 0.05
_MAX_MESSAGE_BYTES = 64 * 2**20  # a screenshot of a long page comes in one message
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--no-proxy-server", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    "--remote-debugging-port=0",
)

Values = dict[str, Any]
Scheme = Literal["light", "dark"]


class BrowserError(Exception):
    """A page's script failed, a page cannot be opened, or the browser is gone."""


def find_chromium() -> str | None:
    """The browser's program on PATH, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Start a browser with a profile of its own; end it and remove its files.

    Skips the test where there is no chromium.
    """
    program = find_chromium()
    if program is None:
        pytest.skip(f"no browser on PATH: {', '.join(NAMES)} (Debian: apt-get install chromium)")
    process = ChildProcess("browser")
    profile = process.dir / "profile"
    # A home of its own: it would write its crash reports into the user's.
    folders = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(process.dir))
    try:
        process.spawn([program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"], folders)
        url = await _devtools_url(process, profile / "DevToolsActivePort")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, max_msg_size=_MAX_MESSAGE_BYTES) as socket,
        ):
            browser = Browser(socket)
            try:
                yield browser
            finally:
                await browser.close()
        await process.wait(PATIENCE_S)
        await _wait_until_gone(str(process.dir))
    finally:
        await process.close()


async def _devtools_url(process: ChildProcess, path: Path) -> str:
    """Where it listens, once it does.

    Raises:
        AssertionError: It ended, or did not come up; with its log.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            assert process.returncode is None, f"the browser has ended: {process.log[-4000:]}"
            await asyncio.sleep(POLL_S)


async def _wait_until_gone(mark: str) -> None:
    """Its helpers end by themselves once it is gone, a moment later."""
    async with asyncio.timeout(PATIENCE_S):
        while processes_of(mark):
            await asyncio.sleep(POLL_S)


def processes_of(mark: str) -> list[int]:
    """Processes whose command line names `mark`, such as a profile's folder."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in command:
                found.append(int(folder.name))
    return found


class Browser:
    """A running browser, at the other end of `socket`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Values]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 800,
        scheme: Scheme = "light",
        reduced_motion: bool = False,
    ) -> Page:
        """Open a page in a tab of its own, `width` x `height` CSS pixels, and wait for its load.

        Below 600 pixels it is a phone: touch, two device pixels a CSS pixel.

        Raises:
            BrowserError: It cannot be fetched.
        """
        target = (await self.call("Target.createTarget", {"url": "about:blank"}))["targetId"]
        attach = {"targetId": target, "flatten": True}
        page = Page(self, (await self.call("Target.attachToTarget", attach))["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.set_size(width, height)
        await page.set_media(scheme=scheme, reduced_motion=reduced_motion)
        await page.go(url)
        return page

    async def call(self, method: str, params: Values | None = None, session: str = "") -> Values:
        """One command of the protocol.

        Raises:
            BrowserError: It was refused, or the browser is gone.
        """
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params or {}}
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._reader.done():
            raise BrowserError("the browser is gone")
        await self._socket.send_json({**message, "sessionId": session} if session else message)
        async with asyncio.timeout(PATIENCE_S):
            reply = await answer
        if "error" in reply:
            raise BrowserError(f"{method}: {reply['error'].get('message')}")
        result: Values = reply["result"]
        return result

    async def close(self) -> None:
        """Ask it to end."""
        if not self._reader.done():
            await self._socket.send_json({"id": next(self._ids), "method": "Browser.close"})
            await asyncio.wait([self._reader], timeout=PATIENCE_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            elif (page := self._pages.get(event.get("sessionId", ""))) is not None:
                page.take(event["method"], event["params"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"error": {"message": "the browser is gone"}})


class Page:
    """One tab.

    Attributes:
        problems: What went wrong, in words: errors on the console, exceptions, requests that
            failed or were answered with an error, requests to anything but loopback.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self.session = session
        self.problems: list[str] = []
        self._browser = browser
        self._has_loaded = asyncio.Event()
        self._urls: dict[str, str] = {}

    async def call(self, method: str, params: Values | None = None) -> Values:
        """One command of the protocol, for this tab.

        Raises:
            BrowserError: It was refused, or the browser is gone.
        """
        return await self._browser.call(method, params, self.session)

    async def go(self, url: str) -> None:
        """Fetch another page.

        Raises:
            BrowserError: It cannot be fetched.
        """
        self._has_loaded.clear()
        answer = await self.call("Page.navigate", {"url": url})
        if error := answer.get("errorText"):
            raise BrowserError(f"{url}: {error}")
        async with asyncio.timeout(PATIENCE_S):
            await self._has_loaded.wait()

    async def set_size(self, width: int, height: int) -> None:
        """Change the window, CSS pixels."""
        is_phone = width < 600
        metrics = {"width": width, "height": height, "mobile": is_phone}
        metrics["deviceScaleFactor"] = 2 if is_phone else 1
        await self.call("Emulation.setDeviceMetricsOverride", metrics)

    async def set_media(self, *, scheme: Scheme, reduced_motion: bool = False) -> None:
        """Change what the page learns of its user's wishes."""
        wishes = {
            "prefers-color-scheme": scheme,
            "prefers-reduced-motion": "reduce" if reduced_motion else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        await self.call("Emulation.setEmulatedMedia", {"features": features})

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it gives; plain values only.

        Raises:
            BrowserError: It threw.
        """
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = await self.call("Runtime.evaluate", asked)
        if details := answer.get("exceptionDetails"):
            raise BrowserError(_exception(details))
        return answer["result"].get("value")

    async def wait_for(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an expression holds.

        Raises:
            AssertionError: It did not within `timeout_s`; tells what the page shows instead.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._holds(condition):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = await self.evaluate("document.body ? document.body.innerText : ''")
            raise AssertionError(
                f"not within {timeout_s:g} s: {condition}\nproblems: {self.problems}\n{text[:3000]}"
            ) from None

    async def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        """Write what the page looks like as PNG: all of it, or what its window shows."""
        asked: Values = {"format": "png", "captureBeyondViewport": is_whole}
        if is_whole:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            asked["clip"] = {**size, "scale": 1}
        image = (await self.call("Page.captureScreenshot", asked))["data"]
        path.write_bytes(base64.b64decode(image))

    def take(self, method: str, params: Values) -> None:
        """An event of the protocol."""
        match method:
            case "Page.loadEventFired":
                self._has_loaded.set()
            case "Runtime.exceptionThrown":
                self.problems.append(_exception(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                words = (str(each.get("value", each.get("description"))) for each in params["args"])
                self.problems.append(f"console: {' '.join(words)}")
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.problems.append(f"log: {entry['text']} {entry.get('url', '')}".strip())
            case "Network.requestWillBeSent":
                self._on_request(params["requestId"], params["request"]["url"])
            case "Network.loadingFailed" if not params.get("canceled"):
                url = self._urls.get(params["requestId"], "a request")
                self.problems.append(f"failed: {url}: {params['errorText']}")
            case "Network.responseReceived" if params["response"]["status"] >= 400:
                response = params["response"]
                self.problems.append(f"status {response['status']}: {response['url']}")

    def _on_request(self, number: str, url: str) -> None:
        self._urls[number] = url
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in _LOOPBACK:
            self.problems.append(f"left this machine: {url}")

    async def _holds(self, condition: str) -> bool:
        try:
            return bool(await self.evaluate(f"!!({condition})"))
        except BrowserError as error:
            if "context" in str(error):  # the page is just being replaced by another
                return False
            raise


def _exception(details: Values) -> str:
    thrown = details.get("exception", {})
    return f"exception: {thrown.get('description') or thrown.get('value') or details['text']}"
