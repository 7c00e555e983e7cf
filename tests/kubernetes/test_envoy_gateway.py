"""The Envoy Gateway overlays under Envoy Gateway's own controller.

What it says of every object, and traffic through the Envoy that it configures, with two routers of
the overlay's own configuration, as the overlay's ServiceAccount, and three fake pods.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import pod_config
from tests.e2e.forwarder import Switch
from tests.e2e.harness import Client
from tests.e2e.load import Load
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.envoygateway import (
    CONTROLLER_NAME,
    WITHIN_S,
    Controller,
    Proxy,
    own_api_server,
    why_not,
)
from tests.kubernetes.installed import (
    LISTENER_PORT,
    ORIGINAL,
    OVERRIDE,
    PODS,
    PROXY,
    REWRITE,
    ROUTERS,
    Installed,
    InstalledRouter,
    address_of,
    apply,
    put_pods,
    put_routers,
)
from tests.kubernetes.manifests import MANIFESTS, copied
from tests.kubernetes.network import add_address, remove_address
from tests.pages import blocks
from tests.waiting import eventually

PAGE = MANIFESTS.parent / "docs" / "envoy-gateway.md"
CONDITIONS = {
    "GatewayClass Accepted": "True",
    "EnvoyProxy Accepted": "True",
    "Gateway Accepted": "True",
    "Gateway Programmed": "True",
    "Gateway listener http Programmed": "True",
    "Gateway listener http Accepted": "True",
    "Gateway listener http ResolvedRefs": "True",
    "Gateway listener http routes": "1",
    "HTTPRoute Accepted": "True",
    "HTTPRoute ResolvedRefs": "True",
    "EnvoyExtensionPolicy Accepted": "True",
    "BackendTrafficPolicy Accepted": "True",
    "ClientTrafficPolicy Accepted": "True",
}


def conditions_of(installed: Installed) -> dict[str, str]:
    """What Envoy Gateway says where all is well: stored responses have retries of their own."""
    if installed.namespace.endswith(ORIGINAL):
        return CONDITIONS
    return {**CONDITIONS, "BackendTrafficPolicy Overridden": "True"}


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),  # the first waits for all programs, on a machine with other work
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """An API server of these tests' own, in their network."""
    with own_api_server(*PODS, *ROUTERS, PROXY) as server:
        gateway_class = {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "GatewayClass",
            "metadata": {"name": "eg"},
            "spec": {"controllerName": CONTROLLER_NAME},
        }
        server.kubectl("create", "-f", "-", input=json.dumps(gateway_class))
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def controller(server: ApiServer) -> AsyncIterator[Controller]:
    controller = Controller(server)
    try:
        await controller.start()
        yield controller
    finally:
        await controller.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods(server: ApiServer) -> AsyncIterator[list[RunningPod]]:
    """Pod N has an adapter of its own, `only-N`, and `shared`."""
    async with running_pods(*map(pod_config, range(len(PODS))), hosts=PODS, port=8000) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[OVERRIDE, ORIGINAL])
async def installed(
    request: pytest.FixtureRequest,
    server: ApiServer,
    controller: Controller,
    pods: list[RunningPod],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Installed]:
    namespace = f"of-{request.param}"
    folder = copied(tmp_path_factory.mktemp("overlay"), namespace) / "overlays" / request.param
    text = await asyncio.to_thread(apply, server, namespace, folder)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(server, namespace))
        await put_pods(cluster)
        await put_routers(cluster, ROUTERS)
        # As kube-proxy makes the address of a Service: connections go to a ready pod.
        service = await stack.enter_async_context(Switch())
        log_address = await address_of(cluster, "extproc-log")
        await service.to(*(f"{ip}:9002" for ip in ROUTERS), listen=log_address)
        routers = [InstalledRouter(server, namespace, text, ip) for ip in ROUTERS]
        for router in routers:
            stack.push_async_callback(router.close)
        await asyncio.gather(*(router.start() for router in routers))
        proxy = Proxy(controller, namespace, PROXY)
        stack.push_async_callback(proxy.close)
        await proxy.start()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = Client(f"http://{PROXY}:{LISTENER_PORT}", http)
        yield Installed(namespace, controller, cluster, pods, routers, proxy, client)


# --- what the controller says ----------------------------------------------------------------


async def test_the_controller_finds_nothing_wrong(installed: Installed) -> None:
    await installed.conditions_become(conditions_of(installed))


async def test_running_responses_outlast_a_change_of_the_listener(installed: Installed) -> None:
    """Envoy drains for as long as the longest generation takes."""
    arguments = installed.proxy.arguments
    assert arguments[arguments.index("--drain-time-s") + 1] == "600"


async def test_proxies_are_spread_over_nodes_and_a_drain_takes_one_at_a_time(
    installed: Installed,
) -> None:
    made = partial(installed.controller.made_for, namespace=installed.namespace)
    (deployment,) = await asyncio.to_thread(made, "deployment")
    (budget,) = await asyncio.to_thread(made, "poddisruptionbudget")
    template = deployment["spec"]["template"]
    spread = template["spec"]["topologySpreadConstraints"]

    assert budget["spec"]["maxUnavailable"] == 1
    assert len(spread) == 2
    for each in spread:
        assert (
            each["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        )


# --- traffic ---------------------------------------------------------------------------------


async def test_requests_go_to_the_pod_that_has_the_adapter(installed: Installed) -> None:
    for number in (2, 0, 1, 2):
        answer = await installed.client.chat(f"only-{number}")
        assert (answer.status, answer.served_by) == (200, f"pod-{number}")


async def test_a_prompt_of_25_mb_passes_and_one_of_28_does_not(installed: Installed) -> None:
    passes = await installed.client.chat("only-1", padding_bytes=25_000_000)
    refused = await installed.client.chat("only-1", padding_bytes=28_000_000)

    assert (passes.status, passes.served_by) == (200, "pod-1")
    assert (refused.status, refused.error_code) == (413, "body_too_large")


async def test_a_response_is_streamed_to_its_end(installed: Installed) -> None:
    answer = await installed.client.chat("only-1", stream=True, max_tokens=50)
    assert (answer.status, answer.served_by) == (200, "pod-1")
    assert answer.body.strip().endswith(b"data: [DONE]")


async def test_models_are_listed_and_one_that_nobody_has_is_404(installed: Installed) -> None:
    models = await installed.client.request("GET", "/v1/models")
    unknown = await installed.client.chat("nobody")

    assert {"base", "shared", "only-0", "only-2"} <= {card["id"] for card in models.json["data"]}
    assert (unknown.status, unknown.error_code) == (404, "model_not_found")


async def test_a_client_does_not_steer(installed: Installed) -> None:
    for name in ("x-gateway-destination-endpoint", "x-envoy-original-dst-host"):
        answer = await installed.client.chat("only-2", headers={name: f"{PODS[0]}:8000"})
        assert (answer.status, answer.served_by) == (200, "pod-2")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/load_lora_adapter", 404), ("/v1%2Fload_lora_adapter", 400)]
)
async def test_envoy_s_own_errors_for_paths_are_not_in_openai_shape(
    installed: Installed, path: str, status: int
) -> None:
    """As docs/envoy-gateway.md says: Envoy refuses them before any route's policy."""
    answer = await installed.client.request("POST", path, b"{}")
    assert (answer.status, answer.served_by) == (status, "")
    assert "application/json" not in answer.headers.get("content-type", "")


async def test_the_routers_learn_of_the_end_of_each_request(installed: Installed) -> None:
    """By the access log, over the address of a Service; the router that gets it passes it on."""

    async def log_entries() -> float:
        name = "extproc_access_log_lag_seconds_count"
        return sum([await router.counter(name) for router in installed.routers])

    before = await log_entries()
    for number in (0, 1, 2, 0, 1, 2):
        assert (await installed.client.chat(f"only-{number}")).status == 200

    async def all_logged() -> bool:
        return await log_entries() >= before + 6

    await eventually(all_logged)
    for router in installed.routers:
        await eventually(router.has_none_in_flight)


# --- who sets the control headers, as docs/epp.md says -------------------------------------------


@contextmanager
def patched(installed: Installed, kind: str, *changes: dict[str, Any]) -> Iterator[None]:
    """An object of the overlay with changes, which are taken back."""
    kubectl = partial(installed.controller.server.kubectl, "-n", installed.namespace)
    before = json.loads(kubectl("get", kind, "llm", "-o", "json"))["spec"]
    kubectl("patch", kind, "llm", "--type=json", "-p", json.dumps(changes))
    try:
        yield
    finally:
        whole = [{"op": "replace", "path": "/spec", "value": before}]
        kubectl("patch", kind, "llm", "--type=json", "-p", json.dumps(whole))


async def chosen(installed: Installed, model: str, **headers: str) -> str:
    """The pod that a client's request went to, whose header says `only-1`."""
    answer = await installed.client.chat(model, headers={REWRITE: "only-1", **headers})
    return answer.served_by


async def test_a_client_traffic_policy_sets_and_removes_headers_before_the_router(
    installed: Installed,
) -> None:
    early = "/spec/headers/earlyRequestHeaders"
    sets = {"op": "add", "path": f"{early}/set", "value": [{"name": REWRITE, "value": "only-0"}]}
    removes = {"op": "add", "path": f"{early}/remove/-", "value": REWRITE}
    assert await chosen(installed, "shared") == "pod-1", "a client chooses if nobody does"

    async def is_chosen(model: str, pod: str) -> bool:
        return await chosen(installed, model) == pod

    with patched(installed, "clienttrafficpolicy", sets):
        await eventually(lambda: is_chosen("shared", "pod-0"), within_s=WITHIN_S)
    with patched(installed, "clienttrafficpolicy", removes):
        await eventually(lambda: is_chosen("only-2", "pod-2"), within_s=WITHIN_S)
    await eventually(lambda: is_chosen("only-2", "pod-1"), within_s=WITHIN_S)


async def test_a_key_of_a_security_policy_says_who_asks_before_the_router(
    installed: Installed,
) -> None:
    kubectl = partial(installed.controller.server.kubectl, "-n", installed.namespace)
    kubectl("create", "secret", "generic", "keys", "--from-literal=only-0=right")
    keys = {
        "credentialRefs": [{"name": "keys"}],
        "extractFrom": [{"headers": ["x-api-key"]}],
        "forwardClientIDHeader": REWRITE,
    }
    policy = {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "SecurityPolicy",
        "metadata": {"name": "keys"},
        "spec": {
            "targetRefs": [
                {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "llm"}
            ],
            "apiKeyAuth": keys,
        },
    }
    kubectl("create", "-f", "-", input=json.dumps(policy))
    key = {"x-api-key": "right"}
    try:

        async def is_asked_for() -> bool:
            answer = await installed.client.chat("shared", headers={REWRITE: "only-1"})
            return answer.status == HTTPStatus.UNAUTHORIZED

        await eventually(is_asked_for, within_s=WITHIN_S)
        assert {await chosen(installed, "shared", **key) for _ in range(4)} == {"pod-0"}
    finally:
        kubectl("delete", "securitypolicy", "keys")
        await eventually(lambda: is_served(installed), within_s=WITHIN_S)


async def is_served(installed: Installed) -> bool:
    return (await installed.client.chat("shared")).status == HTTPStatus.OK


async def test_what_an_httproute_sets_or_removes_comes_too_late(installed: Installed) -> None:
    """Envoy applies a route's headers after its filters: the client's value is what counts."""
    name, pods = {"name": "x-late", "value": "yes"}, installed.pods

    def late(**change: Any) -> dict[str, Any]:
        modifier = {"type": "RequestHeaderModifier", "requestHeaderModifier": change}
        return {"op": "add", "path": "/spec/rules/0/filters", "value": [modifier]}

    sets = late(set=[{"name": REWRITE, "value": "only-0"}, name])
    removes = late(remove=[REWRITE], set=[name])
    for change in (sets, removes):
        with patched(installed, "httproute", change):

            async def is_applied() -> bool:
                pods[1].pod.last_requests.clear()
                found = await chosen(installed, "shared")
                seen = [dict(each["headers"]) for each in pods[1].pod.last_requests]
                return found == "pod-1" and any("x-late" in each for each in seen)

            await eventually(is_applied, within_s=WITHIN_S)


# --- the number of proxies -----------------------------------------------------------------------

_PROXIES = "/spec/provider/kubernetes"
AUTOSCALED = (
    {"op": "remove", "path": f"{_PROXIES}/envoyDeployment/replicas"},
    {"op": "add", "path": f"{_PROXIES}/envoyHpa", "value": {"minReplicas": 2, "maxReplicas": 9}},
)
"""As the chart's `envoyGateway.proxies.autoscaling.enabled` changes the EnvoyProxy."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("is_scaled", "num"), [(True, 3), (False, 1)])
async def test_autoscaling_begins_with_one_proxy_unless_they_are_scaled_before_as_the_page_says(
    installed: Installed, is_scaled: bool, num: int
) -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Autoscaling\n")
    command = blocks(section, "sh")[1]
    made = partial(installed.controller.made_for, namespace=installed.namespace)

    async def are(expected: int, num_autoscalers: int) -> bool:
        scalers = await asyncio.to_thread(made, "horizontalpodautoscaler")
        (deployment,) = await asyncio.to_thread(made, "deployment")
        return (deployment["spec"]["replicas"], len(scalers)) == (expected, num_autoscalers)

    assert await are(2, 0)
    if is_scaled:
        ours = command.replace("gateway-name=llm", f"gateway-namespace={installed.namespace}")
        await asyncio.to_thread(installed.controller.server.kubectl, *shlex.split(ours)[1:])
    with patched(installed, "envoyproxy", *AUTOSCALED):
        await eventually(lambda: are(num, 1), within_s=WITHIN_S)
    await eventually(lambda: are(2, 0), within_s=WITHIN_S)


# --- without a router ----------------------------------------------------------------------------


async def test_a_router_that_is_killed_costs_no_request(installed: Installed) -> None:
    """Before any EndpointSlice says that it is gone."""
    await installed.routers[0].kill()
    statuses = [(await installed.client.chat("shared")).status for _ in range(40)]
    await installed.routers[0].start()

    assert set(statuses) == {200}


@pytest.mark.few(1)
async def test_the_log_leaves_a_router_whose_node_is_gone(installed: Installed) -> None:
    """Without a reset: Envoy's pings find it. Requests fail that it had half answered, no later."""
    routers = installed.routers
    streams = [await each.counter("extproc_access_log_streams") for each in routers]
    has_it = streams.index(max(streams))
    gone, other = ROUTERS[has_it], routers[1 - has_it]
    assert min(streams) == 0
    async with Load(installed.client, ["shared"], max_tokens=3).running() as load:
        await load.some()
        await asyncio.to_thread(remove_address, gone)
        gone_s = time.monotonic()
        try:
            await put_routers(installed.cluster, [ROUTERS[1 - has_it]])

            async def has_moved() -> bool:
                return await other.counter("extproc_access_log_streams") > 0

            await eventually(has_moved, within_s=WITHIN_S)
            told = 'extproc_completions_total{outcome="completed"}'
            before = await other.counter(told)
            await load.some(60)
            after = await other.counter(told)
        finally:
            await asyncio.to_thread(add_address, gone)
            await put_routers(installed.cluster, ROUTERS)

    assert after - before >= 50
    # Half answered: the response was, or only the request, which then has no destination.
    halves = {"router_unavailable", "endpoint_unavailable"}
    assert set(load.outcomes) <= {"served", *halves}, load.outcomes
    assert max(load.lost_s, default=0.0) < gone_s


async def test_without_a_router_the_gateway_stays_accepted(installed: Installed) -> None:
    """On a first install as well, as the address of the log's Service exists."""
    reason = f"ExtProc: no ready endpoints for the related Service {installed.namespace}/extproc."
    without = {
        **conditions_of(installed),
        "EnvoyExtensionPolicy Accepted": f"False: Invalid: {reason}",
    }
    await put_routers(installed.cluster, ())
    await installed.conditions_become(without)
    try:
        await eventually(lambda: refuses_without_routers(installed), within_s=WITHIN_S)
        await eventually(lambda: is_logged(installed, "left-alone"), within_s=WITHIN_S)
    finally:
        await put_routers(installed.cluster, ROUTERS)
    await installed.conditions_become(conditions_of(installed))


async def refuses_without_routers(installed: Installed) -> bool:
    """Return whether nothing is served: a bare 500 of Envoy Gateway, or an error that says when."""
    steers = {"x-gateway-destination-endpoint": f"{PODS[0]}:8000"}
    answer = await installed.client.request("GET", "/v1/models?left-alone", headers=steers)
    if installed.namespace.endswith(ORIGINAL):
        if answer.status == HTTPStatus.OK:  # a router's own
            return False
        assert (answer.status, answer.error_code) == (503, "endpoint_unavailable")
        assert answer.headers["retry-after"] == "1"
        return True
    assert answer.served_by == ""
    return (answer.status, answer.body) == (HTTPStatus.INTERNAL_SERVER_ERROR, b"")


def is_logged(installed: Installed, path: str) -> bool:
    """Return whether Envoy's text log has a request: its listener has kept it."""
    # Not parsed: the last line may be half written.
    return any(path in line for line in installed.proxy.log.splitlines() if line.startswith("{"))
