"""The whole service in one process, with fake pods, a gRPC client and its admin port."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml
from grpc import aio

from extproc.app.app import App
from extproc.app.routing import make_policy
from extproc.config.file import parse_config
from extproc.sim.fakepod.pod import PodConfig, RunningPod, start_pod
from tests import clients

PATIENCE_S = 60.0


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `check` holds; fail after a time that no healthy machine needs."""
    async with asyncio.timeout(PATIENCE_S):
        while not await check():
            await asyncio.sleep(0.02)


class Service:
    """A running App and the ways to it."""

    def __init__(self, app: App, channel: clients.Channel, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.channel = channel
        self._session = session

    async def admin(self, path: str) -> Any:
        async with self._session.get(f"http://{self.app.admin_address}{path}") as response:
            return await response.json(content_type=None)

    async def metric(self, name: str) -> float:
        async with self._session.get(f"http://{self.app.admin_address}/metrics") as response:
            text = await response.text()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)
        )

    async def is_ready(self) -> bool:
        return bool((await self.admin("/healthz"))["status"] == "ok")

    async def in_flight(self) -> int:
        return int(await self.metric("extproc_picks_in_flight"))


transport = "wire"


@pytest.fixture(autouse=True, params=["wire", "grpcio"])
def _on_each_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "transport", request.param)


def configuration(running: list[RunningPod], **sections: Any) -> dict[str, Any]:
    return {
        "server": {"address": "127.0.0.1:0", "drain_timeout_s": 5, "transport": transport},
        "admin": {"address": "127.0.0.1:0"},
        "discovery": {"static": [{"address": pod.address, "name": pod.name} for pod in running]},
        # The pods share this process with the test: a busy machine may keep them from answering.
        "scrape": {"expiry_s": 600, **sections.pop("scrape", {})},
        **sections,
    }


@asynccontextmanager
async def serving(config: dict[str, Any], path: Path | None = None) -> AsyncIterator[Service]:
    """A service that is ready."""
    async with starting(config, path) as service:
        await eventually(service.is_ready)
        yield service


@asynccontextmanager
async def starting(config: dict[str, Any], path: Path | None = None) -> AsyncIterator[Service]:
    """A service that listens."""
    text = yaml.safe_dump(config)
    if path is not None:
        path.write_text(text)
    parsed = parse_config(text)
    app = App(parsed, make_policy(parsed), path=path, text=text)
    run = asyncio.ensure_future(app.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not app.admin_address and not run.done():
                await asyncio.sleep(0.01)
        if run.done():
            run.result()
        async with (
            aio.insecure_channel(app.address) as channel,
            aiohttp.ClientSession() as session,
        ):
            yield Service(app, channel, session)
    finally:
        app.stop()
        await run


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    running = [
        await start_pod(PodConfig(name=f"pod-{index}", adapters=["a", "b", "c"], max_loras=2))
        for index in range(2)
    ]
    yield running
    for pod in running:
        await pod.stop()


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
    await call.write(clients.request_headers())
    try:
        answer = await call.read()
    except aio.AioRpcError as error:
        return error.code(), False
    call.cancel()
    return await call.code(), isinstance(answer, bytes)


async def test_requests_are_turned_away_until_the_endpoints_are_known(tmp_path: Path) -> None:
    """Not answered: the data plane asks another, or does without. An empty pool is an answer."""
    endpoints = tmp_path / "pods.yaml"
    config = configuration([], discovery={"file": str(endpoints), "file_interval_s": 0.05})
    async with starting(config) as service:
        before = await turned_away(service.channel)
        reasons = (await service.admin("/healthz"))["reasons"]
        endpoints.write_text("[]")
        await eventually(service.is_ready)
        after = await clients.route(service.channel, "a")

    assert before == (grpc.StatusCode.UNAVAILABLE, False)
    assert reasons == ["discovery has not synced"]
    assert (after.status, after.body["error"]["code"]) == (503, "no_endpoints")


async def test_a_pod_that_does_not_answer_keeps_requests_away_for_a_limited_time(
    pods: list[RunningPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.app.app.FIRST_LOOK_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [pods[0].address, "127.0.0.1:{1}".format(*silent.getsockname())]
        config = configuration([], discovery={"static": addresses}, scrape={"timeout_s": 60})
        async with starting(config) as service:
            before = await turned_away(service.channel)
            reasons = (await service.admin("/healthz"))["reasons"]
            await eventually(service.is_ready)
            after = await clients.route(service.channel, "a")

    assert before == (grpc.StatusCode.UNAVAILABLE, False)
    assert reasons[0].startswith("endpoints not asked yet: ")
    assert after.destination == pods[0].address


async def test_while_it_drains_requests_are_answered(pods: list[RunningPod]) -> None:
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


async def test_a_pod_that_served_in_another_s_place_is_the_one_that_has_the_adapter(
    pods: list[RunningPod],
) -> None:
    """The pick's own pod refused the connection: its engine never saw the request."""
    async with serving(configuration(pods)) as service:
        log = clients.AccessLog(service.channel)
        pick = await clients.route(service.channel, "a")
        [other] = {pod.address for pod in pods} - {pick.destination}
        await log.tell(pick.pick_id, other)
        await eventually(lambda: _is_zero(service))
        snapshot = await service.admin("/debug/snapshot")
        completed = await service.metric('extproc_completions_total{outcome="completed"}')
        await log.close()

    holding = {each["address"] for each in snapshot["endpoints"] if "a" in each["gpu_adapters"]}
    assert holding == {other}
    assert completed == 1


async def test_without_an_access_log_the_pods_own_counts_end_a_pick(
    pods: list[RunningPod],
) -> None:
    config = configuration(pods, completions={"scrape_grace_s": 0.1})
    async with serving(config) as service:
        await clients.route(service.channel, "a")

        await eventually(lambda: _is_zero(service))
        assert await service.metric('extproc_completions_total{outcome="expired"}') == 1


async def test_a_pick_that_nobody_ends_ages_out(pods: list[RunningPod]) -> None:
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


async def test_a_404_alone_unregisters_nothing(pods: list[RunningPod]) -> None:
    """It may be about something else that a request names, as a previous response."""
    config = configuration(pods, scrape={"models_interval_s": 600})
    async with serving(config) as service:
        log = clients.AccessLog(service.channel)
        for status in (200, *[404] * 20):
            pick = await clients.route(service.channel, "c")
            assert pick.destination
            await log.tell(pick.pick_id, pick.destination, status=status)
            await eventually(lambda: _is_zero(service))
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
            endpoints = (await service.admin("/debug/snapshot"))["endpoints"]
            return any(each["ejected"] for each in endpoints if each["address"] == bad)

        await eventually(is_ejected)
        after = [(await clients.route(service.channel, "base")).destination for _ in range(9)]
        reason = 'extproc_ejections_total{reason="consecutive_failures"}'
        assert await service.metric(reason) == 1
        assert bad not in after
        await log.close()


async def test_models_are_listed_from_the_whole_pool(pods: list[RunningPod]) -> None:
    async with serving(configuration(pods)) as service:
        listed = await clients.get(service.channel, "/v1/models")
        one = await clients.get(service.channel, "/v1/models/b")
        none = await clients.get(service.channel, "/v1/models/zzz")

        assert [card["id"] for card in listed.body["data"]] == ["base", "a", "b", "c"]
        assert (one.status, one.body["parent"]) == (200, "base")
        assert (none.status, none.body["error"]["code"]) == (404, "model_not_found")


async def test_the_policy_changes_with_the_file_and_without_a_restart(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    path, config = tmp_path / "extproc.yaml", configuration(pods)
    async with serving(config, path) as service:
        before = [(await clients.route(service.channel, "a")).destination for _ in range(4)]
        path.write_text(yaml.safe_dump({**config, "policy": {"name": "round_robin"}}))

        async def is_taken_over() -> bool:
            await clients.route(service.channel, "a")
            (decision,) = (await service.admin("/debug/decisions?n=1"))["decisions"]
            return bool(decision["pick"]["policy"] == "round_robin")

        await eventually(is_taken_over)
        after = [(await clients.route(service.channel, "a")).destination for _ in range(4)]
        assert len(set(before)) == 1
        assert len(set(after)) == 2


async def test_a_bad_change_of_the_file_changes_nothing_and_is_counted(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    path, config = tmp_path / "extproc.yaml", configuration(pods)
    async with serving(config, path) as service:
        path.write_text(yaml.safe_dump({**config, "policy": {"name": "no-such-policy"}}))

        async def is_counted() -> bool:
            return await service.metric("extproc_config_failures") == 1

        await eventually(is_counted)
        await clients.route(service.channel, "a")
        (decision,) = (await service.admin("/debug/decisions?n=1"))["decisions"]
        assert decision["pick"]["policy"] == "founding"


async def test_pods_come_and_go_with_the_endpoints_file(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    endpoints = tmp_path / "pods.yaml"
    endpoints.write_text(f"- {pods[0].address}\n")
    config = configuration(pods, discovery={"file": str(endpoints), "file_interval_s": 0.05})

    async def knows(service: Service, count: int) -> bool:
        return len((await service.admin("/debug/snapshot"))["endpoints"]) == count

    async with serving(config) as service:
        assert (await clients.route(service.channel, "a")).destination == pods[0].address
        endpoints.write_text(f"- {pods[0].address}\n- {pods[1].address}\n")
        await eventually(lambda: knows(service, 2))
        for wrong in ("not: a list\n", "", "# nothing\n", "- localhost:8000\n"):
            endpoints.write_text(wrong)
            await asyncio.sleep(0.2)
            assert await knows(service, 2)
        endpoints.unlink()
        os.mkfifo(endpoints)
        await asyncio.sleep(0.2)
        assert (await clients.route(service.channel, "a")).destination == pods[0].address
        endpoints.unlink()
        endpoints.write_text("[]")
        await eventually(lambda: knows(service, 0))
        assert (await clients.route(service.channel, "a")).status == 503


async def test_a_dead_pods_models_stay_known_but_an_unknown_model_is_404(
    pods: list[RunningPod],
) -> None:
    async with serving(configuration(pods)) as service:
        unknown = await clients.route(service.channel, "nobody")

        assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")


async def test_a_session_stays_on_one_pod_and_may_ask_for_stored_responses(
    pods: list[RunningPod],
) -> None:
    config = configuration(pods, request={"session_header": "x-session"}, policy={"name": "random"})
    async with serving(config) as service:
        routed = [await clients.route(service.channel, "a", x_session="s") for _ in range(8)]
        stored = await clients.get(service.channel, "/v1/responses/r-1", x_session="s")
        unknown = await clients.get(service.channel, "/v1/responses/r-1", x_session="other")

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
            views = (await service.admin("/debug/snapshot"))["endpoints"]
            (view,) = [each for each in views if each["address"] == pick.destination]
            return bool(view["num_waiting"] == 7 and view["kv_usage_ratio"] == 0.5)

        await eventually(is_read)
        await log.close()


async def test_an_open_log_stream_is_sent_elsewhere_when_draining(
    pods: list[RunningPod],
) -> None:
    async with serving(configuration(pods)) as service:
        call = service.channel.stream_unary(clients.LOGS)()
        await call.wait_for_connection()

        async def is_open() -> bool:
            return await service.metric("extproc_access_log_streams") == 1

        await eventually(is_open)
        service.app.stop()

        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_request_under_way_is_finished_when_draining(pods: list[RunningPod]) -> None:
    async with serving(configuration(pods)) as service:
        call = service.channel.stream_stream(clients.PROCESS)()
        await call.write(clients.request_headers())
        assert isinstance(await call.read(), bytes)
        service.app.stop()
        await asyncio.sleep(0.1)
        await call.write(clients.request_body("a"))
        reply = await call.read()

        assert isinstance(reply, bytes)
        assert clients.read(reply).destination


async def test_the_founding_preset_is_the_default_spelled_out() -> None:
    text = textwrap.dedent("""
        preset: founding
        discovery: {static: ["10.0.0.1:8000"]}
    """)
    config = parse_config(text)

    assert (config.policy.name, config.destination.num_fallbacks) == ("founding", 0)


async def test_endpoints_beyond_the_limit_are_left_out_the_last_by_address(
    pods: list[RunningPod], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("extproc.app.app.MAX_ENDPOINTS", 1)
    async with serving(configuration(pods[::-1])) as service:
        shown = (await service.admin("/debug/snapshot"))["endpoints"]
        num_left_out = await service.metric("extproc_endpoints_left_out ")

    assert [each["address"] for each in shown] == [min(pod.address for pod in pods)]
    assert num_left_out == 1
    assert "1 endpoints beyond the first 1 left out" in caplog.text
