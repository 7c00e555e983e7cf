"""Fake pods, routers and an Envoy as one stack."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.stack.envoy import Envoy
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


class FakePod(ChildProcess):
    """A fake vLLM pod on a port of 127.0.0.1 that stays the same over restarts.

    `config` is a `PodConfig` of the laboratory, or a mapping of its fields.
    """

    def __init__(self, name: str, config: object) -> None:
        super().__init__(name)
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"http://{self.address}"
        self._config_path = self.dir / "pod.json"
        self._config_path.write_bytes(msgspec.json.encode(config))

    async def start(self) -> None:
        """Start, also again after the end; return once the pod listens.

        Raises:
            StackError: It ended or did not become ready.
        """
        command = [sys.executable, "-m", "extproc", "fake-pod"]
        self.spawn([*command, "--config", str(self._config_path), "--port", str(self._port)])
        await self.wait_until(self._is_up)

    async def _is_up(self) -> bool:
        return await get_page(f"{self.url}/health") is not None


class Stack:
    """Processes that are started one after another and ended together.

    Attributes:
        children: All processes by name.
        pods: The fake pods by name.
        url: The gateway's base URL; "" before there is one.
    """

    def __init__(self) -> None:
        self.children: dict[str, ChildProcess] = {}
        self.pods: dict[str, FakePod] = {}
        self.routers: list[Router] = []
        self.url = ""

    async def start_pods(self, configs: Mapping[str, object]) -> None:
        """Start fake pods by their configurations.

        Raises:
            StackError: One does not become ready.
        """
        self.pods = {name: FakePod(name, config) for name, config in configs.items()}
        self.children |= self.pods
        # All at once: most of the time goes to starting the interpreter.
        await asyncio.gather(*(pod.start() for pod in self.pods.values()))

    async def start_router(self, config: Mapping[str, Any], name: str = "router") -> Router:
        """Start a router for this stack's pods, unless `config` has another discovery.

        Raises:
            StackError: It does not become ready.
        """
        static = [{"address": pod.address, "name": pod.name} for pod in self.pods.values()]
        ours = {"discovery": {"static": static}, "server": {"drain_timeout_s": 1.0}}
        router = Router({**ours, **config}, name=name)
        self.routers.append(router)
        self.children[name] = router
        await router.start()
        return router

    async def start_envoy(
        self,
        bootstrap: str,
        models: Collection[str] = (),
        *,
        log_level: str = "warning",
        concurrency: int = 1,
        keeps_ports: bool = False,
    ) -> None:
        """Start Envoy, and wait until it lists every model: then the whole chain works.

        It has `concurrency` worker threads, and listens on free ports unless it `keeps_ports`.

        Raises:
            StackError: There is no Envoy, or it does not become ready.
        """
        envoy = Envoy(
            bootstrap, concurrency=concurrency, log_level=log_level, keeps_ports=keeps_ports
        )
        self.children["envoy"] = envoy
        await envoy.start()
        self.url = envoy.url

        async def lists_all() -> bool:
            page = await get_page(f"{envoy.url}/v1/models")
            names = {card["id"] for card in json.loads(page)["data"]} if page else set()
            return names >= set(models)

        await envoy.wait_until(lists_all)

    async def close(self) -> None:
        """Stop all processes, and remove their files."""
        running = [child for child in self.children.values() if child.is_running]
        await asyncio.gather(*(child.stop() for child in running))
        for child in self.children.values():
            await child.close()
