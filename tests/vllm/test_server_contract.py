"""The pages and responses of a real server on which the router relies."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from extproc.lab.fakepod.podserver import PodConfig
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.stack.processes import free_port
from tests.commandline import Command, commands, snippets
from tests.fakepods import running_pod
from tests.vllm.server import ADAPTERS, BASE_MODEL, MAX_LORAS, VllmClient

PROFILE = PROFILES["vllm"]
STARTED_WITH, LOADED_LATER = ADAPTERS[:-1], ADAPTERS[-1]


async def test_the_whole_and_the_filtered_page_have_the_same_report(
    vllm_client: VllmClient,
) -> None:
    await vllm_client.complete(STARTED_WITH[0], max_tokens=4)
    query = "&".join(f"name[]={family}" for family in PROFILE.families)

    whole = await vllm_client.get("/metrics")
    filtered = await vllm_client.get(f"/metrics/?{query}")
    report = parse_report(whole, PROFILE)

    assert parse_report(filtered, PROFILE) == report
    assert len(filtered) < len(whole) / 10
    assert report.max_loras == MAX_LORAS
    assert report.num_running == report.num_waiting == report.num_deferred == 0
    assert report.active_adapters == frozenset()
    assert report.adapter_log[0][0] == STARTED_WITH[0]
    assert report.process_start_wall_s is not None
    assert report.process_start_wall_s < report.adapter_log[0][1]
    assert report.gpu_adapters is None


async def test_the_listing_has_the_base_first_then_adapters_as_loaded(
    vllm_client: VllmClient,
) -> None:
    cards = json.loads(await vllm_client.get("/v1/models"))["data"]

    assert [card["id"] for card in cards] == [BASE_MODEL, *STARTED_WITH]
    assert [card["parent"] for card in cards] == [None] + [BASE_MODEL] * len(STARTED_WITH)
    assert cards[1]["root"] == str(vllm_client.server.models / STARTED_WITH[0])
    assert cards[0]["max_model_len"] == 512


async def test_an_unknown_model_is_404_in_openais_shape(vllm_client: VllmClient) -> None:
    body = {"model": "nope", "prompt": "the", "max_tokens": 1}

    status, answer = await vllm_client.post("/v1/completions", body)

    assert status == 404
    assert answer["error"]["type"] == "NotFoundError"
    assert answer["error"]["param"] == "model"
    assert answer["error"]["code"] == 404
    assert "`nope` does not exist" in answer["error"]["message"]


async def test_loads_and_unloads_have_the_known_statuses(vllm_client: VllmClient) -> None:
    missing = {"lora_name": "missing", "lora_path": str(vllm_client.server.models / "missing")}

    assert (await vllm_client.load(LOADED_LATER))[0] == 200
    assert (await vllm_client.adapters())[-1] == LOADED_LATER
    assert (await vllm_client.load(LOADED_LATER))[0] == 400
    assert (await vllm_client.post("/v1/load_lora_adapter", missing))[0] == 404
    assert (await vllm_client.unload(LOADED_LATER))[0] == 200
    assert (await vllm_client.unload(LOADED_LATER))[0] == 404
    assert await vllm_client.adapters() == list(STARTED_WITH)


async def test_a_stream_of_responses_has_the_events_of_the_fake_pod_s(
    vllm_client: VllmClient,
) -> None:
    asked = {"input": "the fox", "max_output_tokens": 4, "temperature": 0, "stream": True}
    async with running_pod(PodConfig(base_model=BASE_MODEL)) as pod:
        real = await _events(vllm_client.server.url, asked | {"model": BASE_MODEL})
        fake = await _events(pod.url, asked | {"model": BASE_MODEL})

    kinds = {event["type"]: sorted(event) for event in fake}
    assert kinds.items() <= {event["type"]: sorted(event) for event in real}.items()
    assert list(kinds) == list(dict.fromkeys(event["type"] for event in real))
    assert [event["sequence_number"] for event in real] == list(range(len(real)))
    assert real[-1]["response"]["status"] == fake[-1]["response"]["status"] == "incomplete"
    assert fake[-1]["response"].keys() <= real[-1]["response"].keys()
    assert fake[-1]["response"]["usage"].keys() == real[-1]["response"]["usage"].keys()


async def _events(url: str, body: dict[str, object]) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/responses", json=body) as answer,
    ):
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def test_every_adapter_has_its_own_text(vllm_client: VllmClient) -> None:
    """Otherwise no test could check that a request was served by the right adapter."""
    names = [BASE_MODEL, *STARTED_WITH]
    texts = {name: await vllm_client.complete(name, max_tokens=16) for name in names}

    assert len(set(texts.values())) == len(names)
    assert texts == {name: await vllm_client.complete(name, max_tokens=16) for name in names}


async def test_up_serves_it_by_the_request_that_it_prints(
    vllm_client: VllmClient, tmp_path: Path
) -> None:
    url = vllm_client.server.url
    with commands() as started:
        up = Command(tmp_path, "up", "--pod", url, "--port", str(free_port()))
        started.append(up)
        await asyncio.to_thread(up.wait_for_output, "reply.choices")
        _, python = snippets(up.output)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", python)

        assert await process.wait() == 0
    assert f'model="{STARTED_WITH[0]}"' in python
