"""Real vLLM servers on the CPU, and what their engines hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from extproc.stack.processes import free_port

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


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """One adapter that an engine has ever loaded, by the engine's own id.

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
    """What an engine holds, most recently used first, and everything it ever touched."""

    gpu: tuple[EngineAdapter, ...]
    cpu: tuple[EngineAdapter, ...]
    ever: tuple[EngineAdapter, ...]


def build_model(folder: Path, adapters: Sequence[str] = ADAPTERS) -> None:
    """Write the tiny model to `folder`/base and each adapter to `folder`/name."""
    script = Path(__file__).with_name("build_model.py")
    command = [str(PYTHON), str(script), str(folder), *adapters]
    subprocess.run(command, check=True, timeout=120)


class VllmServer:
    """One server process. It is started at once; `wait_until_ready` before use."""

    def __init__(self, models: Path, log: Path, adapters: Sequence[str], flags: Sequence[str]):
        port = free_port()
        self.models = models
        self.adapters = tuple(adapters)
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self._log_path = log
        self._log: IO[bytes] = log.open("wb")
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(models / "base"), "--served-model-name", BASE_MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
        command += ["--enable-lora", "--max-loras", str(MAX_LORAS)]
        command += ["--max-cpu-loras", str(MAX_CPU_LORAS), "--max-lora-rank", "8"]
        command += ["--worker-extension-cls", "residency_probe.ResidencyProbe"]
        if adapters:
            command += ["--lora-modules", *(f"{name}={models / name}" for name in adapters)]
        self._process = subprocess.Popen(
            [*command, *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(PLUGIN)},
            start_new_session=True,  # it has worker processes; they all go with the group
        )

    def wait_until_ready(self) -> None:
        """Return when the server answers `/health`; raise with its log if it does not come up."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.25)
        log = self._log_path.read_text(errors="replace")
        raise RuntimeError(f"vLLM did not come up:\n{log[-8000:]}")

    def stop(self) -> None:
        """Kill the server and its workers, and wait until they are gone. May be called again."""
        if self._log.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class VllmClient:
    """Speaks to one server as clients, as the router and as the test do."""

    def __init__(self, server: VllmServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self._session = session

    async def get(self, path: str) -> bytes:
        """Body of a GET that must succeed."""
        async with self._session.get(self.server.url + path) as response:
            response.raise_for_status()
            return await response.read()

    async def adapters(self) -> list[str]:
        """Adapters that `/v1/models` lists, in its order."""
        cards = json.loads(await self.get("/v1/models"))["data"]
        return [card["id"] for card in cards if card["parent"] is not None]

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and body of a POST; the body as JSON if it is, else as text."""
        async with self._session.post(self.server.url + path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    async def complete(self, model: str, *, max_tokens: int, prompt: str = "the fox") -> str:
        """The greedy text of `max_tokens` tokens."""
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
        """The CPU cache by the engine's own method, as ids."""
        _, answer = await self.post("/collective_rpc", {"method": "list_loras"})
        return set(answer["results"][0])

    async def caches(self) -> EngineCaches:
        """What the engine holds now."""
        _, answer = await self.post("/collective_rpc", {"method": "adapter_caches"})
        caches = answer["results"][0]
        ever = {entry[0]: EngineAdapter(*entry) for entry in caches["touched"]}
        assert set(caches["slots"]) == set(caches["gpu"])
        return EngineCaches(
            gpu=tuple(ever[i] for i in caches["gpu"]),
            cpu=tuple(ever[i] for i in caches["cpu"]),
            ever=tuple(ever.values()),
        )
