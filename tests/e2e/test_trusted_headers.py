"""Which of a client's control headers count, behind a real Envoy."""

from __future__ import annotations

import aiohttp

from extproc.envoyconfig import Mode
from tests.e2e.conftest import SLOW, own_pods, router_config, running_envoy
from tests.e2e.harness import Answer, Client, RouterProcess, eventually

BATCH = {"x-llm-d-inference-objective": "batch"}
NO_TIME = {"x-slo-ttft-ms": "soon"}


def seen(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json["error"]["code"] if answer.status >= 400 else None


async def test_a_header_counts_only_where_it_is_trusted(http: aiohttp.ClientSession) -> None:
    """A loaded pod sheds requests of `shared` for their route, so that it is known to be loaded."""
    admission = {"priorities": {"batch": -1}, "sheddable_max_kv_usage_ratio": 0.0}
    shedding = {"name": "shedding", "models": ["shared"], "priority": -1}
    found = {}
    async with own_pods(1, profile=SLOW) as pods:
        for trusted in ("objective", "slo"):
            config = router_config(
                pods,
                admission=admission,
                routes=[shedding],
                request={"trusted_headers": [trusted]},
            )
            async with (
                RouterProcess(config) as router,
                running_envoy(Mode.ORIGINAL_DST, router) as envoy,
                Client(envoy.url, http).streaming("only-0", max_tokens=2000),
            ):
                client = Client(envoy.url, http)

                async def is_loaded(client: Client = client) -> bool:
                    return (await client.chat("shared")).status == 429

                await eventually(is_loaded)
                found[trusted] = [
                    seen(await client.chat("only-0", headers=headers, max_tokens=1))
                    for headers in (BATCH, NO_TIME, {})
                ]

        reached = {name for each in pods[0].pod.last_requests for name, _ in each["headers"]}

    assert found["objective"] == [(429, "saturated"), (200, None), (200, None)]
    assert found["slo"] == [(200, None), (400, "invalid_header"), (200, None)]
    assert not reached & (BATCH | NO_TIME).keys()
