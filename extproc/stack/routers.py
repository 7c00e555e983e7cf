"""The router as a process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from extproc.stack.processes import START_TIMEOUT_S, ChildProcess, free_port, get_page


class Router(ChildProcess):
    """`extproc serve`, on ports of 127.0.0.1 that stay the same over restarts.

    Args:
        config: The configuration; the addresses that it lacks are filled in.
        address: `host:port` of the gRPC services, unless `config` has one; by default a free port.
        folder: The working directory; by default this process's.

    Attributes:
        env: Added to the environment.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        address: str = "",
        name: str = "router",
        folder: Path | None = None,
    ) -> None:
        super().__init__(name)
        address = address or f"127.0.0.1:{free_port()}"
        server = {"address": address, **config.get("server", {})}
        admin = {"address": f"127.0.0.1:{free_port()}", **config.get("admin", {})}
        self.address: str = server["address"]
        self.admin_url = f"http://{admin['address']}"
        self._folder = folder
        self._config_path = self.dir / "config.yaml"
        serve = ("-m", "extproc", "serve", "--config", str(self._config_path))
        self.command: list[str] = [sys.executable, *serve]
        self.env: Mapping[str, str] = {}
        document = {**config, "server": server, "admin": admin}
        self._config_path.write_text(yaml.safe_dump(document), encoding="utf-8")

    async def start(self, *, within_s: float = START_TIMEOUT_S) -> None:
        """Start, also again after the end; return once the router is ready.

        Raises:
            StackError: It ended or did not become ready.
        """
        self.spawn(self.command, self.env, self._folder)
        await self.wait_until(self._is_ready, within_s)

    async def _is_ready(self) -> bool:
        return await get_page(f"{self.admin_url}/healthz") is not None
