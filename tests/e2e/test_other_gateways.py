"""Gateways that others configure: what only a real Envoy shows of a router that dies or hangs, of
TLS on one side alone, and of a client that waits before it sends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.charts import Chart, EppProcess, gateway_config
from tests.e2e.conftest import router_config
from tests.e2e.harness import Client, EnvoyProcess, chat, connection_manager, raw_request
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
FILTER = ROOT / "manifests" / "components" / "istio" / "envoyfilter.yaml"
OUTLIERS = {
    "split_external_local_origin_errors": True,
    "consecutive_local_origin_failure": 1,
    "enforcing_consecutive_local_origin_failure": 100,
    "interval": "1s",
    "base_ejection_time": "5s",
    "max_ejection_percent": 50,
}
"""As Istio makes them of our DestinationRule."""
BREAKERS = {"thresholds": [{"max_retries": 4294967295}]}
"""Istio's. Envoy's own default lets three requests at once be tried again."""
INTERVAL_S = 0.03
"""Between two requests."""
KUBELET_S = 4.0
"""Until a kubelet kills a router that hangs: `livenessProbe`, and a second for the end."""


def changed(routers: list[EppProcess], pods: list[RunningPod], **manager: Any) -> dict[str, Any]:
    """A gateway's bootstrap, with changes of its connection manager."""
    addresses = [each.address for each in routers]
    known = [pod.address for pod in pods]
    bootstrap = yaml.safe_load(gateway_config(Chart.OVERRIDE_HOST, *addresses, pods=known))
    connection_manager(bootstrap).update(manager)
    return dict(bootstrap)


@asynccontextmanager
async def two_routers(pods: list[RunningPod]) -> AsyncIterator[list[EppProcess]]:
    async with AsyncExitStack() as stack:
        routers = [EppProcess(router_config(pods)) for _ in range(2)]
        for each in routers:
            await stack.enter_async_context(each)
        yield routers


async def warnings_of(router: EppProcess) -> list[str]:
    found: list[str] = (await router.admin("/healthz"))["warnings"]
    return found


# ---- one of two routers


@pytest.mark.long
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_router_takes_over_from_one_that_is_killed_or_hangs(
    pods: list[RunningPod], http: aiohttp.ClientSession, fault: signal.Signals
) -> None:
    """As our EnvoyFilter has it. What fails is at most what was in hand then, and 1 %."""
    async with two_routers(pods) as routers:
        bootstrap = changed(routers, pods)
        cluster = bootstrap["static_resources"]["clusters"][1]
        (patch,) = yaml.safe_load(FILTER.read_text())["spec"]["configPatches"]
        cluster.update(patch["patch"]["value"], outlier_detection=OUTLIERS)
        cluster["circuit_breakers"] = BREAKERS
        async with EnvoyProcess(yaml.safe_dump(bootstrap)) as envoy:
            await eventually(envoy.has_checked_router)
            client = Client(envoy.url, http)
            statuses: list[int | str] = []

            async def ask() -> None:
                try:
                    statuses.append((await client.chat("only-1")).status)
                except aiohttp.ClientError as error:
                    statuses.append(type(error).__name__)

            async with asyncio.TaskGroup() as asking:

                async def send(num: int) -> None:
                    for _ in range(num):
                        asking.create_task(ask())
                        await asyncio.sleep(INTERVAL_S)

                await send(50)
                num_sent_before, num_before = 50, len(statuses)
                os.kill(routers[0].pid, fault)
                kubelet = asyncio.get_running_loop().call_later(
                    KUBELET_S, partial(os.kill, routers[0].pid, signal.SIGKILL)
                )
                await send(300)
            kubelet.cancel()

        num_in_hand = num_sent_before - num_before
        failed = [each for each in statuses if each != 200]
        assert statuses[:num_before] == [200] * num_before
        assert len(failed) <= num_in_hand + 3, failed


# ---- TLS on one side alone


async def test_an_envoy_that_speaks_plaintext_is_named(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with EppProcess(router_config(pods)) as router:
        bootstrap = changed([router], pods)
        del bootstrap["static_resources"]["clusters"][1]["transport_socket"]
        async with EnvoyProcess(yaml.safe_dump(bootstrap)) as envoy:
            assert (await Client(envoy.url, http).chat("only-1")).status >= 500

            async def is_named() -> bool:
                return any(
                    "127.0.0.1 speaks plaintext" in each for each in await warnings_of(router)
                )

            async def is_logged() -> bool:
                return "127.0.0.1 speaks plaintext to this port" in router.log

            await eventually(is_named)
            await eventually(is_logged)
            await Client(envoy.url, http).chat("only-1")
            await asyncio.sleep(2.0)  # more than one look
            assert router.log.count("127.0.0.1 speaks plaintext to this port") == 1
            counts = 'extproc_tls_mismatches_total{kind="plaintext_to_tls"}'
            assert counts in await router.metrics()


async def test_an_envoy_that_speaks_tls_to_a_plaintext_port_is_named(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    router = EppProcess(router_config(pods), "--secure-serving=false")
    async with router, EnvoyProcess(yaml.safe_dump(changed([router], pods))) as envoy:
        assert (await Client(envoy.url, http).chat("only-1")).status >= 500

        async def is_named() -> bool:
            return any("127.0.0.1 speaks TLS" in each for each in await warnings_of(router))

        await eventually(is_named)


# ---- a client that waits before its body


@asynccontextmanager
async def waiting_gateway(pods: list[RunningPod]) -> AsyncIterator[EnvoyProcess]:
    """An Envoy that leaves the 100 to the pod, as Istio's."""
    config = router_config(pods, request={"max_continue_wait_s": 2.0})
    async with EppProcess(config) as router:
        bootstrap = changed([router], pods, proxy_100_continue=True)
        async with EnvoyProcess(yaml.safe_dump(bootstrap)) as envoy:
            await eventually(envoy.has_checked_router)
            yield envoy


def head(body: bytes) -> bytes:
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()


async def test_a_client_that_waits_for_ever_for_a_100_is_refused_and_told_why(
    pods: list[RunningPod],
) -> None:
    async with waiting_gateway(pods) as envoy:
        port = int(envoy.url.rpartition(":")[2])
        answer = await raw_request(port, head(chat("only-1")))

    assert (answer.status, answer.error_code) == (417, "expectation_failed")


async def test_a_client_that_sends_without_the_100_after_a_while_is_served(
    pods: list[RunningPod],
) -> None:
    body = chat("only-1")
    async with waiting_gateway(pods) as envoy:
        port = int(envoy.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(body))
        await asyncio.sleep(0.5)
        writer.write(body)
        line = await reader.readline()
        writer.close()

    assert line.startswith((b"HTTP/1.1 200", b"HTTP/1.1 100"))
