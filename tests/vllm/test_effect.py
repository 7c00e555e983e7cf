"""Adapters without effect, as a real vLLM loads and serves them."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import closing
from pathlib import Path

import pytest

from extproc.adapters.effect import has_effect
from extproc.adapters.engineapi import likeliest
from extproc.commands.checks import Check
from extproc.commands.podcheck import check_pod
from extproc.reports.engines import PROFILES
from extproc.reports.podclient import PodClient
from tests.vllm.server import ADAPTERS, BASE_MODEL, VllmClient

GOOD = ADAPTERS[0]


def of_zeros(weights: bytes) -> bytes:
    (header_bytes,) = struct.unpack("<Q", weights[:8])
    return weights[: 8 + header_bytes] + bytes(len(weights) - 8 - header_bytes)


def of_other_modules(weights: bytes) -> bytes:
    """Of layers that the model does not have."""
    for layer in (b"0", b"1"):
        weights = weights.replace(b".layers." + layer + b".", b".layers.%d." % (7 + int(layer)))
    return weights


@pytest.mark.parametrize("change", [of_zeros, of_other_modules])
async def test_an_adapter_that_vllm_loads_and_that_changes_nothing_is_found(
    vllm_client: VllmClient, tmp_path: Path, change: object
) -> None:
    folder, name = tmp_path / "adapter", getattr(change, "__name__", "")
    shutil.copytree(vllm_client.server.models / GOOD, folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(change(file.read_bytes()))  # type: ignore[operator]
    body = {"lora_name": name, "lora_path": str(folder)}
    status, answer = await vllm_client.post("/v1/load_lora_adapter", body)
    assert status == 200, answer
    try:
        checks = await check_pod(
            vllm_client.server.url, profile=PROFILES["vllm"], adapter=name, timeout_s=240
        )
        found = effect_of(checks)
        assert (found.passed, found.detail) == (
            False,
            f"no_effect: {name} answers as {BASE_MODEL} does",
        )
        assert await is_effective(vllm_client, name) is False
    finally:
        assert (await vllm_client.unload(name))[0] == 200


async def test_adapters_that_change_something_have_an_effect(vllm_client: VllmClient) -> None:
    for name in ADAPTERS[:-1]:
        assert await is_effective(vllm_client, name) is True
    assert await is_effective(vllm_client, "not-there") is None
    checks = await check_pod(
        vllm_client.server.url, profile=PROFILES["vllm"], adapter=GOOD, timeout_s=240
    )
    assert effect_of(checks).detail == f"{GOOD} and {BASE_MODEL} differ"


async def test_the_server_says_its_version_that_it_is_awake_and_alive(
    vllm_client: VllmClient,
) -> None:
    version = json.loads(await vllm_client.get("/version"))["version"]
    checks = await check_pod(vllm_client.server.url, profile=PROFILES["vllm"])
    said = {check.requirement: (check.passed, check.detail) for check in checks}

    assert said["`GET /health` answers 200."] == (True, "HTTP 200")
    safe = "Its version leaves running requests alone when an adapter is loaded."
    assert said[safe] == (True, f"version {version}")
    assert said["The metrics say whether the engine sleeps."] == (True, "vllm:engine_sleep_state")


def effect_of(checks: list[Check]) -> Check:
    [found] = [each for each in checks if "changes what its base model" in each.requirement]
    return found


async def is_effective(client: VllmClient, name: str) -> bool | None:
    with closing(PodClient()) as pod:
        found = [
            await likeliest(pod, client.server.url, each, timeout_s=60)
            for each in (BASE_MODEL, name)
        ]
    base, adapter = found
    return None if base is None or adapter is None else has_effect(base, adapter)
