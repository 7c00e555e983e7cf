"""The example with a real vLLM: what Docker reads, and what agrees with docker-compose.yml.

`tests/vllm` runs its command.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from tests.commandline import output_of
from tests.compose import files
from tests.compose.test_files import needs, router_config

EXAMPLE = files.ROOT / "examples" / "compose" / "vllm.yaml"


def words(service: dict[str, Any]) -> list[str]:
    return shlex.split(service["command"][0].replace("$", ""))


def flag(service: dict[str, Any], name: str) -> str:
    return words(service)[words(service).index(name) + 1]


def example() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["services"]
    return found


def adapters(service: dict[str, Any]) -> list[str]:
    found: list[str] = service["environment"]["LORA_MODULES"].split()
    return found


def test_docker_compose_adds_it_to_the_file_that_it_is_for() -> None:
    compose = needs("docker-compose", "docker-compose")
    (options,) = re.findall(
        r"^#   docker compose (.*) --profile vllm up", EXAMPLE.read_text(), re.M
    )
    command = [compose, *shlex.split(options), "--profile", "vllm", "--profile", "cpu", "config"]
    merged = yaml.safe_load(output_of(*command, cwd=files.ROOT))["services"]

    assert merged.keys() == {*files.services(), "vllm-cpu"}
    assert merged["pods"]["deploy"]["replicas"] == 0
    for name in ("vllm", "vllm-cpu"):
        assert merged[name]["profiles"] == [name.removeprefix("vllm-")]
        assert merged[name]["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
        # More than run at a time, and no more than stay loaded.
        assert int(flag(merged[name], "--max-loras")) < len(adapters(merged[name]))
        assert len(adapters(merged[name])) <= int(flag(merged[name], "--max-cpu-loras"))
    assert merged["vllm"]["image"] == files.services()["vllm"]["image"]


def test_the_router_finds_its_pods_and_knows_their_cpu_cache() -> None:
    cpu, discovery = example()["vllm-cpu"], router_config().discovery.dns

    assert discovery is not None
    assert cpu["networks"] == {"default": {"aliases": [discovery.name]}}
    assert flag(cpu, "--port") == str(discovery.port)
    assert flag(cpu, "--max-cpu-loras") == str(router_config().pods.max_cpu_loras)


def test_its_vllm_is_of_the_same_version_as_that_for_a_gpu() -> None:
    cpu, gpu = (
        each["image"].split(":") for each in (example()["vllm-cpu"], files.services()["vllm"])
    )

    assert cpu == ["vllm/vllm-openai-cpu", gpu[1]]
