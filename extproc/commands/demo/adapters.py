"""The demo's last part: an adapter is registered, used, rolled and removed with curl."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from extproc.commands.demo.fleet import start_registering
from extproc.stack.processes import StackError
from extproc.stack.stack import Stack

NAME = "customer-17"
PATIENCE_S = 10.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What `curl -si` printed: the status, the headers by lower-case name, and the body."""

    status: int
    headers: dict[str, str]
    body: str


def settings(folder: Path) -> dict[str, Any]:
    """Return the router's settings for a store and a token, both in an empty folder."""
    store, token = folder / "store", folder / "token"
    store.mkdir()
    token.touch(mode=0o600)
    token.write_text(f"{secrets.token_urlsafe()}\n")
    return {
        "store": {"directory": {"path": str(store)}},
        "registration": {"token_file": str(token)},
    }


async def show(console: Console, slots: int) -> None:
    """Print each command and what came of it, on pods, a router and an Envoy of their own.

    Raises:
        StackError: An answer is not what it should be within `PATIENCE_S`.
    """
    if shutil.which("curl") is None:
        console.print("\nNo curl on PATH: registering an adapter is not shown.")
        return
    stack = Stack()
    with tempfile.TemporaryDirectory(prefix="extproc-demo-") as name:
        folder = Path(name)
        try:
            await start_registering(stack, slots, settings(folder))
            await _Story(console, stack, folder).tell()
        finally:
            await stack.close()


class _Story:
    def __init__(self, console: Console, stack: Stack, folder: Path) -> None:
        self._console = console
        url = f"{stack.routers[0].admin_url}/v1/adapters"
        token = f'-H "Authorization: Bearer $(cat {folder / "token"})"'
        self._declare = f"curl -si {token} \\\n  {url}"
        self._one = f"curl -si {token} \\\n  {url}/{NAME}"
        self._use = (
            f"curl -si {stack.url}/v1/completions -H 'content-type: application/json' \\\n"
            f'  -d \'{{"model": "{NAME}", "prompt": "hi", "max_tokens": 1}}\''
        )

    async def tell(self) -> None:
        self._say(
            "\n[bold]Adapters as a service[/bold]\nTwo new pods have no adapter. Register one:"
        )
        await self._until(
            f"{self._declare} \\\n  -d '{_body(1)}'", lambda found: found.status == 201
        )
        self._say("Use it through Envoy: the first request waits until a pod has loaded it.")
        await self._until(self._use, _serves(1))
        self._say("Roll it to version 2. If-Match has the ETag of what is declared:")
        tag = (await _curl(self._one)).headers.get("etag", "")
        rolled = f"{self._declare} -H 'If-Match: {tag}' \\\n  -d '{_body(2)}'"
        await self._until(rolled, lambda found: found.status == 200)
        await self._until(self._use, _serves(2))
        self._say("What pods have of it; the old version is unloaded after its last request:")
        await self._until(self._one, _has_only(2))
        self._say("Remove it, and nobody gets it any more:")
        await self._until(f"{self._one} -X DELETE", lambda found: found.status == 204)
        await self._until(self._use, lambda found: found.status == 404)

    def _say(self, text: str) -> None:
        self._console.print(text)

    async def _until(self, command: str, is_right: Callable[[Answer], bool]) -> None:
        """Print a command, run it until its answer is right, and print that."""
        self._console.print(f"$ {command}", soft_wrap=True, markup=False)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while not is_right(found := await _curl(command)):
            if loop.time() > start_s + PATIENCE_S:
                raise StackError(f"unexpected, {found.status}: {found.body}")
            await asyncio.sleep(_PAUSE_S)
        self._console.print(
            f"{_excerpt(found)}, {loop.time() - start_s:.2f} s", style="green", markup=False
        )


def _body(version: int) -> str:
    source = f"/adapters/{NAME}-{version}"
    return json.dumps({"name": NAME, "source": source, "version": str(version), "load": "lazy"})


def _serves(version: int) -> Callable[[Answer], bool]:
    return lambda found: found.headers.get("x-served-model") == f"{NAME}@{version}"


def _has_only(version: int) -> Callable[[Answer], bool]:
    def has(found: Answer) -> bool:
        names = set(_pods_by_version(found))
        return names == {f"{NAME}@{version}"}

    return has


def _pods_by_version(found: Answer) -> dict[str, int]:
    """Return how many pods have each version, by its name on pods."""
    versions = json.loads(found.body)["status"]["versions"]
    return {each["name"]: each["ready"] for each in versions if each["ready"]}


def _excerpt(found: Answer) -> str:
    """Return what matters of an answer: its status, and who served it or which pods have it."""
    if model := found.headers.get("x-served-model"):
        return f"{found.status}, {found.headers['x-served-by']} served {model}"
    if found.status == 200 and '"versions"' in found.body:
        held = _pods_by_version(found).items()
        return f"{found.status}, " + "; ".join(f"{name} ready: {num}" for name, num in held)
    return f"{found.status}"


async def _curl(command: str) -> Answer:
    """Run a command line that has curl print the headers, too."""
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    head, _, body = output.decode().replace("\r\n", "\n").partition("\n\n")
    status = re.match(r"HTTP/\S+ (\d+)", head)
    fields = (line.partition(": ") for line in head.splitlines()[1:])
    return Answer(
        int(status[1]) if status else 0, {name.lower(): text for name, _, text in fields}, body
    )
