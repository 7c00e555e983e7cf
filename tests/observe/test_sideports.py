"""Ports for one thing each: what they answer and what not, and that they are off by default."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry, Counter

from extproc.config import Config
from extproc.config.configfile import check_sections
from extproc.envoy.health import HealthService
from extproc.observe.sideports import HEALTH_LIMITS, SidePorts
from extproc.stack.processes import free_port

NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")


def config(health: str | None = None, metrics: str | None = None) -> Config:
    return check_sections(
        {
            "discovery": {"static": []},
            "server": {"health_address": health},
            "admin": {"metrics_address": metrics},
        }
    )


def ports(made: Config, health: HealthService | None = None) -> SidePorts:
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry)
    methods = (health or HealthService()).methods()
    return SidePorts(
        made.server.health_address, made.admin.metrics_address, health=methods, registry=registry
    )


async def check(address: str, name: str) -> int:
    """The serving status of a name."""
    async with aio.insecure_channel(address) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await ask(health_pb2.HealthCheckRequest(service=name), timeout=60)
        return int(answer.status)


async def test_without_addresses_nothing_listens() -> None:
    sides = ports(config())
    await sides.start()

    assert (sides.health_address, sides.metrics_address) == ("", "")
    await sides.aclose()


async def test_health_is_plain_and_follows_readiness_while_liveness_does_not() -> None:
    health = HealthService()
    sides = ports(config(health="127.0.0.1:0"), health)
    await sides.start()
    try:
        before = [await check(sides.health_address, name) for name in NAMES]
        alive = await check(sides.health_address, "liveness")
        health.set_ready(True)
        after = [await check(sides.health_address, name) for name in NAMES]
    finally:
        await sides.aclose()

    not_serving, serving = 2, 1
    assert before == [not_serving] * len(NAMES)
    assert alive == serving
    assert after == [serving] * len(NAMES)


async def test_the_health_port_serves_nothing_else() -> None:
    sides = ports(config(health="127.0.0.1:0"))
    await sides.start()
    try:
        async with aio.insecure_channel(sides.health_address) as channel:
            ask = channel.unary_unary(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            with pytest.raises(aio.AioRpcError) as caught:
                await ask(health_pb2.HealthCheckRequest(), timeout=60)
    finally:
        await sides.aclose()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_port_takes_short_questions_from_so_many_connections() -> None:
    sides = ports(config(health="127.0.0.1:0"))
    await sides.start()
    host, _, port = sides.health_address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    try:
        long_name = "a" * HEALTH_LIMITS.max_message_bytes
        with pytest.raises(aio.AioRpcError) as caught:
            await check(sides.health_address, long_name)
        writers += [
            (await asyncio.open_connection(host, int(port)))[1]
            for _ in range(HEALTH_LIMITS.max_connections)
        ]
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        async with asyncio.timeout(5):  # before a handshake's time is up
            assert await reader.read() == b""
    finally:
        for writer in writers:
            writer.close()
        await sides.aclose()

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_metrics_port_has_metrics_and_nothing_of_the_admin_port() -> None:
    sides = ports(config(metrics="127.0.0.1:0"))
    await sides.start()
    try:
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{sides.metrics_address}/metrics") as response:
                page = await response.text()
            statuses = []
            for path in ("/", "/healthz", "/debug/snapshot", "/debug/decisions"):
                async with http.get(f"http://{sides.metrics_address}{path}") as response:
                    statuses.append(response.status)
    finally:
        await sides.aclose()

    assert "things_total" in page
    assert statuses == [404] * 4


async def test_an_address_in_use_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = free_port()
        sides = ports(config(f"127.0.0.1:{port}", f"127.0.0.1:{taken.getsockname()[1]}"))
        with pytest.raises(OSError, match="in use"):
            await sides.start()

        with socket.socket() as again:
            again.bind(("127.0.0.1", port))
