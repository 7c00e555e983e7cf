"""docs/ecosystem.md: its configurations are ones, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.commands.eppplan import plan
from extproc.config.configfile import parse_config
from tests.pages import blocks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")
BLOCKS = [document for block in blocks(PAGE, "yaml") for document in yaml.safe_load_all(block)]


def block(kind: str) -> dict[str, Any]:
    """The resource of this kind."""
    (found,) = [document for document in BLOCKS if document.get("kind") == kind]
    return dict(found)


OURS = [yaml.safe_dump(document) for document in BLOCKS if "discovery" in document]


@pytest.mark.parametrize("text", OURS)
def test_configurations_of_the_picker_are_valid(text: str) -> None:
    assert parse_config(text).discovery.kubernetes is not None


def test_there_is_one_for_each_platform() -> None:
    assert len(OURS) == 3


def test_the_scheduler_s_arguments_are_taken_and_say_what_the_page_says() -> None:
    service = block("LLMInferenceService")
    (container,) = service["spec"]["router"]["scheduler"]["template"]["containers"]
    made = plan(
        container["args"], environment={}, make_certificate=lambda: (Path("crt"), Path("key"))
    )
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    lora = service["spec"]["model"]["lora"]

    assert container["command"] == ["extproc", "epp"]
    assert made.warnings() == []
    assert made.config.discovery.kubernetes is not None
    assert made.config.discovery.kubernetes.inference_pool == (f"{name}-inference-pool",)
    assert f"/{namespace}/{name}/v1/chat/completions" in made.config.request.paths
    assert (made.config.pods.tls, made.config.pods.tls_verify) == (True, False)
    assert made.config.pods.max_cpu_loras == lora["maxCpuAdapters"]


def test_files_and_scripts_that_are_named_exist() -> None:
    named = set(re.findall(r"`((?:tests|scripts)/[\w/.-]+)`", PAGE))

    assert len(named) >= 2
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_version_of_litellm_is_the_one_that_is_tested() -> None:
    wanted = (ROOT / "scripts" / "litellm.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^litellm==(\S+)$", wanted, flags=re.M)

    assert f"LiteLLM {version}" in PAGE
