"""The whole service in one process, with fake pods, a gRPC client and its admin port."""

from __future__ import annotations

import socket
from pathlib import Path
from random import Random

import grpc
import pytest
from grpc import aio

from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from extproc.stack.processes import free_port
from extproc.types import Choice, RequestInfo, Snapshot
from tests import clients
from tests.fakepods import running_pod
from tests.service.serving import Service, configuration, serving, starting
from tests.waiting import eventually


async def test_a_request_is_routed_to_a_pod_and_stays_with_its_adapter(
    pods: list[RunningPod],
) -> None:
    async with serving(configuration(pods)) as service:
        first = await clients.route(service.channel, "a")
        others = [await clients.route(service.channel, "a") for _ in range(5)]

        assert first.destination in {pod.address for pod in pods}
        assert {other.destination for other in others} == {first.destination}
        assert dict(first.headers) == {"x-gateway-destination-endpoint": first.destination.encode()}


async def turned_away(channel: clients.Channel) -> tuple[grpc.StatusCode, bool]:
    """How a request's stream ends, and whether it was answered."""
    call = channel.stream_stream(clients.PROCESS)()
    try:
        await call.write(clients.request_headers())
        answer = await call.read()
    except aio.AioRpcError as error:
        return error.code(), False
    call.cancel()
    return await call.code(), isinstance(answer, bytes)


async def test_requests_are_turned_away_until_the_endpoints_are_known(tmp_path: Path) -> None:
    """Not answered: the data plane asks another, or does without. An empty pool is an answer."""
    endpoints = tmp_path / "pods.yaml"
    discovery = {"file": str(endpoints), "file_interval_s": 0.05}
    config = configuration([], discovery=discovery, request={"max_hold_s": 0})
    async with starting(config) as service:
        before = await turned_away(service.channel)
        reasons = (await service.admin("/healthz"))["reasons"]
        endpoints.write_text("[]")
        await eventually(service.is_ready)
        after = await clients.route(service.channel, "a")

    assert before == (grpc.StatusCode.UNAVAILABLE, False)
    assert reasons == ["discovery has not synced"]
    assert (after.status, after.body["error"]["code"]) == (503, "no_endpoints")


async def test_a_pod_that_does_not_respond_delays_readiness_for_a_limited_time(
    pods: list[RunningPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.service.parts.READINESS_LIMIT_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [pods[0].address, "127.0.0.1:{1}".format(*silent.getsockname())]
        config = configuration([], discovery={"static": addresses}, scrape={"timeout_s": 60})
        async with starting(config) as service:
            before = await turned_away(service.channel)
            reasons = (await service.admin("/healthz"))["reasons"]
            await eventually(service.is_ready)
            after = await clients.route(service.channel, "a")

    assert before == (grpc.StatusCode.UNAVAILABLE, False)
    assert reasons[0].startswith("pods not asked yet: ")
    assert after.destination == pods[0].address


async def test_pods_that_refuse_to_list_their_models_delay_readiness_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.service.parts.READINESS_LIMIT_S", 3600.0)
    async with (
        running_pod(PodConfig(api_key="secret")) as pod,
        starting(configuration([pod])) as service,
    ):

        async def has_been_asked() -> bool:
            health = await service.admin("/healthz")
            return bool(health.get("reasons") == ["no pod has answered yet"])

        await eventually(has_been_asked)


async def test_while_it_drains_requests_are_routed(pods: list[RunningPod]) -> None:
    """Not ready, but able: until the delay is over, nobody has to go elsewhere."""
    config = configuration(pods)
    config["server"]["drain_delay_s"] = 1
    async with serving(config) as service:
        await clients.route(service.channel, "a")
        service.app.stop()

        async def is_unready() -> bool:
            return not await service.is_ready()

        await eventually(is_unready)
        reasons = (await service.admin("/healthz"))["reasons"]
        answer = await clients.route(service.channel, "a")

    assert reasons == ["draining"]
    assert answer.destination


async def test_an_access_log_entry_ends_its_pick(pods: list[RunningPod]) -> None:
    async with serving(configuration(pods)) as service:
        log = clients.AccessLog(service.channel)
        picks = [await clients.route(service.channel, model) for model in "abc"]
        assert await service.in_flight() == 3
        for pick in picks:
            await log.tell(pick.pick_id, pick.destination)

        await eventually(lambda: _is_zero(service))
        assert await service.metric('extproc_completions_total{outcome="completed"}') == 3
        await log.close()


async def _is_zero(service: Service) -> bool:
    return await service.in_flight() == 0


async def test_without_an_access_log_the_pods_own_counts_end_a_pick(
    pods: list[RunningPod],
) -> None:
    config = configuration(pods, completions={"scrape_grace_s": 0.1})
    async with serving(config) as service:
        await clients.route(service.channel, "a")

        await eventually(lambda: _is_zero(service))
        assert await service.metric('extproc_completions_total{outcome="expired"}') == 1


async def test_a_pick_without_a_reported_end_expires(pods: list[RunningPod]) -> None:
    config = configuration(
        pods, completions={"source": "access_log", "max_age_s": 0.1, "lost_after_s": 3600}
    )
    async with serving(config) as service:
        await clients.route(service.channel, "a")

        await eventually(lambda: _is_zero(service))
        assert await service.metric("extproc_picks_expired_total") == 1


async def test_a_404_from_a_pod_makes_us_look_and_its_list_decides(
    pods: list[RunningPod],
) -> None:
    # Models are polled so rarely that only the 404 can have made us look.
    config = configuration(pods, scrape={"models_interval_s": 600})
    async with serving(config) as service:
        log = clients.AccessLog(service.channel)
        pick = await clients.route(service.channel, "a")
        (holder,) = [pod for pod in pods if pod.address == pick.destination]
        holder.pod.registry.unload({"lora_name": "a"})
        await log.tell(pick.pick_id, pick.destination, status=404)

        async def goes_elsewhere() -> bool:
            again = await clients.route(service.channel, "a")
            return again.destination not in ("", holder.address)

        await eventually(goes_elsewhere)
        await log.close()


async def test_a_pod_that_fails_is_ejected_counted_and_shown(pods: list[RunningPod]) -> None:
    config = configuration(pods, policy={"name": "round_robin"})
    async with serving(config) as service:
        log = clients.AccessLog(service.channel)
        bad = pods[0].address

        async def is_ejected() -> bool:
            pick = await clients.route(service.channel, "base")
            status = 500 if pick.destination == bad else 200
            await log.tell(pick.pick_id, pick.destination, status=status)
            endpoints = await service.endpoints()
            return any(each["ejected"] for each in endpoints if each["address"] == bad)

        await eventually(is_ejected)
        after = [(await clients.route(service.channel, "base")).destination for _ in range(9)]
        reason = 'extproc_ejections_total{reason="consecutive_failures"}'
        assert await service.metric(reason) == 1
        assert bad not in after
        await log.close()


async def test_a_pod_whose_engine_is_dead_gets_nothing_once_it_has_failed_a_request(
    pods: list[RunningPod],
) -> None:
    config = configuration(pods, policy={"name": "round_robin"})
    async with serving(config) as service:
        log = clients.AccessLog(service.channel)
        dead = pods[0].address
        pods[0].pod.runner.is_dead = True

        async def is_dead() -> bool:
            pick = await clients.route(service.channel, "base")
            status = 500 if pick.destination == dead else 200
            await log.tell(pick.pick_id, pick.destination, status=status)
            return await service.metric(f'extproc_endpoint_dead{{endpoint="{dead}"}}') == 1

        await eventually(is_dead)
        after = [(await clients.route(service.channel, "base")).destination for _ in range(9)]
        assert dead not in after
        pods[0].pod.runner.is_dead = False

        await eventually(
            lambda: service.metric_is(f'extproc_endpoint_ready{{endpoint="{dead}"}}', 1)
        )
        await log.close()


async def test_models_are_listed_from_the_whole_pool(pods: list[RunningPod]) -> None:
    async with serving(configuration(pods)) as service:
        listed = await clients.get(service.channel, "/v1/models")
        one = await clients.get(service.channel, "/v1/models/b")
        none = await clients.get(service.channel, "/v1/models/zzz")

        assert [card["id"] for card in listed.body["data"]] == ["base", "a", "b", "c"]
        assert (one.status, one.body["parent"]) == (200, "base")
        assert (none.status, none.body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("request_section", "header"),
    [({"session_header": "x-session"}, "x_session"), ({}, "x_claude_code_session_id")],
)
async def test_a_session_stays_on_one_pod_and_may_ask_for_stored_responses(
    pods: list[RunningPod], request_section: dict[str, str], header: str
) -> None:
    """Also with nothing configured, by the header of a coding agent."""
    config = configuration(pods, request=request_section, policy={"name": "random"})
    async with serving(config) as service:
        own, other = {header: "s"}, {header: "other"}
        routed = [await clients.route(service.channel, "a", **own) for _ in range(8)]
        stored = await clients.get(service.channel, "/v1/responses/r-1", **own)
        unknown = await clients.get(service.channel, "/v1/responses/r-1", **other)

        assert len({each.destination for each in routed}) == 1
        assert stored.destination == routed[0].destination
        assert unknown.body["error"]["code"] == "stored_response_unsupported"


async def test_orca_is_asked_for_and_read_where_it_is_on(pods: list[RunningPod]) -> None:
    config = configuration(pods, pods={"orca": True}, scrape={"interval_s": 60, "expiry_s": 600})
    async with serving(config) as service:
        log = clients.AccessLog(service.channel)
        pick = await clients.route(service.channel, "a")
        assert ("endpoint-load-metrics-format", b"JSON") in pick.headers
        report = 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 7}}'
        await log.tell(pick.pick_id, pick.destination, endpoint_load_metrics=report)

        async def is_read() -> bool:
            views = await service.endpoints()
            (view,) = [each for each in views if each["address"] == pick.destination]
            return bool(view["num_waiting"] == 7 and view["kv_usage_ratio"] == 0.5)

        await eventually(is_read)
        await log.close()


class Buggy:
    """A policy that fails in service, and not when it is loaded."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Random) -> Choice:
        if request.request_id:
            raise LookupError("no such tenant")
        return Choice(snapshot.endpoints)


@pytest.mark.parametrize("fallback", ["least_pending", ""])
async def test_a_policy_that_fails_is_named_counted_and_replaced_by_the_fallback(
    pods: list[RunningPod], fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"name": f"{__name__}:Buggy", "fallback": fallback}
    async with serving(configuration(pods, policy=policy)) as service:
        answer = await clients.route(service.channel, "a", x_request_id="r")
        failures = await service.metric("extproc_policy_failures_total{")
        errors = [record for record in caplog.records if record.levelname == "ERROR"]

    if fallback:
        assert answer.destination in {pod.address for pod in pods}
    else:
        assert (answer.status, answer.body["error"]["code"]) == (503, "policy_failed")
    assert failures == 1
    assert [(error.getMessage().partition(" (")[0], error.exc_info) for error in errors] == [
        (f"policy {__name__}:Buggy failed: LookupError: no such tenant", None)
    ]
    assert f"{Path(__file__).name}:" in errors[0].getMessage()


@pytest.mark.parametrize("section", ["admin.address", "admin.metrics_address"])
async def test_a_start_that_fails_at_one_port_leaves_no_other_open(section: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        ours = "127.0.0.1", free_port()
        config = configuration([])
        config["server"]["address"] = f"127.0.0.1:{ours[1]}"
        config["admin"][section.removeprefix("admin.")] = f"127.0.0.1:{busy.getsockname()[1]}"

        with pytest.raises(OSError, match="in use"):
            async with starting(config):
                pass

        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(ours, timeout=60.0)
