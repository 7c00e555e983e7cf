"""The endpoint picker protocol, statement by statement, through a real Envoy as charts set it up.

docs/epp-protocol.md says which test checks which statement.
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from grpc import aio

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.charts import (
    CHOSEN_HEADER,
    DESTINATION,
    HEALTH_NAMES,
    NOT_SERVING,
    PLAIN_CHARTS,
    SCORES_HEADER,
    SERVING,
    SUBSET_TEXT_HEADER,
    Chart,
    EppProcess,
    gateway_config,
    health,
    subset,
)
from tests.e2e.conftest import (
    NUM_PODS,
    SLOW,
    own_pods,
    pages_of,
    pod_config,
    router_config,
    seen_by,
)
from tests.e2e.harness import Answer, Client, EnvoyProcess, chat, h2_request
from tests.e2e.test_registration import WRITTEN_PATHS, came_through_envoy, status_of
from tests.fakepods import running_pods
from tests.pki import Pki
from tests.waiting import eventually

# Several processes start in each of some tests; on a busy machine each may take half a minute.
pytestmark = pytest.mark.timeout(240)

MODELS = [f"only-{number}" for number in range(NUM_PODS)]
SERVERS = [f"pod-{number}" for number in range(NUM_PODS)]
PATH = "/v1/chat/completions"
SESSION = "x-session"
HINTS = {
    "x-llm-d-inference-objective": "batch",
    "x-llm-d-inference-fairness-id": "team-a",
    "x-llm-d-slo-ttft-ms": "200",
    "x-llm-d-slo-tpot-ms": "20.5",
    "x-gateway-inference-objective": "batch",
    "x-gateway-inference-fairness-id": "team-a",
    "x-llm-d-model-name-rewrite": "only-1",
    "x-gateway-model-name-rewrite": "only-1",
    "x-llm-d-video-fps": "24",
}


@dataclass(frozen=True)
class Gateway:
    """A running Envoy with its router."""

    chart: Chart
    envoy: EnvoyProcess
    client: Client
    router: EppProcess


@asynccontextmanager
async def running(
    chart: Chart, router: EppProcess, pods: list[RunningPod], **options: Any
) -> AsyncIterator[EnvoyProcess]:
    """An Envoy whose health checks have found the router over TLS."""
    addresses = [pod.address for pod in pods]
    config = gateway_config(chart, router.address, pods=addresses, **options)
    async with EnvoyProcess(config) as envoy:
        await eventually(envoy.has_checked_router)
        yield envoy


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def epp(pods: list[RunningPod]) -> AsyncIterator[EppProcess]:
    """A router without fallbacks: original-destination clusters dial one address."""
    async with EppProcess(router_config(pods, request={"session_header": SESSION})) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def epp_with_fallbacks(pods: list[RunningPod]) -> AsyncIterator[EppProcess]:
    config = router_config(
        pods, request={"session_header": SESSION}, destination={"num_fallbacks": 2}
    )
    async with EppProcess(config, "--emit-endpoint-scores") as process:
        yield process


def charts(*params: Chart) -> Any:
    """A fixture of gateways as these charts configure them."""

    @pytest_asyncio.fixture(scope="module", loop_scope="session", params=params, ids=str)
    async def gateway(
        request: pytest.FixtureRequest,
        pods: list[RunningPod],
        epp: EppProcess,
        epp_with_fallbacks: EppProcess,
        http: aiohttp.ClientSession,
    ) -> AsyncIterator[Gateway]:
        router = epp_with_fallbacks if request.param is Chart.OVERRIDE_HOST else epp
        async with running(request.param, router, pods) as envoy:
            yield Gateway(request.param, envoy, Client(envoy.url, http), router)

    return gateway


gateway = charts(*PLAIN_CHARTS)
# These send metadata to the router and use those that it returns.
hinting_gateway = charts(Chart.ORIGINAL_DST_METADATA, Chart.OVERRIDE_HOST)


def refused(answer: Answer) -> tuple[int, object]:
    """The status and code of an error that the router made."""
    assert answer.served_by == ""
    return answer.status, answer.error_code


# --- ext_proc, streaming ---------------------------------------------------------------------


@pytest.mark.parametrize("padding_bytes", [0, 200_000, 1_500_000])
async def test_full_duplex_requests_go_where_their_adapter_is(
    gateway: Gateway, padding_bytes: int
) -> None:
    answers = [await gateway.client.chat(model, padding_bytes=padding_bytes) for model in MODELS]

    assert [answer.status for answer in answers] == [200] * NUM_PODS
    assert [answer.served_by for answer in answers] == SERVERS
    assert [answer.json["model"] for answer in answers] == MODELS


async def test_tokens_pass_one_by_one_in_full_duplex(http: aiohttp.ClientSession) -> None:
    """The first is there long before the last."""
    async with (
        own_pods(1, profile=SLOW) as [pod],
        EppProcess(router_config([pod])) as router,
        running(Chart.ORIGINAL_DST, router, [pod]) as envoy,
        Client(envoy.url, http).streaming("only-0", max_tokens=40) as got,
    ):
        in_flight = await router.in_flight()
        rest = await got.content.read()

    assert in_flight == {pod.address: 1}
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_trailers_pass_in_full_duplex(gateway: Gateway) -> None:
    if gateway.chart is Chart.OVERRIDE_HOST:
        pytest.skip("with retries Envoy 1.40 sends such a body twice (envoyproxy/envoy 45470)")
    answer = await h2_request(gateway.envoy.port, chat("only-1"), has_trailers=True)

    assert (answer.status, answer.served_by) == (200, "pod-1")


async def test_nothing_stays_in_flight_and_no_stream_fails(gateway: Gateway) -> None:
    for model in MODELS:
        await gateway.client.chat(model, stream=True)

    await eventually(gateway.router.has_none_in_flight)
    stats = await gateway.envoy.stats("ext_proc")
    assert stats["http.http.ext_proc.streams_started"] > 0
    assert stats["http.http.ext_proc.streams_failed"] == 0
    assert stats["http.http.ext_proc.spurious_msgs_received"] == 0


# --- the subset ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "text"])
async def test_a_pick_is_always_inside_the_subset(
    hinting_gateway: Gateway, pods: list[RunningPod], form: str
) -> None:
    allowed = [pods[0].address, pods[2].address]
    headers = subset(*allowed) if form == "list" else {SUBSET_TEXT_HEADER: ",".join(allowed)}
    answers = [await hinting_gateway.client.chat("shared", headers=headers) for _ in range(12)]

    assert {answer.served_by for answer in answers} <= {"pod-0", "pod-2"}
    assert {answer.status for answer in answers} == {200}
    chosen = {address for answer in answers for address in answer.headers[CHOSEN_HEADER].split(",")}
    assert chosen <= set(allowed)


async def test_a_subset_of_one_is_served_by_that_one(
    hinting_gateway: Gateway, pods: list[RunningPod]
) -> None:
    answers = [
        await hinting_gateway.client.chat("shared", headers=subset(pod.address)) for pod in pods
    ]

    assert [answer.served_by for answer in answers] == SERVERS


async def test_a_request_without_a_body_has_its_subset_too(
    hinting_gateway: Gateway, pods: list[RunningPod]
) -> None:
    """A session's stored response: its pod has to be in the subset."""
    client = hinting_gateway.client
    session = {SESSION: f"s-{hinting_gateway.chart}"}
    first = await client.request(
        "POST",
        "/v1/responses",
        json.dumps({"model": "shared", "input": "hi", "max_output_tokens": 2}).encode(),
        session | subset(pods[1].address),
    )
    inside = await client.request(
        "GET", "/v1/responses/resp_1", headers=session | subset(pods[1].address)
    )
    outside = await client.request(
        "GET", "/v1/responses/resp_1", headers=session | subset(pods[0].address)
    )
    nobody = await client.request("GET", "/v1/responses/resp_1", headers=session | subset())

    assert first.served_by == "pod-1"
    assert seen_by(pods[1])[DESTINATION].split(",")[0] == pods[1].address
    assert inside.headers[CHOSEN_HEADER].split(",")[0] == pods[1].address
    assert refused(outside) == (400, "stored_response_unsupported")
    assert refused(nobody) == (503, "no_endpoints")


async def test_the_subset_is_ignored_where_the_flag_says_so(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    config = router_config(pods)
    async with (
        EppProcess(config, "--disable-endpoint-subset-filter") as router,
        running(Chart.ORIGINAL_DST_METADATA, router, pods) as envoy,
    ):
        answer = await Client(envoy.url, http).chat("only-1", headers=subset(pods[0].address))

    assert (answer.status, answer.served_by) == (200, "pod-1")


# --- the destination -------------------------------------------------------------------------


async def test_the_destination_is_set_as_header_and_as_metadata_alike(
    hinting_gateway: Gateway, pods: list[RunningPod]
) -> None:
    for model, pod in zip(MODELS, pods, strict=True):
        answer = await hinting_gateway.client.chat(model)

        chosen = answer.headers[CHOSEN_HEADER]
        assert chosen == seen_by(pod)[DESTINATION]
        assert chosen.split(",")[0] == pod.address


@pytest.mark.parametrize("chart", [Chart.SUBSET_OR_NONE, Chart.SUBSET_OR_ANY], ids=str)
@pytest.mark.parametrize("flags", [[], ["--emit-endpoint-scores"]], ids=["plain", "scores"])
async def test_a_subset_load_balancer_always_finds_the_chosen_pod(
    pods: list[RunningPod], http: aiohttp.ClientSession, chart: Chart, flags: list[str]
) -> None:
    """To it every key of `envoy.lb` is a criterion."""
    async with (
        EppProcess(router_config(pods, policy={"name": "random"}), *flags) as router,
        running(chart, router, pods) as envoy,
    ):
        client = Client(envoy.url, http)
        answers = [await client.chat("shared") for _ in range(24)]

    names = {pod.address: pod.name for pod in pods}
    assert {answer.status for answer in answers} == {200}
    assert [answer.served_by for answer in answers] == [
        names[answer.headers[CHOSEN_HEADER]] for answer in answers
    ]
    assert {answer.served_by for answer in answers} == set(SERVERS)
    assert all((SCORES_HEADER in answer.headers) == bool(flags) for answer in answers)


async def test_fallbacks_follow_in_order_and_none_twice(
    hinting_gateway: Gateway, pods: list[RunningPod]
) -> None:
    answer = await hinting_gateway.client.chat("shared")

    addresses = [pod.address for pod in pods]
    chosen = answer.headers[CHOSEN_HEADER].split(",")
    has_fallbacks = hinting_gateway.chart is Chart.OVERRIDE_HOST
    assert chosen[0] == addresses[SERVERS.index(answer.served_by)]
    assert sorted(chosen) == (sorted(addresses) if has_fallbacks else chosen[:1])


async def test_a_destination_that_a_client_sends_does_not_steer(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    """Charts remove no headers: every response of ours overwrites them or ends the request."""
    headers = {DESTINATION: pods[0].address}
    routed = await gateway.client.chat("only-1", headers=headers)
    others = [
        await gateway.client.request(method, path, headers=headers)
        for method, path in (("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/sleep"))
    ]

    assert routed.served_by == "pod-1"
    assert [answer.served_by for answer in others] == [""] * 3
    assert [answer.status for answer in others] == [404, 200, 404]


async def test_the_paths_of_registration_reach_no_pod(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    """Charts have routes for all paths, and a gateway need not bring them into one form."""
    for pod in pods:
        pod.pod.last_requests.clear()
    for path in WRITTEN_PATHS:
        await status_of(gateway.envoy, "POST", path)
    await gateway.client.chat("shared")

    assert came_through_envoy(pods) == ["/v1/chat/completions"]


async def test_scores_are_sent_by_rank_where_the_flag_says_so(hinting_gateway: Gateway) -> None:
    """The router with fallbacks has the flag, the other has not."""
    answer = await hinting_gateway.client.chat("shared")

    if hinting_gateway.chart is not Chart.OVERRIDE_HOST:
        assert SCORES_HEADER not in answer.headers
        return
    chosen = answer.headers[CHOSEN_HEADER].split(",")
    scores = json.loads(answer.headers[SCORES_HEADER])
    assert sorted(scores, key=scores.__getitem__, reverse=True) == chosen
    assert scores[chosen[0]] == 1
    assert all(0 < score <= 1 for score in scores.values())


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chart", list(Chart))
async def test_without_a_ready_endpoint_it_is_503(
    chart: Chart, pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with (
        EppProcess({"discovery": {"static": []}, "request": {"max_hold_s": 0.5}}) as router,
        running(chart, router, pods) as envoy,
    ):
        answer = await Client(envoy.url, http).chat("shared", padding_bytes=200_000)

    assert refused(answer) == (503, "no_endpoints")


async def test_a_sheddable_request_is_429_while_the_pods_are_loaded(
    http: aiohttp.ClientSession,
) -> None:
    admission = {"priorities": {"batch": -1}, "sheddable_max_kv_usage_ratio": 0.0}
    sheddable = {"x-llm-d-inference-objective": "batch"}
    async with (
        own_pods(1, profile=SLOW) as pods,
        EppProcess(router_config(pods, admission=admission)) as router,
        running(Chart.ORIGINAL_DST, router, pods) as envoy,
    ):
        client = Client(envoy.url, http)
        idle = await client.chat("only-0", headers=sheddable)
        async with Client(envoy.url, http).streaming("only-0", max_tokens=2000):

            async def shed() -> Answer | None:
                answer = await client.chat("only-0", headers=sheddable)
                return answer if answer.status != 200 else None

            answer = await eventually(shed)
            other = await client.chat("only-0")

        async def is_served_again() -> bool:
            return (await client.chat("only-0", headers=sheddable)).status == 200

        await eventually(is_served_again)

    assert idle.status == 200
    assert refused(answer) == (429, "saturated")
    assert answer.headers["retry-after"] == "1"
    assert other.status == 200


# --- who served ------------------------------------------------------------------------------


async def test_the_endpoint_that_served_is_counted_as_busy(
    http: aiohttp.ClientSession,
) -> None:
    """The first of the list was stopped; Envoy dials the second and says so."""
    stale = {"interval_s": 60, "expiry_s": 600, "models_interval_s": 600}
    session = {SESSION: "s"}
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(own_pods(2, profile=SLOW))
        (server,) = await stack.enter_async_context(running_pods(pod_config(2)))
        config = router_config(
            pods,
            request={"session_header": SESSION},
            destination={"num_fallbacks": 1},
            pods=pages_of(server),
            scrape=stale,  # the router does not notice before the test is over
        )
        router = await stack.enter_async_context(EppProcess(config))
        envoy = await stack.enter_async_context(running(Chart.OVERRIDE_HOST, router, pods))
        first = await Client(envoy.url, http).chat("shared", headers=session)
        dead = SERVERS.index(first.served_by)
        other = 1 - dead
        await pods[dead].stop()
        async with Client(envoy.url, http).streaming(
            "shared", max_tokens=2000, headers=session
        ) as got:
            chosen = got.headers[CHOSEN_HEADER].split(",")
            counted = await router.in_flight()
        await eventually(router.has_none_in_flight)

    assert chosen == [pods[dead].address, pods[other].address]
    assert counted == {pods[dead].address: 0, pods[other].address: 1}


# --- control headers -------------------------------------------------------------------------


async def test_control_headers_do_not_reach_a_pod(gateway: Gateway, pods: list[RunningPod]) -> None:
    answer = await gateway.client.chat("only-1", headers={**HINTS, "x-other": "kept"})

    seen = seen_by(pods[1])
    assert answer.served_by == "pod-1"
    assert HINTS.keys() & seen.keys() == set()
    assert seen["x-other"] == "kept"


# --- health, TLS, ports ----------------------------------------------------------------------


async def test_every_health_name_is_served_on_a_plain_port(epp: EppProcess) -> None:
    async with aio.insecure_channel(epp.health_address) as channel:
        statuses = [await health(channel, name) for name in HEALTH_NAMES]
        with pytest.raises(aio.AioRpcError) as caught:
            await health(channel, "nobody")

    assert statuses == [SERVING] * len(HEALTH_NAMES)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_it_is_alive_and_not_ready_before_the_pool_is_known(tmp_path: Path) -> None:
    config = {"discovery": {"file": str(tmp_path / "not-there-yet.yaml")}}
    router = EppProcess(config)
    try:
        with pytest.raises(AssertionError):
            await router.start(within_s=0.0)

        async def is_alive() -> bool:
            try:
                async with aio.insecure_channel(router.health_address) as channel:
                    return await health(channel, "liveness") == SERVING
            except aio.AioRpcError:
                return False

        await eventually(is_alive)
        async with aio.insecure_channel(router.health_address) as channel:
            before = await health(channel, "readiness")
            ext_proc = await health(channel, "envoy.service.ext_proc.v3.ExternalProcessor")
            (tmp_path / "not-there-yet.yaml").write_text("[]")

            async def is_ready() -> bool:
                return await health(channel, "readiness") == SERVING

            await eventually(is_ready)
    finally:
        await router.close()

    assert (before, ext_proc) == (NOT_SERVING, NOT_SERVING)


async def test_while_it_drains_it_is_alive_and_not_ready_and_responses_go_on(
    http: aiohttp.ClientSession,
) -> None:
    async with (
        own_pods(1, profile=SLOW) as pods,
        EppProcess(router_config(pods)) as router,
        running(Chart.ORIGINAL_DST, router, pods) as envoy,
        Client(envoy.url, http).streaming("only-0", max_tokens=60) as got,
        aio.insecure_channel(router.health_address) as channel,
    ):
        router.send(signal.SIGTERM)

        async def is_draining() -> bool:
            return await health(channel, "readiness") == NOT_SERVING

        await eventually(is_draining)
        alive = await health(channel, "liveness")
        rest = await got.content.read()
        status = await router.wait()

    assert alive == SERVING
    assert rest.endswith(b"data: [DONE]\n\n")
    assert status == 0


async def test_tls_is_on_with_a_certificate_made_at_the_start(gateway: Gateway) -> None:
    await gateway.client.chat("only-1")

    stats = await gateway.envoy.stats("cluster.router.ssl")
    assert stats["cluster.router.ssl.handshake"] > 0
    async with aio.insecure_channel(gateway.router.address) as channel:
        with pytest.raises(aio.AioRpcError):
            await health(channel, "")


async def test_a_certificate_of_the_user_s_is_served_from_its_folder(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    pki = Pki(tmp_path)
    certificate, key = pki.issue("server")
    certificate.rename(tmp_path / "tls.crt")
    key.rename(tmp_path / "tls.key")
    async with (
        EppProcess(router_config(pods), "--cert-path", str(tmp_path)) as router,
        running(Chart.ORIGINAL_DST, router, pods, ca_file=pki.ca) as envoy,
    ):
        answer = await Client(envoy.url, http).chat("only-1")
        stats = await envoy.stats("cluster.router.ssl.fail")

    assert (answer.status, answer.served_by) == (200, "pod-1")
    assert not any(stats.values())


async def test_a_changed_file_is_applied_under_the_flags(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with (
        EppProcess(router_config(pods)) as router,
        running(Chart.ORIGINAL_DST, router, pods) as envoy,
    ):
        client = Client(envoy.url, http)
        before = await client.chat("shared")
        router.change_config(admission={"max_pending_per_endpoint": 1}, policy={"name": "random"})
        await eventually(lambda: "configuration applied: policy random" in router.log)
        after = await client.chat("shared")
        log = router.log

    assert (before.status, after.status) == (200, 200)
    assert "needs a restart" not in log  # the ports of the flags are still those of before


async def test_two_routers_are_both_ready(
    pods: list[RunningPod],
) -> None:
    """With the flag for leader election, too: every replica serves."""
    flag = "--ha-enable-leader-election"
    async with (
        EppProcess(router_config(pods), flag) as one,
        EppProcess(router_config(pods), flag) as two,
        aio.insecure_channel(one.health_address) as first,
        aio.insecure_channel(two.health_address) as second,
    ):
        statuses = [await health(each, "readiness") for each in (first, second)]
        log = one.log

    assert statuses == [SERVING, SERVING]
    assert "every replica serves" in log
