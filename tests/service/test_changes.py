"""The whole service while its file, its pods or its own life change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
import yaml

from extproc.discovery.endpointlist import EndpointList
from extproc.lab.fakepod.podserver import RunningPod
from extproc.reports.readiness import Readiness
from extproc.types import Endpoint
from tests import clients
from tests.builders import address
from tests.service.serving import Service, configuration, serving, starting
from tests.waiting import eventually


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

        await eventually(lambda: service.metric_is("extproc_config_failures", 1))
        assert await service.metric_is("extproc_config_applied_timestamp_seconds", 0)
        await clients.route(service.channel, "a")
        (decision,) = (await service.admin("/debug/decisions?n=1"))["decisions"]
        assert decision["pick"]["policy"] == "least_harm"
        (warning,) = (await service.admin("/healthz"))["warnings"]
        refused = f"configuration: not applied, and a router that starts with it ends: {path}: "
        assert warning.startswith(refused)

        path.write_text(yaml.safe_dump({**config, "log": {"level": "debug"}}))

        async def says_what_a_restart_changes() -> bool:
            (warning,) = (await service.admin("/healthz"))["warnings"]
            return bool(warning == "configuration: needs a restart to take effect: log.level")

        await eventually(says_what_a_restart_changes)
        assert not await service.metric_is("extproc_config_applied_timestamp_seconds", 0)
        path.write_text(yaml.safe_dump(config))
        await eventually(lambda: has_no_warning(service))


async def has_no_warning(service: Service) -> bool:
    return not (await service.admin("/healthz"))["warnings"]


async def test_a_change_that_lets_reports_expire_too_soon_is_a_warning(
    pods: list[RunningPod], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, config = tmp_path / "extproc.yaml", configuration(pods)
    async with serving(config, path):
        path.write_text(yaml.safe_dump({**config, "scrape": {"expiry_s": 0.01}}))

        await eventually(
            lambda: any("scrape.expiry_s (0.01) is not more" in each for each in caplog.messages)
        )


async def test_a_late_event_loop_stretches_scrapes_up_to_half_of_the_expiry_in_force(
    pods: list[RunningPod], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.service.app.DELAY_INTERVAL_S", 0.001)
    monkeypatch.setattr("extproc.reports.pace.LATE_S", -1.0)  # it is always late
    # ... because of the scrapes, however much of a core all else takes.
    monkeypatch.setattr("extproc.reports.pace.LATE_SHARE", 0.0)
    monkeypatch.setattr(
        "extproc.reports.pace.AGE_SHARE", 1.0
    )  # of which a delay takes half at most
    path, config = tmp_path / "extproc.yaml", configuration(pods, scrape={"expiry_s": 40.0})

    async with serving(config, path) as service:

        async def is_stretched(expiry_s: float) -> bool:
            interval_s = await service.metric("extproc_scrape_interval_seconds ")
            return expiry_s / 2 <= interval_s <= expiry_s

        await eventually(lambda: is_stretched(40.0))
        path.write_text(yaml.safe_dump({**config, "scrape": {"expiry_s": 4.0}}))
        await eventually(lambda: is_stretched(4.0))


async def test_pods_come_and_go_with_the_endpoints_file(
    pods: list[RunningPod], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = tmp_path / "pods.yaml"
    endpoints.write_text(f"- {pods[0].address}\n")
    discovery = {"file": str(endpoints), "file_interval_s": 0.05}
    config = configuration(pods, discovery=discovery, request={"max_hold_s": 0})

    async def knows(service: Service, count: int) -> bool:
        return len(await service.endpoints()) == count

    async with serving(config) as service:
        assert (await clients.route(service.channel, "a")).destination == pods[0].address
        endpoints.write_text(f"- {pods[0].address}\n- {pods[1].address}\n")
        await eventually(lambda: knows(service, 2))
        endpoints.write_text("not: a list\n")
        await eventually(lambda: f"pods: {endpoints}: " in caplog.text)
        assert await knows(service, 2)
        endpoints.write_text("[]")
        await eventually(lambda: knows(service, 0))
        assert (await clients.route(service.channel, "a")).status == 503


async def test_an_open_log_stream_is_sent_elsewhere_when_draining(
    pods: list[RunningPod],
) -> None:
    async with serving(configuration(pods)) as service:
        call = service.channel.stream_unary(clients.LOGS)()
        await call.wait_for_connection()

        await eventually(lambda: service.metric_is("extproc_access_log_streams", 1))
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


async def test_a_request_that_is_held_when_the_router_stops_hears_of_it(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("[]")
    config = configuration(pods)
    config["discovery"] = {"file": str(endpoints)}
    config["server"]["drain_timeout_s"] = 2
    async with starting(config) as service:
        await eventually(service.is_ready)
        call = service.channel.stream_stream(clients.PROCESS)()
        for message in (clients.request_headers(), clients.request_body("a")):
            await call.write(message)
            assert isinstance(await call.read(), bytes)  # the second: more time for a held one
        service.app.stop()
        reply = await call.read()

    assert isinstance(reply, bytes)
    answer = clients.read(reply)
    assert (answer.status, answer.body["error"]["code"]) == (503, "shutting_down")


async def test_endpoints_beyond_the_limit_are_left_out_the_last_by_address(
    pods: list[RunningPod], caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration(pods[::-1])
    config["discovery"]["max_endpoints"] = 1
    async with serving(config) as service:
        shown = await service.endpoints()
        num_left_out = await service.metric("extproc_endpoints_left_out ")
        health = await service.admin("/healthz")

    used, left_out = sorted(pod.address for pod in pods)
    told = f"1 of 2 pods get no requests: discovery.max_endpoints is 1. Left out: {left_out}"
    assert [each["address"] for each in shown] == [used]
    assert num_left_out == 1
    assert (health["status"], health["warnings"]) == ("ok", [told])
    assert caplog.messages.count(told) == 1


def endpoint_list(max_endpoints: int) -> EndpointList:
    return EndpointList(Readiness(1.0), (), lambda: None, clock=lambda: 0.0, most=max_endpoints)


def test_which_endpoints_are_left_out_is_said_once_for_each_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """2,000 pods change all the time: a line for each list would bury the log."""
    caplog.set_level(logging.INFO)
    endpoints, all_three = endpoint_list(1), [Endpoint(address(number)) for number in (3, 2, 1)]
    endpoints.set(all_three)
    endpoints.set(all_three[::-1])
    told = [each for each in caplog.messages if "pods get no requests" in each]
    warned = endpoints.warnings()
    endpoints.set(all_three[2:])

    assert told == warned
    assert told[0].endswith(f"Left out: {address(2)} to {address(3)}, by address")
    assert endpoints.warnings() == []
    assert "all pods get requests again" in caplog.messages


def test_as_many_endpoints_as_the_setting_says_are_all_used() -> None:
    endpoints = endpoint_list(2_000)
    endpoints.set([Endpoint(f"10.0.{n // 250}.{n % 250}:8000") for n in range(2_000)])

    assert (endpoints.num_left_out, endpoints.warnings()) == (0, [])
