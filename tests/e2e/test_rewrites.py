"""Aliases, canaries and the header that names a model, behind a real Envoy."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.charts import Chart, EppProcess, gateway_config
from tests.e2e.conftest import behind_envoy, own_pods, router_config, running_envoy, seen_by
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat, h2_request
from tests.waiting import eventually

LONG = "an-alias-that-is-longer-than-the-name-of-its-adapter"
ROUTES = [
    {"name": "alias", "models": [LONG, "s"], "targets": [{"model": "only-1"}]},
    {
        "name": "canary",
        "models": ["canary"],
        "targets": [{"model": "only-0", "weight": 90}, {"model": "only-1", "weight": 10}],
    },
]
REWRITE = {"x-llm-d-model-name-rewrite": "only-2"}
PADDINGS = [0, 107_000, 1_500_000]
FORM = "multipart/form-data; boundary=b"


def config(pods: list[RunningPod], **request: Any) -> dict[str, Any]:
    return router_config(pods, routes=ROUTES, request=request)


@dataclass(frozen=True)
class Gateway:
    """An Envoy with its router, and how the bodies of requests come."""

    kind: str
    envoy: EnvoyProcess
    client: Client

    @property
    def restores(self) -> bool:
        """Whether responses name what the client wrote."""
        return self.kind in ("epp", "full-duplex")


SMOKE = pytest.param("buffered", marks=pytest.mark.smoke)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[SMOKE, "epp", "buffered-partial", "asked-for", "full-duplex"],
)
async def gateway(
    request: pytest.FixtureRequest, pods: list[RunningPod], http: aiohttp.ClientSession
) -> AsyncIterator[Gateway]:
    kind, asks = request.param, request.param == "asked-for"
    async with AsyncExitStack() as stack:
        if kind == "epp":
            router: RouterProcess = EppProcess(config(pods))
            await stack.enter_async_context(router)
            text = gateway_config(Chart.ORIGINAL_DST, router.address, pods=[])
            envoy = await stack.enter_async_context(EnvoyProcess(text))
            await eventually(envoy.has_checked_router)
        else:
            router = RouterProcess(config(pods, allow_mode_override=asks, restore_model=True))
            await stack.enter_async_context(router)
            mode = Mode.FULL_DUPLEX if kind == "full-duplex" else Mode.ORIGINAL_DST
            body = BodyDelivery.STREAMED_STRICT if asks else BodyDelivery(kind)
            envoy = await stack.enter_async_context(
                running_envoy(mode, router, request_body=body, allow_mode_override=asks)
            )
        yield Gateway(kind, envoy, Client(envoy.url, http))


@pytest.mark.parametrize("alias", [LONG, "s"], ids=["longer", "shorter"])
@pytest.mark.parametrize("padding_bytes", PADDINGS)
async def test_an_alias_is_served_by_its_target_and_the_length_is_right(
    gateway: Gateway, pods: list[RunningPod], alias: str, padding_bytes: int
) -> None:
    answer = await gateway.client.chat(alias, padding_bytes=padding_bytes)

    assert (answer.status, answer.served_by) == (200, "pod-1")
    assert answer.json["model"] == (alias if gateway.restores else "only-1")
    new_length = len(chat("only-1", padding_bytes=padding_bytes))
    assert seen_by(pods[1]).get("content-length", str(new_length)) == str(new_length)


async def test_a_body_in_chunks_over_http2_and_with_trailers_is_rewritten(
    gateway: Gateway,
) -> None:
    """Of a buffered part with trailers nobody says that it is whole."""
    answers = [
        await h2_request(gateway.envoy.port, chat("s"), has_trailers=has_trailers)
        for has_trailers in (False, True)
    ]

    last = (500, "") if gateway.kind == "buffered-partial" else (200, "pod-1")
    assert [(answer.status, answer.served_by) for answer in answers] == [(200, "pod-1"), last]


async def test_a_form_is_rewritten(gateway: Gateway, pods: list[RunningPod]) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ns\r\n--b--\r\n'
    path, headers = "/v1/audio/transcriptions", {"content-type": FORM}
    await gateway.client.request("POST", path, body, headers)

    assert seen_by(pods[1])["content-type"] == FORM


async def test_other_models_go_on_as_they_are(gateway: Gateway) -> None:
    answers = [await gateway.client.chat(model) for model in ("only-0", "only-2")]

    assert [answer.served_by for answer in answers] == ["pod-0", "pod-2"]
    assert [answer.json["model"] for answer in answers] == ["only-0", "only-2"]


MODELS = re.compile(rb'"model": ?"([^"]*)"')


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_responses_differ_from_the_pod_s_own_in_their_model_alone(
    gateway: Gateway, path: str, question: dict[str, Any], is_streamed: bool
) -> None:
    body = {**question, "max_tokens": 20, "stream": is_streamed}
    answers = [
        await gateway.client.request("POST", path, json.dumps({**body, "model": model}).encode())
        for model in ("only-1", LONG)
    ]

    plain, alias = (set(MODELS.findall(answer.body)) for answer in answers)
    assert plain == {b"only-1"}
    assert alias == ({LONG.encode()} if gateway.restores else {b"only-1"})
    assert len({len(answer.body.splitlines()) for answer in answers}) == 1


@pytest.mark.parametrize("gateway", [SMOKE], indirect=True)
async def test_a_canary_gets_its_tenth(gateway: Gateway) -> None:
    num_asked = 600
    answers = await gateway.client.ask(num_asked, "canary", max_tokens=1)
    served = Counter(answer.served_by for answer in answers)

    assert served.total() == served["pod-0"] + served["pod-1"] == num_asked
    assert served["pod-1"] / num_asked == pytest.approx(0.1, abs=0.05)  # four standard deviations


async def test_an_unknown_model_is_refused_by_the_name_that_the_client_wrote(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    lost = {"name": "lost", "models": ["mine"], "targets": [{"model": "gone"}]}
    async with (
        RouterProcess(router_config(pods, routes=[lost])) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        answer = await Client(envoy.url, http).chat("mine")

    assert (answer.status, answer.error_code) == (404, "model_not_found")
    assert "`mine`" in answer.json["error"]["message"]


async def test_a_header_rewrites_where_it_is_trusted_and_no_pod_sees_it(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    answer = await gateway.client.chat("only-0", headers=REWRITE)
    by_rule = await gateway.client.chat("s", headers=REWRITE)

    expected = "pod-2" if gateway.kind == "epp" else "pod-0"
    assert (answer.served_by, by_rule.served_by) == (expected, "pod-1")
    assert not seen_by(pods[1]).keys() & REWRITE.keys()
    assert answer.json["model"] == "only-0"


async def test_streamed_bodies_are_refused_where_they_would_need_another_model(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with (
        behind_envoy(config(pods), http, request_body=BodyDelivery.STREAMED) as (_, client),
    ):
        alias, plain = await client.chat("s"), await client.chat("only-1")

    assert (alias.status, alias.error_code) == (500, "model_not_rewritable")
    assert plain.served_by == "pod-1"


async def test_a_generic_route_serves_a_body_without_a_model(http: aiohttp.ClientSession) -> None:
    every = {"name": "all", "models": ["*"], "targets": [{"model": "shared"}]}
    async with (
        own_pods(1) as pods,
        RouterProcess(router_config(pods, routes=[every])) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        client = Client(envoy.url, http)
        answers = [
            await client.request("POST", "/v1/chat/completions", body),
            await client.chat("whatever"),
        ]

    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.json["model"] for answer in answers] == ["shared", "shared"]
