"""The demo's last part: an adapter is registered, used, updated and removed."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from rich.console import Console

from extproc.commands.demo.demofleet import fake_pods, start
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
                await _tell(console, admin, gateway)
        finally:
            await stack.close()


def _declared(version: int) -> Mapping[str, str]:
    source = f"/adapters/{NAME}-{version}"
    return {"name": NAME, "source": source, "version": str(version), "load": "lazy"}


async def _tell(
    console: Console, admin: aiohttp.ClientSession, gateway: aiohttp.ClientSession
) -> None:
    """Print each request, repeat it until it gets the wanted answer, and print that."""
    console.print("\nAn adapter's life, on two new pods that have none")
    all_adapters, own = ("POST", "v1/adapters"), f"v1/adapters/{NAME}"
    use, prompt = ("POST", "v1/completions"), {"model": NAME, "prompt": "hi"}
    tag = ""
    for what, wanted, http, method, path, body in (
        ("registered", "201", admin, *all_adapters, _declared(1)),
        ("used; the request waits for the load", f"200 {NAME}@1", gateway, *use, prompt),
        ("on pods", f"200 {NAME}@1", admin, "GET", own, None),
        ("updated", "200", admin, *all_adapters, _declared(2)),
        ("used", f"200 {NAME}@2", gateway, *use, prompt),
        ("version 1 unloaded after its last request", f"200 {NAME}@2", admin, "GET", own, None),
        ("removed", "204", admin, "DELETE", own, None),
        ("no longer there", "404", gateway, *use, prompt),
    ):
        console.print(method, f"/{path}", json.dumps(body) if body else "")
        started_s, found = asyncio.get_running_loop().time(), "no answer"
        headers = {"if-match": tag} if what == "updated" else None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with http.request(method, path, json=body, headers=headers) as answer:
                        found = _excerpt(answer, await answer.text())
                    if found == wanted:
                        break
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise StackError(f"{what}: {found}, not {wanted}") from None
        took_s = asyncio.get_running_loop().time() - started_s
        console.print(f"  {what}: {found}, {took_s:.2f} s", style="green")
        tag = answer.headers.get("etag", "")


def _excerpt(answer: aiohttp.ClientResponse, text: str) -> str:
    """Return the status and which version served; of an adapter, which versions pods have."""
    versions = [answer.headers.get("x-served-model", "")]
    if answer.method == "GET" and answer.status == 200:
        listed = json.loads(text)["status"]["versions"]
        versions = sorted(each["name"] for each in listed if each["ready"])
    return " ".join([str(answer.status), *versions]).strip()
