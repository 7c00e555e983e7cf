"""Which of a client's control headers count, behind a real Envoy."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from extproc.request.controlheaders import MODEL_REWRITE
from tests.e2e.conftest import SLOW, own_pods, router_config, running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess, chat, set_header_first
from tests.waiting import eventually

BATCH = {"x-llm-d-inference-objective": "batch"}
NO_TIME = {"x-slo-ttft-ms": "soon"}


def seen(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json["error"]["code"] if answer.status >= 400 else None


@pytest.mark.long
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


NEW, OLD = MODEL_REWRITE
GATEWAYS, CLIENTS = "only-0", "only-1"


def gateway(router: RouterProcess, append_action: str, *, is_early: bool) -> EnvoyProcess:
    """An Envoy that sets `NEW` before it asks the router: by a filter, or before all filters."""
    bootstrap = yaml.safe_load(render(BootstrapOptions(routers=(router.address,))))
    set_header_first(bootstrap, NEW, GATEWAYS, append_action, is_early=is_early)
    return EnvoyProcess(yaml.safe_dump(bootstrap))


@pytest.mark.few(1)
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("trusted", ["model_rewrite", NEW])
async def test_a_header_that_a_client_adds_to_the_gateway_s_never_counts(
    http: aiohttp.ClientSession, pods: list[RunningPod], trusted: str, is_early: bool
) -> None:
    """The same name once and twice, in another spelling, and the other name: the gateway's value
    counts, or the request is refused. A pod tells by its name which value counted."""
    one = [(NEW, CLIENTS)]
    added: dict[str, list[tuple[str, str]]] = {
        "nothing": [],
        "one": one,
        "two": [*one, (NEW.upper(), CLIENTS)],
        "joined": [(NEW, f"{GATEWAYS},{CLIENTS}")],
        "the same": [(NEW, GATEWAYS)],
        "other name": [(OLD, CLIENTS)],
    }
    found: dict[str, dict[str, Any]] = {}
    async with RouterProcess(router_config(pods, request={"trusted_headers": [trusted]})) as router:
        for action in ("APPEND_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS_OR_ADD"):
            async with gateway(router, action, is_early=is_early) as envoy:
                client = Client(envoy.url, http)
                for name, headers in added.items():
                    body = chat("shared")
                    answer = await client.request("POST", "/v1/chat/completions", body, headers)
                    found.setdefault(action, {})[name] = answer.served_by or seen(answer)

    served, refused = "pod-0", (400, "invalid_header")
    by_other = {"other name": served if trusted == NEW else refused}
    appended, overwritten = found.values()
    assert overwritten == dict.fromkeys(added, served) | by_other
    assert appended == overwritten | dict.fromkeys(("one", "two", "joined"), refused)
