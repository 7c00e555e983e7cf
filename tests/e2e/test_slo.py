"""The objective on the first token, by Envoy's access log: the headers before do not count."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import aiohttp
import pytest

from extproc.envoyconfig import Mode
from extproc.sim.engine.profiles import INSTANT
from tests.e2e.conftest import pod_config, router_config, running_envoy, running_pods
from tests.e2e.harness import RouterProcess, chat, eventually

SLO_S = 1.0
LONG_S = 3.0


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_streamed_response_is_judged_by_its_first_token(mode: Mode) -> None:
    """The pod sends the headers at once in each case."""
    slow = replace(INSTANT, step_s=LONG_S)
    async with running_pods(pod_config(0), pod_config(1, profile=slow)) as pods:
        config = router_config(pods, admin={"slo_ttft_s": SLO_S})
        async with (
            RouterProcess(config) as router,
            running_envoy(mode, router, num_pods=2) as envoy,
            aiohttp.ClientSession() as http,
        ):

            async def ask(adapter: str, leaves_after_s: float | None = None) -> None:
                body = chat(adapter, stream=True, max_tokens=1)
                headers = {"content-type": "application/json"}
                url = f"{envoy.url}/v1/chat/completions"
                async with http.post(url, data=body, headers=headers) as answer:
                    assert answer.status == 200
                    if leaves_after_s is None:
                        await answer.read()
                    else:
                        await asyncio.sleep(leaves_after_s)
                        answer.close()

            async def are(attained: int, missed: int) -> bool:
                pattern = r'extproc_slo_requests_total\{.*"(true|false)".*\} (\d+)'
                found = dict(re.findall(pattern, await router.admin("/metrics")))
                return (int(found.get("true", 0)), int(found.get("false", 0))) == (attained, missed)

            await ask("only-0")
            await eventually(lambda: are(1, 0))
            await ask("only-1")
            await eventually(lambda: are(1, 1))
            await ask("only-1", leaves_after_s=2 * SLO_S)
            await eventually(lambda: are(1, 2))
