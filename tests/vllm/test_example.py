"""examples/compose with a tiny model: its command as a process, behind Envoy and the router of
docker-compose.yml, asked by examples/client.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import Mode
from tests.commandline import output_of
from tests.compose import files
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import RouterProcess
from tests.examples.test_compose import example
from tests.vllm.server import PYTHON, VllmClient, VllmServer
from tests.waiting import eventually

CLIENT = files.ROOT / "examples" / "client.py"
WITHIN_S = 120.0


class Container(VllmServer):
    """The service `vllm-cpu` as a process with other weights, on a port of its own."""

    def launch(self) -> None:
        """Start without waiting."""
        service = example()["vllm-cpu"]
        script = files.unescape(service["command"][0])
        script = script.replace("--host 0.0.0.0 --port 8000", self.address_flags())
        modules = " ".join(f"{name}={self.models / name}" for name in self.adapters)
        env = {
            name: value.replace("${HF_TOKEN:-}", "")
            for name, value in service["environment"].items()
        }
        env |= {"MODEL": str(self.models / "base"), "LORA_MODULES": modules}
        env |= {"HF_HOME": str(self.dir), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env |= {"PATH": f"{PYTHON.parent}:/usr/bin:/bin"}
        self.spawn([*service["entrypoint"], script], env)

    def address_flags(self) -> str:
        """The flags that differ between processes of one machine."""
        host, port = self.address.split(":")
        return f"--host {host} --port {port}"


@pytest.fixture
async def server(tiny_models: Path) -> AsyncIterator[VllmServer]:
    running = Container(tiny_models, ("a0", "a1", "a2"))
    try:
        await running.start()
        yield running
    finally:
        await running.close()


async def test_adapters_are_served_and_more_are_loaded_while_it_runs(
    server: VllmServer, tiny_models: Path
) -> None:
    config = yaml.safe_load((files.FILES / "router.yaml").read_text(encoding="utf-8"))
    kept = {key: config[key] for key in config.keys() - {"server", "admin", "discovery"}}
    discovery = {"static": [{"address": server.address, "name": "vllm-0"}]}
    async with (
        RouterProcess({**kept, "discovery": discovery}) as router,
        running_envoy(Mode.OVERRIDE_HOST, router, num_pods=1) as envoy,
        aiohttp.ClientSession() as http,
    ):
        adapter = {"lora_name": "late", "lora_path": str(tiny_models / "a3")}
        status, _ = await VllmClient(server, http).post("/v1/load_lora_adapter", adapter)
        assert status == 200

        async def is_listed() -> bool:
            async with http.get(f"{envoy.url}/v1/models") as response:
                return "late" in await response.text()

        await eventually(is_listed)
        command = (sys.executable, CLIENT, envoy.url, "--admin", router.admin_url)
        said = await asyncio.to_thread(output_of, *command, within_s=WITHIN_S)

    bases, adapters, first, first_s_pod, second, second_s_pod, error = said.splitlines()
    assert bases == f"base models: {tiny_models / 'base'}"
    assert adapters == "adapters: a0, a1, a2, late"
    assert (first[:2], second[:2]) == ("a0", "a1")
    for line in (first_s_pod, second_s_pod):
        assert line.startswith("  served by vllm-0 (least_harm: ")
    assert "code model_not_found" in error
