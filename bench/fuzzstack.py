"""The processes under attack: Envoy, a router, honest pods; and a watch over them."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from bench.fuzzattack import Plan, Tally
from bench.fuzzfield import HONEST, SESSION_HEADER, SHAKY
from bench.processes import (
    BenchError,
    Program,
    cpu_s,
    envoy_binary,
    free_ports,
    get,
    memory,
    waited_s,
)
from extproc.app.settings import BODY_SHARE_OF_MEMORY
from extproc.envoyconfig import BootstrapOptions, Mode, render

NUM_PODS: Final = 3
_PARTS: Final = ("envoy", "router", "pods")
_LOOK_S: Final = 0.1
_ENDS_WITHIN_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """Running processes.

    Attributes:
        programs: By name: `envoy`, `router`, and each honest pod.
        envoy_port: For clients.
        grpc_port: The router's.
        admin_port: The router's.
        endpoints: File from which the router reads its pods.
        pods: Addresses of the honest ones.
    """

    programs: Mapping[str, Program]
    envoy_port: int
    grpc_port: int
    admin_port: int
    endpoints: Path
    pods: Sequence[str]

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://127.0.0.1:{self.envoy_port}"

    @property
    def admin_url(self) -> str:
        """Of the router's HTTP port."""
        return f"http://127.0.0.1:{self.admin_port}"

    def list_pods(self, hostile: Sequence[str] = ()) -> None:
        """Tell the router of the honest pods and of these."""
        write_whole(self.endpoints, yaml.safe_dump([*self.pods, *hostile]))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of `envoy`, `router`, and `pods`; and what they waited for a core.

        The latter under `envoy waits` and so on: how much of a delay is the machine's.
        """
        used = dict.fromkeys((*_PARTS, *(f"{part} waits" for part in _PARTS)), 0.0)
        for name, program in self.programs.items():
            part = name if name in _PARTS else "pods"
            used[part] += cpu_s(program.pid)
            used[f"{part} waits"] += waited_s(program.pid)
        return used


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody reads half of it."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


@contextmanager
def running(
    bootstrap: BootstrapOptions, more: Mapping[str, Any], max_rss_bytes: int
) -> Iterator[Target]:
    """Start everything, wait until a request would be served, and end it afterwards.

    Args:
        bootstrap: Envoy's; addresses are filled in.
        max_rss_bytes: The router's limit; it is told, as it would find a container's by itself.
        more: Sections of the router's configuration that replace or extend ours.

    Raises:
        BenchError: Something did not start; with its log.
    """
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="extproc-fuzz-")))
        envoy_port, envoy_admin, grpc_port, admin_port, *pod_ports = free_ports(4 + NUM_PODS)
        programs = {
            f"pod-{n}": exits.enter_context(_pod(folder, n, port))
            for n, port in enumerate(pod_ports)
        }
        target = Target(
            programs=programs,
            envoy_port=envoy_port,
            grpc_port=grpc_port,
            admin_port=admin_port,
            endpoints=folder / "pods.yaml",
            pods=[f"127.0.0.1:{port}" for port in pod_ports],
        )
        target.list_pods()
        config = _merged(_router_config(target, bootstrap.mode, max_rss_bytes), more)
        router = exits.enter_context(_router(folder, config))
        router.wait_until(lambda: get(f"{target.admin_url}/healthz") is not None)
        options = replace(
            bootstrap,
            listen=f"127.0.0.1:{envoy_port}",
            admin=f"127.0.0.1:{envoy_admin}",
            pickers=(f"127.0.0.1:{grpc_port}",),
        )
        envoy = exits.enter_context(_envoy(folder, render(options)))
        envoy.wait_until(lambda: get(f"http://127.0.0.1:{envoy_admin}/ready") is not None)
        envoy.wait_until(lambda: get(f"{target.url}/v1/models") is not None)
        programs |= {"router": router, "envoy": envoy}
        yield target


def _router_config(target: Target, mode: Mode, max_rss_bytes: int) -> dict[str, Any]:
    fallbacks = 2 if mode is Mode.OVERRIDE_HOST else 0
    return {
        "server": {"address": f"127.0.0.1:{target.grpc_port}"},
        "admin": {"address": f"127.0.0.1:{target.admin_port}"},
        "discovery": {"file": str(target.endpoints), "file_interval_s": 0.2},
        "request": {
            "session_header": SESSION_HEADER,
            "max_bytes_in_memory": int(max_rss_bytes * BODY_SHARE_OF_MEMORY),
        },
        "destination": {"num_fallbacks": fallbacks},
        "log": {"level": "info", "json_lines": False},
    }


def _merged(config: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return config | {
        name: {**config.get(name, {}), **section} if isinstance(section, dict) else section
        for name, section in more.items()
    }


def _router(folder: Path, config: dict[str, Any]) -> Program:
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(path)]
    return Program(command, folder / "router.log")


def _envoy(folder: Path, config: str) -> Program:
    path = folder / "envoy.yaml"
    path.write_text(config)
    command = [envoy_binary(), "-c", str(path), "--concurrency", "1", "-l", "error"]
    return Program([*command, "--disable-hot-restart"], folder / "envoy.log")


def _pod(folder: Path, number: int, port: int) -> Program:
    options = ["--name", f"pod-{number}", "--port", str(port), "--max-loras", "16"]
    adapters = ["--adapters", ",".join((*HONEST, *SHAKY))]
    command = [sys.executable, "-m", "extproc.sim.fakepod.pod", *options, *adapters]
    return Program(command, folder / f"pod-{number}.log")


# ---- the attackers' process


class Attack:
    """The attackers' process while it runs.

    Attributes:
        addresses: Where its pods listen.
        tally: What it did; None until it has ended.
        cpu_s: CPU seconds that it used; 0 until it has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process, addresses: list[str]) -> None:
        self.addresses = addresses
        self.tally: Tally | None = None
        self.cpu_s = 0.0
        self._process = process

    async def end(self) -> None:
        """Have it stop, and read what it did.

        Raises:
            BenchError: It had ended by itself.
        """
        if self._process.returncode is not None:
            raise BenchError("the attackers have broken down")
        self.cpu_s = cpu_s(self._process.pid)
        self._process.terminate()
        async with asyncio.timeout(_ENDS_WITHIN_S):
            output, _ = await self._process.communicate()
        self.tally = msgspec.json.decode(output, type=Tally)


@asynccontextmanager
async def attacking(plan: Plan) -> AsyncIterator[Attack]:
    """Start the attackers; whoever leaves before `Attack.end` ends them at once.

    Raises:
        BenchError: They did not start.
    """
    command = [sys.executable, "-m", "bench.fuzzattack", msgspec.json.encode(asdict(plan)).decode()]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise BenchError("the attackers did not start")
        yield Attack(process, msgspec.json.decode(line)["addresses"])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---- the watch


@dataclass(slots=True)
class Watch:
    """Looks at the processes ten times a second; ends the router where it holds too much.

    Resident memory, not address space: that of a Python process with threads is gigabytes that
    nobody uses, so a limit of it (RLIMIT_AS) would say nothing of what the router keeps.

    Attributes:
        target: What is looked at.
        max_rss_bytes: The router's limit.
        faults: What went wrong; empty is good.
        slowest_health_s: The longest that the router's /healthz took in the present phase: its
            loop stood still so long, or nearly.
        rss_bytes: The most that each held in the present phase: `router` and `envoy`.
        has_faults: Set with the first of them.
    """

    target: Target
    max_rss_bytes: int
    faults: list[str] = field(default_factory=list)
    slowest_health_s: float = 0.0
    rss_bytes: dict[str, int] = field(default_factory=dict)
    has_faults: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Look until something is wrong, or until cancelled."""
        while not self.faults:
            self._look()
            await asyncio.sleep(_LOOK_S)
        self.has_faults.set()

    async def probe(self) -> None:
        """Ask for the router's health again and again, on connections of our own."""
        while True:
            began_s = time.monotonic()
            await asyncio.to_thread(get, f"{self.target.admin_url}/healthz")
            self.slowest_health_s = max(self.slowest_health_s, time.monotonic() - began_s)
            await asyncio.sleep(_LOOK_S)

    def begin_phase(self) -> None:
        """Forget the extremes of the last phase."""
        self.slowest_health_s, self.rss_bytes = 0.0, {}

    def _look(self) -> None:
        for name, program in self.target.programs.items():
            if not program.is_running:
                self.faults.append(f"{name} has died: {program.log}")
                return
        for name in ("router", "envoy"):
            now_bytes = memory(self.target.programs[name].pid).now_bytes
            self.rss_bytes[name] = max(self.rss_bytes.get(name, 0), now_bytes)
        router = self.target.programs["router"]
        peak_bytes = memory(router.pid).peak_bytes
        if peak_bytes > self.max_rss_bytes:
            self.faults.append(
                f"the router held {peak_bytes / 1e6:.0f} MB, its limit is "
                f"{self.max_rss_bytes / 1e6:.0f} MB"
            )
            router.kill()
