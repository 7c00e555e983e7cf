"""Two kinds of pods: the small ones are not overfilled, and get no adapter of a large rank."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import SLOW, behind_envoy, router_config
from tests.e2e.harness import Client
from tests.fakepods import running_pods
from tests.waiting import eventually

WIDE = "wide-r64"
NARROW = [f"narrow-{number}" for number in range(8)]
GROUPS: dict[str, dict[str, Any]] = {
    "small": {"max_loras": 2, "max_lora_rank": 16},
    "large": {"max_loras": 4, "max_lora_rank": 64},
}
NUM_AT_ONCE = 20


def kind(name: str, *adapters: str, **more: Any) -> PodConfig:
    """A pod of the group that its name begins with."""
    return PodConfig(name=name, adapters=adapters, profile=SLOW, **GROUPS[group_of(name)], **more)


def group_of(name: str) -> str:
    return name.partition("-")[0]


def entries(pods: Sequence[RunningPod]) -> list[dict[str, str]]:
    """The pods as discovery names them."""
    return [{"address": pod.address, "group": group_of(pod.name)} for pod in pods]


@asynccontextmanager
async def gateway(
    mode: Mode, pods: Sequence[RunningPod], http: aiohttp.ClientSession, **sections: Any
) -> AsyncIterator[Client]:
    config = {
        **router_config(pods, server={"drain_timeout_s": 1}),
        "pods": {"groups": GROUPS},
        "adapters": {"ranks": {"*-r64": 64}},
        **sections,
    }
    async with behind_envoy(config, http, mode, num_pods=len(pods)) as (_, client):
        yield client


def requests_of(pod: RunningPod) -> int:
    return pod.pod.runner.engine.counters.num_submitted


async def test_small_pods_get_as_many_adapters_as_they_have_slots(
    http: aiohttp.ClientSession,
) -> None:
    """From the first requests on, when no engine has reported its slots."""
    configs = [
        kind("small-1", *NARROW),
        kind("small-2", *NARROW),
        kind("large", *NARROW),
    ]
    async with running_pods(*configs) as pods:
        sections = {"discovery": {"static": entries(pods)}, "policy": {"name": "least_harm"}}
        async with gateway(Mode.ORIGINAL_DST, pods, http, **sections) as client:
            asked = (client.chat(name, max_tokens=40) for name in NARROW)
            answers = await asyncio.gather(*asked)

    assert Counter(answer.served_by for answer in answers) == {
        "small-1": 2,
        "small-2": 2,
        "large": 4,
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["founding", "least_harm"])
async def test_an_adapter_of_rank_64_never_reaches_a_pod_of_rank_16(
    http: aiohttp.ClientSession, tmp_path: Path, policy: str
) -> None:
    """Though the small pod lists it, and is the only one when the large one is gone."""
    path = tmp_path / "pods.yaml"
    async with running_pods(kind("small", WIDE), kind("large", WIDE)) as pods:
        small, large = pods
        path.write_text(yaml.safe_dump(entries(pods)))
        sections = {
            "discovery": {"file": str(path), "file_interval_s": 0.05},
            "policy": {"name": policy},
            "destination": {"num_fallbacks": 1},
        }
        async with gateway(Mode.ORIGINAL_DST, pods, http, **sections) as client:
            answers = await asyncio.gather(*(client.chat(WIDE) for _ in range(NUM_AT_ONCE)))
            assert {(each.status, each.served_by) for each in answers} == {(200, "large")}

            path.write_text(yaml.safe_dump(entries([small])))

            async def is_refused() -> bool:
                answer = await client.chat(WIDE)
                return answer.status == 503 and answer.error_code == "rank_too_high"

            await eventually(is_refused)
            assert (await client.chat("base")).served_by == "small"
            assert requests_of(small) == 1


async def test_a_pod_that_refuses_a_rank_as_vllm_does_gets_no_requests_for_it(
    http: aiohttp.ClientSession,
) -> None:
    """It does not list the adapter then: no configured rank is needed."""
    paths = {"/adapters/wide": 64}
    configs = [kind(name, ranks_by_path=paths) for name in ("small", "large")]
    async with running_pods(*configs) as pods:
        load = {"lora_name": "wide", "lora_path": "/adapters/wide"}
        statuses = []
        for pod in pods:
            async with http.post(f"{pod.url}/v1/load_lora_adapter", json=load) as response:
                statuses.append(response.status)
        assert statuses == [500, 200]
        sections = {"discovery": {"static": entries(pods)}}
        async with gateway(Mode.ORIGINAL_DST, pods, http, **sections) as client:
            answers = await asyncio.gather(*(client.chat("wide") for _ in range(NUM_AT_ONCE)))

    assert {(each.status, each.served_by) for each in answers} == {(200, "large")}
