"""Every way in which a real vLLM answers to loads and unloads, as the router understands it.

What the pre-checks say of the same adapters is what vLLM says of them.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from extproc.adapters.adapterfiles import AdapterFiles, Root
from extproc.adapters.adapterstates import Failure, Result
from extproc.adapters.engineapi import load, unload
from extproc.reports.engines import PROFILES
from extproc.reports.podclient import PodClient
from tests.vllm.server import ADAPTERS, VllmClient, VllmServer

OK = Result()
MAX_RANK = 8
LOADED, FREE = ADAPTERS[0], ADAPTERS[-1]


@pytest.fixture
def folder(tiny_models: Path, tmp_path: Path) -> Path:
    """A whole adapter, for a test to break."""
    shutil.copytree(tiny_models / FREE, tmp_path / "adapter")
    return tmp_path / "adapter"


def change(folder: Path, **fields: object) -> None:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


async def loaded(url: str, name: str, path: Path | str, key: str = "") -> Result:
    with closing(PodClient({"Authorization": f"Bearer {key}"})) as client:
        return await load(client, url, PROFILES["vllm"], name=name, path=str(path), timeout_s=60)


async def unloaded(url: str, name: str, key: str = "") -> Result:
    with closing(PodClient({"Authorization": f"Bearer {key}"})) as client:
        return await unload(client, url, PROFILES["vllm"], name=name, timeout_s=60)


async def checked(folder: Path) -> Result | None:
    files = AdapterFiles([Root("/", Path("/"))], on_change=lambda _: None)
    return await files.check(str(folder), max_rank=MAX_RANK)


async def outcome(client: VllmClient, folder: Path) -> tuple[Failure | None, str]:
    """What vLLM answers; the adapter is then on no list, and what is served is unharmed."""
    result = await loaded(client.server.url, "broken", folder)
    assert "broken" not in await client.adapters()
    assert await client.complete(LOADED, max_tokens=2)
    return result.failure, result.message


async def foreseen(folder: Path) -> tuple[Failure | None, str]:
    problem = await checked(folder) or OK
    return problem.failure, problem.message


async def test_loads_and_unloads_that_were_done_before_are_no_failures(
    vllm_client: VllmClient, folder: Path
) -> None:
    url = vllm_client.server.url
    assert await checked(folder) is None

    assert await loaded(url, "new", folder) == OK
    assert "new" in await vllm_client.adapters()
    again = await loaded(url, "new", folder)
    assert (again.failure, "already been loaded" in again.message) == (None, True)
    assert (await loaded(url, "base", folder)).failure is None, "a base model: the list shows it"
    assert await unloaded(url, "new") == OK
    assert "new" not in await vllm_client.adapters()
    gone = await unloaded(url, "new")
    assert (gone.failure, "cannot be found" in gone.message) == (None, True)


async def test_missing_files_are_told_and_repaired_ones_load(
    vllm_client: VllmClient, folder: Path
) -> None:
    away = folder.with_name("away")
    folder.rename(away)
    assert (await outcome(vllm_client, folder))[0] is Failure.FILES
    assert (await foreseen(folder))[0] is Failure.FILES
    assert (await loaded(vllm_client.server.url, "broken", "org/repo")).failure is Failure.FILES

    away.rename(folder)
    assert await loaded(vllm_client.server.url, "healed", folder) == OK
    assert await unloaded(vllm_client.server.url, "healed") == OK


async def test_missing_weights_are_the_engine_s_to_tell_and_foreseen(
    vllm_client: VllmClient, folder: Path
) -> None:
    (folder / "adapter_model.safetensors").unlink()

    failure, message = await outcome(vllm_client, folder)

    assert (failure, "doesn't contain tensors" in message) == (Failure.REFUSED, True)
    assert await foreseen(folder) == (Failure.FILES, "adapter_model.safetensors: missing")


@pytest.mark.parametrize(
    ("fields", "reason", "foretold"),
    [
        ({"r": 64}, "LoRA rank 64 is greater than", "its rank is 64, and"),
        ({"rank_pattern": {"q_proj": 32}}, "LoRA rank 32 is greater than", "its rank is 32, and"),
        ({"use_dora": True}, "does not yet support DoRA", "it is a DoRA adapter"),
        ({"bias": "all"}, "bias is not supported", "bias is all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "modules_to_save has whole modules"),
    ],
    ids=["rank", "rank of a module", "dora", "bias", "modules_to_save"],
)
async def test_what_vllm_cannot_serve_is_refused_with_its_reason_and_foreseen(
    vllm_client: VllmClient, folder: Path, fields: dict[str, object], reason: str, foretold: str
) -> None:
    change(folder, **fields)

    failure, message = await outcome(vllm_client, folder)

    assert (failure, reason in message) == (Failure.REFUSED, True), message
    failure, message = await foreseen(folder)
    assert (failure, foretold in message) == (Failure.REFUSED, True), message


async def test_an_unknown_module_is_refused_with_the_modules_that_are_known(
    vllm_client: VllmClient, folder: Path
) -> None:
    """No pre-check sees it: the model has to be known."""
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"self_attn.q_proj", b"self_attn.x_proj"))

    failure, message = await outcome(vllm_client, folder)

    assert failure is Failure.REFUSED
    assert "expected target modules in" in message
    assert "self_attn.x_proj" in message


async def test_torn_weights_are_refused(vllm_client: VllmClient, folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])

    assert (await outcome(vllm_client, folder))[0] is Failure.REFUSED


async def test_a_server_with_a_key_and_without_runtime_loading_says_so(
    tiny_models: Path, folder: Path
) -> None:
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "False"}
    server = VllmServer(tiny_models, ADAPTERS[:1], ["--api-key", "secret"], env)
    try:
        await server.start()
        url = server.url

        assert (await loaded(url, "new", folder, "wrong")).failure is Failure.UNAUTHORIZED
        assert (await unloaded(url, LOADED)).failure is Failure.UNAUTHORIZED
        assert (await loaded(url, "new", folder, "secret")).failure is Failure.NO_RUNTIME
        assert (await unloaded(url, LOADED, "secret")).failure is Failure.NO_RUNTIME
    finally:
        await server.close()
    dead = await loaded(url, "new", folder, "secret")
    assert dead == Result(Failure.UNREACHABLE, "connection refused")
