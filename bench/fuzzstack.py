"""The processes under attack: Envoy, a router, honest pods; and a watch over them."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from bench.fuzzattack import Plan, Tally
from bench.fuzzfield import HONEST, SESSION_HEADER, SHAKY
from bench.processes import cpu_s, get, memory, waited_s
from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.config import PodConfig
from extproc.service.configured import BODY_SHARE_OF_MEMORY
from extproc.stack.processes import StackError, bound_to_us
from extproc.stack.stack import Stack

NUM_PODS: Final = 3
_PARTS: Final = ("envoy", "router", "pods")
_LOOK_S: Final = 0.1
_LOG_CHARS: Final = 3000
_ENDS_WITHIN_S: Final = 60.0


class Target(Stack):
    """The processes under attack: `envoy`, `router`, and honest pods.

    Attributes:
        endpoints: File from which the router reads its pods.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.endpoints = folder / "pods.yaml"

    @property
    def admin_url(self) -> str:
        """The base URL of the router's HTTP port."""
        return self.routers[0].admin_url

    async def start(self, bootstrap: BootstrapOptions, config: Mapping[str, Any]) -> None:
        """Start everything, and return once a request would be served.

        Args:
            bootstrap: Envoy's; addresses are filled in.
            config: The router's.

        Raises:
            StackError: Something did not start; with its log.
        """
        names, adapters = [f"pod-{n}" for n in range(NUM_PODS)], (*HONEST, *SHAKY)
        await self.start_pods(
            {name: PodConfig(name, adapters=adapters, max_loras=16) for name in names}
        )
        self.list_pods()
        discovery = {"file": str(self.endpoints), "file_interval_s": 0.2}
        router = await self.start_router({"discovery": discovery, **config})
        gateway = render(replace(bootstrap, routers=(router.address,)))
        await self.start_envoy(gateway, HONEST, log_level="error")

    def list_pods(self, hostile: Sequence[str] = ()) -> None:
        """Tell the router of the honest pods and of these."""
        honest = [pod.address for pod in self.pods.values()]
        write_whole(self.endpoints, yaml.safe_dump([*honest, *hostile]))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of `envoy`, `router`, and `pods`; and what they waited for a core.

        The latter under `envoy waits` and so on: how much of a delay is the machine's.
        """
        used = dict.fromkeys((*_PARTS, *(f"{part} waits" for part in _PARTS)), 0.0)
        for name, child in self.children.items():
            part = name if name in _PARTS else "pods"
            used[part] += cpu_s(child.pid)
            used[f"{part} waits"] += waited_s(child.pid)
        return used


def port_of(address: str) -> int:
    """Return the port of `host:port`, or of a URL that ends with it."""
    return int(address.rpartition(":")[2])


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody reads half of it."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


@contextmanager
def running(
    bootstrap: BootstrapOptions, more: Mapping[str, Any], max_rss_bytes: int
) -> Iterator[Target]:
    """Start everything, and end it afterwards.

    Args:
        bootstrap: Envoy's; addresses are filled in.
        max_rss_bytes: The router's limit; it is told, as it would find a container's by itself.
        more: Sections of the router's configuration that replace or extend ours.

    Raises:
        StackError: Something did not start; with its log.
    """
    with tempfile.TemporaryDirectory(prefix="extproc-fuzz-") as folder:
        target = Target(Path(folder))
        try:
            asyncio.run(target.start(bootstrap, _config(bootstrap.mode, max_rss_bytes, more)))
            yield target
        finally:
            asyncio.run(target.close())


def _config(mode: Mode, max_rss_bytes: int, more: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "request": {
            "session_header": SESSION_HEADER,
            "max_bytes_in_memory": int(max_rss_bytes * BODY_SHARE_OF_MEMORY),
        },
        "peers": {"static": []},
        "destination": {"num_fallbacks": 2 if mode is Mode.OVERRIDE_HOST else 0},
        "log": {"level": "info", "json_lines": False},
    }
    return config | {
        name: {**config.get(name, {}), **section} if isinstance(section, dict) else section
        for name, section in more.items()
    }


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
            StackError: It had ended by itself, or does not end.
        """
        if self._process.returncode is not None:
            raise StackError("the attackers have broken down")
        self.cpu_s = cpu_s(self._process.pid)
        self._process.terminate()
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                output, _ = await self._process.communicate()
        except TimeoutError:
            raise StackError(f"the attackers do not end within {_ENDS_WITHIN_S:g} s") from None
        self.tally = msgspec.json.decode(output, type=Tally)


@asynccontextmanager
async def attacking(plan: Plan) -> AsyncIterator[Attack]:
    """Start the attackers; whoever leaves before `Attack.end` ends them at once, even if killed.

    Raises:
        StackError: They did not start.
    """
    command = [sys.executable, "-m", "bench.fuzzattack", msgspec.json.encode(asdict(plan)).decode()]
    process = await asyncio.create_subprocess_exec(
        *bound_to_us(command), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise StackError("the attackers did not start")
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
        for name, child in self.target.children.items():
            if not child.is_running:
                self.faults.append(f"{name} has died: {child.log[-_LOG_CHARS:]}")
                return
        for name in ("router", "envoy"):
            now_bytes = memory(self.target.children[name].pid).now_bytes
            self.rss_bytes[name] = max(self.rss_bytes.get(name, 0), now_bytes)
        router = self.target.children["router"]
        peak_bytes = memory(router.pid).peak_bytes
        if peak_bytes > self.max_rss_bytes:
            self.faults.append(
                f"the router held {peak_bytes / 1e6:.0f} MB, its limit is "
                f"{self.max_rss_bytes / 1e6:.0f} MB"
            )
            router.send(signal.SIGKILL)
