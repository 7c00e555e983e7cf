"""Real vLLM servers on the CPU, and the adapters in their engines' caches."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from _pytest.mark import ParameterSet

from extproc.stack.processes import ChildProcess, free_port, get_page

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PLUGIN = Path(__file__).parent / "plugin"
ADAPTERS = ("a0", "a1", "a2", "a3", "a4", "a5")
BASE_MODEL = "base"
MAX_LORAS = 2
MAX_CPU_LORAS = 4
START_TIMEOUT_S = 240.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
}


def seeds(first: int, num: int) -> list[ParameterSet]:
    """Seeds of random tests: a quarter of them always, all of them where there is time."""
    slow = pytest.mark.slow
    return [
        pytest.param(seed, marks=() if seed < first + num // 4 else slow)
        for seed in range(first, first + num)
    ]


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """An adapter that an engine has loaded at some time, by the engine's id.

    Attributes:
        id: Unique; a name that was unloaded and loaded again has another one.
        name: The name that requests use.
        touched_step: The step in which it was last in the batch or loaded; equal for adapters that
            were in the same one, whose order nobody outside the worker can know.
    """

    id: int
    name: str
    touched_step: int


@dataclass(frozen=True, slots=True)
class EngineCaches:
    """An engine's adapters, most recently used first, and all that it ever touched."""

    gpu: tuple[EngineAdapter, ...]
    cpu: tuple[EngineAdapter, ...]
    ever: tuple[EngineAdapter, ...]


def build_model(folder: Path, adapters: Sequence[str] = ADAPTERS) -> None:
    """Write the tiny model to `folder`/base and each adapter to `folder`/name."""
    script = Path(__file__).with_name("build_model.py")
    command = [str(PYTHON), str(script), str(folder), *adapters]
    subprocess.run(command, check=True, timeout=120)


class VllmServer(ChildProcess):
    """One server process with its workers.

    Args:
        models: The folder that `build_model` wrote.
        adapters: Those that are loaded at the start.
        flags: Further arguments.
        env: Further variables.
    """

    def __init__(
        self,
        models: Path,
        adapters: Sequence[str],
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("vllm")
        port = free_port()
        self.models = models
        self.adapters = tuple(adapters)
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(models / "base"), "--served-model-name", BASE_MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
        command += ["--enable-lora", "--max-loras", str(MAX_LORAS)]
        command += ["--max-cpu-loras", str(MAX_CPU_LORAS), "--max-lora-rank", "8"]
        command += ["--worker-extension-cls", "residency_probe.ResidencyProbe"]
        if adapters:
            command += ["--lora-modules", *(f"{name}={models / name}" for name in adapters)]
        self._command = [*command, *flags]
        self._env = {**_ENVIRONMENT, "PYTHONPATH": str(PLUGIN), **(env or {})}

    def launch(self) -> None:
        """Start without waiting."""
        self.spawn(self._command, self._env)

    async def start(self) -> None:
        """Start, unless it was launched, and return once `/health` responds.

        Raises:
            StackError: It does not come up; with the end of its log.
        """
        if not self.is_running:
            self.launch()
        await self.wait_until(self._is_up, START_TIMEOUT_S)

    async def _is_up(self) -> bool:
        return await get_page(f"{self.url}/health") is not None

    async def close(self) -> None:
        """End the server in order, so that it removes its sockets; may be called again."""
        if self.is_running:
            await self.stop()
        await super().close()


class VllmClient:
    """A client of one server."""

    def __init__(self, server: VllmServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self._session = session

    async def get(self, path: str) -> bytes:
        """Return the body of a GET, which must succeed."""
        async with self._session.get(self.server.url + path) as response:
            response.raise_for_status()
            return await response.read()

    async def adapters(self) -> list[str]:
        """Return the adapters that `/v1/models` lists, in its order."""
        cards = json.loads(await self.get("/v1/models"))["data"]
        return [card["id"] for card in cards if card["parent"] is not None]

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Return the status and the body of a POST, parsed where it is JSON."""
        async with self._session.post(self.server.url + path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def complete(self, model: str, *, max_tokens: int, prompt: str = "the fox") -> str:
        """Return the greedy text of `max_tokens` tokens."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        status, answer = await self.post("/v1/completions", body | {"ignore_eos": True})
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    async def load(self, adapter: str) -> tuple[int, Any]:
        """`POST /v1/load_lora_adapter` with the adapter that was built under this name."""
        path = str(self.server.models / adapter)
        body = {"lora_name": adapter, "lora_path": path}
        return await self.post("/v1/load_lora_adapter", body)

    async def unload(self, adapter: str) -> tuple[int, Any]:
        """`POST /v1/unload_lora_adapter`."""
        return await self.post("/v1/unload_lora_adapter", {"lora_name": adapter})

    async def listed_loras(self) -> set[int]:
        """Return the ids in the CPU cache, by the engine's own method."""
        _, answer = await self.post("/collective_rpc", {"method": "list_loras"})
        return set(answer["results"][0])

    async def loads(self) -> tuple[int, int]:
        """Return how many adapters the engine has brought into GPU slots, and from disk."""
        _, answer = await self.post("/collective_rpc", {"method": "adapter_loads"})
        num_gpu, num_disk = answer["results"][0]
        return num_gpu, num_disk

    async def caches(self) -> EngineCaches:
        """Return the adapters that the engine holds now."""
        _, answer = await self.post("/collective_rpc", {"method": "adapter_caches"})
        caches = answer["results"][0]
        ever = {entry[0]: EngineAdapter(*entry) for entry in caches["touched"]}
        assert set(caches["slots"]) == set(caches["gpu"])
        return EngineCaches(
            gpu=tuple(ever[i] for i in caches["gpu"]),
            cpu=tuple(ever[i] for i in caches["cpu"]),
            ever=tuple(ever.values()),
        )
