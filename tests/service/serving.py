"""The whole service in one process, and the ways to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from grpc import aio

from extproc.config.file import parse_config
from extproc.lab.fakepod.pod import RunningPod
from extproc.service.app import App
from extproc.service.routing import make_policy
from tests import clients
from tests.waiting import eventually

PATIENCE_S = 60.0


class Service:
    """A running App and the ways to it."""

    def __init__(self, app: App, channel: clients.Channel, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.channel = channel
        self._session = session

    async def admin(self, path: str) -> Any:
        async with self._session.get(f"http://{self.app.admin_address}{path}") as response:
            return await response.json(content_type=None)

    async def metric(self, name: str) -> float:
        async with self._session.get(f"http://{self.app.admin_address}/metrics") as response:
            text = await response.text()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)
        )

    async def metric_is(self, name: str, value: float) -> bool:
        return await self.metric(name) == value

    async def endpoints(self) -> list[dict[str, Any]]:
        """As `/debug/snapshot` shows them."""
        shown: list[dict[str, Any]] = (await self.admin("/debug/snapshot"))["endpoints"]
        return shown

    async def warnings(self) -> list[str]:
        """Those of `/healthz`."""
        said: list[str] = (await self.admin("/healthz"))["warnings"]
        return said

    async def is_ready(self) -> bool:
        return bool((await self.admin("/healthz"))["status"] == "ok")

    async def in_flight(self) -> int:
        return int(await self.metric("extproc_picks_in_flight"))


def configuration(running: list[RunningPod], **sections: Any) -> dict[str, Any]:
    return {
        "server": {"address": "127.0.0.1:0", "drain_timeout_s": 5},
        "admin": {"address": "127.0.0.1:0"},
        "discovery": {"static": [{"address": pod.address, "name": pod.name} for pod in running]},
        # The pods share this process with the test: a busy machine may keep them from answering.
        "scrape": {"expiry_s": 600, **sections.pop("scrape", {})},
        **sections,
    }


@asynccontextmanager
async def serving(config: dict[str, Any], path: Path | None = None) -> AsyncIterator[Service]:
    """A service that is ready."""
    async with starting(config, path) as service:
        await eventually(service.is_ready)
        yield service


@asynccontextmanager
async def starting(config: dict[str, Any], path: Path | None = None) -> AsyncIterator[Service]:
    """A service that listens."""
    text = yaml.safe_dump(config)
    if path is not None:
        path.write_text(text)
    parsed = parse_config(text)
    app = App(parsed, make_policy(parsed), path=path, text=text)
    run = asyncio.ensure_future(app.run())
    try:
        await eventually(lambda: app.admin_address or run.done())
        if run.done():
            run.result()
        async with (
            aio.insecure_channel(app.address) as channel,
            aiohttp.ClientSession() as session,
        ):
            yield Service(app, channel, session)
    finally:
        app.stop()
        await run
