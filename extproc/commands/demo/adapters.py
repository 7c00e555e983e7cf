"""The demo's last part: an adapter is registered, used, rolled and removed."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from rich.console import Console

from extproc.commands.demo.fleet import fake_pods, start
from extproc.stack.processes import StackError
from extproc.stack.stack import Stack

NAME = "customer-17"
PATIENCE_S = 30.0
_PAUSE_S = 0.1


async def show_life(console: Console, slots: int) -> None:
    """Print each request and what came of it, on pods, a router and an Envoy of their own.

    Raises:
        StackError: Something does not start, or an answer is not as it should be.
        aiohttp.ClientError: The router or Envoy does not answer.
    """
    stack, token = Stack(), secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="extproc-demo-") as folder:
        store, token_file = Path(folder) / "store", Path(folder) / "token"
        store.mkdir()
        token_file.touch(mode=0o600)
        token_file.write_text(token, encoding="ascii")
        config = {
            "store": {"directory": {"path": str(store)}},
            "registration": {"token_file": str(token_file)},
        }
        try:
            await start(stack, fake_pods(2, slots, adapters=()), slots, {"adapters": config})
            headers = {"authorization": f"Bearer {token}"}
            async with (
                aiohttp.ClientSession(f"{stack.routers[0].admin_url}/", headers=headers) as admin,
                aiohttp.ClientSession(f"{stack.url}/") as gateway,
            ):
                await _Life(console, admin, gateway).tell()
        finally:
            await stack.close()


class _Life:
    def __init__(
        self, console: Console, admin: aiohttp.ClientSession, gateway: aiohttp.ClientSession
    ) -> None:
        self._console = console
        self._admin = admin
        self._gateway = gateway

    async def tell(self) -> None:
        self._console.print("\nAn adapter's life, on two new pods that have none")
        await self._declare("registered", "201", version=1)
        await self._use("used; the request waits for the load", f"200 {NAME}@1")
        tag = (await self._look("on pods", f"200 {NAME}@1")).get("etag", "")
        await self._declare("rolled", "200", version=2, headers={"if-match": tag})
        await self._use("used", f"200 {NAME}@2")
        await self._look("version 1 unloaded after its last request", f"200 {NAME}@2")
        await self._ask(self._admin, "removed", "204", "DELETE", f"v1/adapters/{NAME}")
        await self._use("not there any more", "404")

    async def _declare(
        self, what: str, wanted: str, *, version: int, headers: Mapping[str, str] | None = None
    ) -> None:
        source = f"/adapters/{NAME}-{version}"
        body = {"name": NAME, "source": source, "version": str(version), "load": "lazy"}
        await self._ask(self._admin, what, wanted, "POST", "v1/adapters", body, headers)

    async def _use(self, what: str, wanted: str) -> None:
        body = {"model": NAME, "prompt": "hi"}
        await self._ask(self._gateway, what, wanted, "POST", "v1/completions", body)

    async def _look(self, what: str, wanted: str) -> Mapping[str, str]:
        return await self._ask(self._admin, what, wanted, "GET", f"v1/adapters/{NAME}")

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        what: str,
        wanted: str,
        method: str,
        path: str,
        body: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, str]:
        """Print a request, repeat it until it is answered with what is wanted, and print that."""
        self._console.print(method, f"/{path}", json.dumps(body) if body else "")
        started_s, found = asyncio.get_running_loop().time(), "no answer"
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with http.request(method, path, json=body, headers=headers) as answer:
                        text = await answer.text()
                    if (found := _excerpt(answer, text)) == wanted:
                        break
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise StackError(f"{what}: {found}, not {wanted}") from None
        took_s = asyncio.get_running_loop().time() - started_s
        self._console.print(f"  {what}: {found}, {took_s:.2f} s", style="green")
        return answer.headers


def _excerpt(answer: aiohttp.ClientResponse, text: str) -> str:
    """Return the status and which version served; of an adapter, which versions pods have."""
    versions = [answer.headers.get("x-served-model", "")]
    if answer.method == "GET" and answer.status == 200:
        listed = json.loads(text)["status"]["versions"]
        versions = sorted(each["name"] for each in listed if each["ready"])
    return " ".join([str(answer.status), *versions]).strip()
