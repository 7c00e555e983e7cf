"""The processes of a scenario: Envoy, a router, honest pods, attackers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from bench.figures import by_label, parse_counters
from bench.processes import cpu_s, get, memory
from extproc.envoy.bootstrap import BootstrapOptions, render
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.config import PodConfig
from extproc.stack.processes import ChildProcess, StackError
from extproc.stack.stack import Stack
from tests.e2e.fuzz.attack import Plan, Tally
from tests.e2e.fuzz.field import DECLARED, HONEST, LONG, SHAKY, VERSION
from tests.e2e.fuzz.tokens import TOKEN_LINE

TOKEN_S: Final = 0.2
"""Of the pod whose answers take seconds."""
_NUM_PODS: Final = 3
"""Honest pods; beside them one of long answers."""
NUM_PLACES: Final = 32
"""For adapters in the memory of an honest pod: its own, those that are declared, others."""
_NUM_LISTED: Final = 2000
"""More adapters of the pod of long answers. It is another one than the honest clients': a list of
its own takes it tens of milliseconds."""
_MEASURED: Final = ("router", "envoy")
_PARTS: Final = (*_MEASURED, "pods")
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
        names = [f"pod-{n}" for n in range(_NUM_PODS)]
        pods = {name: _honest(name) for name in names}
        listed = [f"customer-{n:05d}/support-assistant-v1" for n in range(_NUM_LISTED)]
        slow = replace(INSTANT, step_s=TOKEN_S)
        pods["long"] = PodConfig(
            "long", adapters=(LONG, *listed), profile=slow, loads_at_runtime=False
        )
        await self.start_pods(pods)
        self.list_pods()
        tokens = self.endpoints.with_name("tokens")
        tokens.write_text(TOKEN_LINE)
        declaring = {
            "store": {"sqlite": {"file": str(self.endpoints.with_name("adapters.db"))}},
            "registration": {"token_file": str(tokens)},
            "declared": [_declared(name) for name in DECLARED],
            "verify": "effect",
        }
        discovery = {"file": str(self.endpoints), "file_interval_s": 0.2}
        router = await self.start_router({"discovery": discovery, "adapters": declaring, **config})
        await router.wait_until(self._has_declared)
        gateway = render(replace(bootstrap, routers=(router.address,)))
        await self.start_envoy(gateway, (*HONEST, LONG, listed[-1]), log_level="error")

    async def _has_declared(self) -> bool:
        samples = await asyncio.to_thread(self.metrics)
        return by_label(samples, "extproc_adapters", "state").get("ready") == len(DECLARED)

    def list_pods(self, hostile: Sequence[str] = ()) -> None:
        """Tell the router of the honest pods and of these."""
        honest = [pod.address for pod in self.pods.values()]
        fresh = self.endpoints.with_suffix(".fresh")
        fresh.write_text(yaml.safe_dump([*honest, *hostile]))
        fresh.replace(self.endpoints)  # in one step, so that nobody reads half of it

    def metrics(self) -> dict[str, float]:
        """The router's; empty while it does not answer."""
        return parse_counters(get(f"{self.admin_url}/metrics") or "")

    def aimed(self, plan: Plan) -> Plan:
        """Return the plan with our ports."""
        (router,) = self.routers
        ports = [int(url.rpartition(":")[2]) for url in (self.url, router.address, self.admin_url)]
        envoy_port, grpc_port, admin_port = ports
        return replace(plan, envoy_port=envoy_port, grpc_port=grpc_port, admin_port=admin_port)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of `envoy`, `router`, and `pods`; and what they waited for a core.

        The latter under `envoy waits` and so on: how much of a delay is the machine's.
        """
        used = dict.fromkeys((*_PARTS, *(f"{part} waits" for part in _PARTS)), 0.0)
        for name, child in self.children.items():
            part = name if name in _PARTS else "pods"
            used[part] += cpu_s(child.pid)
            used[f"{part} waits"] += _waited_s(child.pid)
        return used

    def forget_peaks(self) -> None:
        """Have the peaks of memory begin anew."""
        for name in _MEASURED:
            # Source: proc_pid_clear_refs(5).
            Path(f"/proc/{self.children[name].pid}/clear_refs").write_text("5")

    def peaks_mb(self) -> dict[str, float]:
        """The most memory that router and Envoy held since then."""
        peaks = {name: memory(self.children[name].pid).peak_bytes for name in _MEASURED}
        return {f"{name} MB": num_bytes / 1e6 for name, num_bytes in peaks.items()}

    def log_bytes(self) -> int:
        """What the router has logged."""
        return self.routers[0].log_path.stat().st_size

    def faults(self, max_rss_bytes: int) -> list[str]:
        """Return which process has ended, or that the router holds too much: that ends it, too.

        Resident memory, not address space: that of a Python process with threads is gigabytes that
        nobody uses, so a limit of it (RLIMIT_AS) would say nothing of what the router keeps.
        """
        for name, child in self.children.items():
            if not child.is_running:
                return [f"{name} has died: {child.log[-_LOG_CHARS:]}"]
        (router,) = self.routers
        if (peak_bytes := memory(router.pid).peak_bytes) <= max_rss_bytes:
            return []
        router.send(signal.SIGKILL)
        return [f"the router held {peak_bytes / 1e6:.0f} MB, its limit is {max_rss_bytes / 1e6} MB"]


def _honest(name: str) -> PodConfig:
    """With places for what is declared beside what it has."""
    return PodConfig(name, adapters=(*HONEST, *SHAKY), max_loras=16, max_cpu_loras=NUM_PLACES)


def _declared(name: str) -> dict[str, object]:
    """Loaded by every honest pod before anybody asks for it."""
    place = {"source": f"/a/{name}", "version": VERSION, "load": "eager"}
    return {"name": name, **place, "replicas": {"min": _NUM_PODS}}


class Attack(ChildProcess):
    """The attackers' process: whoever leaves before `end` ends them at once, even if killed.

    Attributes:
        addresses: Where its pods listen.
        cores: CPU that it used, in cores; 0 until it has ended.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("attackers")
        self.addresses: list[str] = []
        self.cores = self._began_s = 0.0
        self._plan = msgspec.json.encode(asdict(plan)).decode()

    async def start(self) -> None:
        """Start the attack.

        Raises:
            StackError: It did not start.
        """
        self._began_s = time.monotonic()
        self.spawn([sys.executable, "-m", "tests.e2e.fuzz.attack", self._plan])
        self.addresses = msgspec.json.decode(await self.wait_until(self._said))["addresses"]

    async def _said(self) -> str:
        """The last whole line that it said."""
        lines = [line for line in self.log.splitlines(keepends=True) if line.startswith("{")]
        return lines[-1] if lines and lines[-1].endswith("\n") else ""

    async def end(self) -> Tally:
        """Have it stop, and return what it did.

        Raises:
            StackError: It had ended by itself, or does not end.
        """
        self.check_running()
        self.cores = cpu_s(self.pid) / (time.monotonic() - self._began_s)
        with contextlib.suppress(PermissionError):  # to end, they must not wait for idle processors
            os.sched_setscheduler(self.pid, os.SCHED_OTHER, os.sched_param(0))
        if await self.stop(_ENDS_WITHIN_S):
            raise StackError(f"the attackers do not end well: {self.log[-_LOG_CHARS:]}")
        return msgspec.json.decode(await self._said(), type=Tally)


def _waited_s(pid: int) -> float:
    """Seconds that a process's threads were ready and had no core: others took them.

    Source: the kernel's Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat, field 2.
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9
