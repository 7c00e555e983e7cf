"""What was it like at 02:40: a real Prometheus answers each query of docs/history.md."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from tests.commandline import output_of
from tests.e2e.conftest import SLOW, behind_envoy, own_pods, router_config
from tests.e2e.prometheus import watched
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = (Path(__file__).parents[2] / "docs" / "history.md").read_text(encoding="utf-8")
QUERIES = dict(re.findall(r"^\| ([^|`]+) \| `(.+)` \|$", PAGE, re.M))
MODELS = ["only-0", "only-1", "only-2"]
RARE = {"waits in the queue, by reason", "pods that were ejected, by reason"}
"""Questions without an answer as long as nothing of the kind has happened."""


async def test_each_question_of_the_page_has_an_answer(http: aiohttp.ClientSession) -> None:
    async with (
        own_pods(3, profile=SLOW) as pods,
        behind_envoy(router_config(pods), http) as (router, client),
        watched(router) as prometheus,
    ):
        unanswered = set(QUERIES)

        async def are_answered() -> bool:
            asked = [client.chat(each, stream=True, max_tokens=10) for each in MODELS]
            assert {each.status for each in await asyncio.gather(*asked)} == {200}
            assert (await client.chat("nobody")).status == 404
            for question in [*unanswered]:
                if await prometheus.query(QUERIES[question].replace("MODEL", MODELS[0])):
                    unanswered.discard(question)
            return unanswered <= RARE

        await eventually(are_answered, within_s=90.0, every_s=0.5)

        [command] = re.findall(r"```sh\n(RANGE=.+?)```", PAGE, re.S)
        addresses = f"export PROMETHEUS={prometheus.url} MODEL={MODELS[0]}\n"
        command = command.replace("'02:00'", "'-295 seconds'").replace("'03:30'", "'+10 seconds'")
        assert " @[" in output_of("bash", "-c", addresses + command)

    assert set(QUERIES) > RARE
