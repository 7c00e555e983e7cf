"""Real locust processes with our locustfile, against fake pods of the test."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from extproc.lab.workload.exchange import RequestRecord
from tests.e2e.harness import ChildProcess, free_port
from tests.lab.lab import load_records
from tests.waiting import eventually

LOCUSTFILE = Path(__file__).parents[3] / "loadtest" / "locustfile.py"
PATIENCE_S = 120.0


class Locust(ChildProcess):
    """One locust, or a master, or a worker.

    Args:
        arguments: Beside those that all have here.
    """

    def __init__(self, *arguments: str) -> None:
        super().__init__("locust")
        beside = Path(sys.executable).with_name("locust")
        program = str(beside) if beside.exists() else shutil.which("locust")
        assert program, "pip install '.[loadtest]'"
        self.spawn([program, "-f", str(LOCUSTFILE), *arguments], {"COLUMNS": "200"})

    async def says(self, text: str) -> str:
        """Wait until its output has this; the line with it."""

        async def found() -> str:
            lines = [line for line in self.log.splitlines() if text in line]
            assert lines or self.returncode is None, f"it ended without {text!r}:\n{self.log}"
            return lines[0] if lines else ""

        line: str = await eventually(found, within_s=PATIENCE_S, every_s=0.1)
        return line


@asynccontextmanager
async def locust(*arguments: str) -> AsyncIterator[Locust]:
    """A locust process, killed at the end if it still runs."""
    process = Locust(*arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            await process.kill()
        await process.close()


def headless(url: str, *arguments: str) -> list[str]:
    """Arguments of a run that ends by itself."""
    return ["--headless", "--only-summary", "--host", url, *arguments]


def with_workers(num: int) -> list[str]:
    """Arguments of a master that starts its own workers."""
    port = str(free_port())
    here = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    return ["--processes", str(num), *here]


async def run(url: str, tmp_path: Path, *arguments: str) -> tuple[int, str, list[RequestRecord]]:
    """Run locust to its end: exit status, output, records."""
    path = tmp_path / "records.jsonl"
    async with locust(*headless(url, *arguments, "--records", str(path))) as process:
        status = await process.wait(PATIENCE_S)
        return status, process.log, load_records(path) if path.exists() else []


def totals(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The totals that must not depend on the number of processes."""
    return {
        "indexes": sorted(record.index for record in records),
        "tokens": sum(record.num_tokens for record in records),
        "prompt tokens": sum(record.prompt_tokens for record in records),
        "by adapter": Counter(record.adapter for record in records),
        "errors": Counter(record.error for record in records),
    }


def rows_of(path: Path) -> Counter[str]:
    """The number of entries in each row of locust's table, from its `--json-file`."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return Counter({row["method"]: row["num_requests"] for row in rows})


class Ui:
    """Locust's web UI, as its own page uses it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, process: Locust) -> None:
        self._http = http
        self._url = url
        self.process = process

    async def is_up(self) -> bool:
        """Whether it answers."""
        try:
            async with self._http.get(f"{self._url}/") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def until_said(self, text: str, num: int) -> None:
        """Wait until the log has this so often."""
        await eventually(lambda: self.process.log.count(text) >= num, within_s=PATIENCE_S)

    async def is_(self, state: str) -> bool:
        """Whether a test is in this state."""
        return bool((await self.get("/stats/requests"))["state"] == state)

    async def start(self, users: int, **options: object) -> None:
        """Start a test."""
        form = {"user_count": str(users), "spawn_rate": "9"}
        form |= {name: str(value) for name, value in options.items()}
        async with self._http.post(f"{self._url}/swarm", data=form) as response:
            assert (await response.json())["success"] is True

    async def stop(self) -> None:
        """Stop it."""
        async with self._http.post(f"{self._url}/stop") as response:
            assert response.status == 200

    async def get(self, path: str) -> Any:
        """A JSON document."""
        async with self._http.get(f"{self._url}{path}") as response:
            return await response.json()


@asynccontextmanager
async def web_ui(url: str, *arguments: str) -> AsyncIterator[Ui]:
    """A locust process with its web UI."""
    port = str(free_port())
    web = ("--web-host", "127.0.0.1", "--web-port", port)
    async with (
        locust("--host", url, *web, *arguments) as process,
        aiohttp.ClientSession() as http,
    ):
        ui = Ui(http, f"http://127.0.0.1:{port}", process)
        await eventually(ui.is_up, within_s=PATIENCE_S, every_s=0.1)
        yield ui
