"""Addresses as Envoy takes them: what the checks of a configuration rest on."""

from __future__ import annotations

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from tests.e2e.conftest import behind_envoy, own_pods, pod_config, router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.servers import needs_ipv6

NUM_REQUESTS = 10


@pytest.mark.few(1)
@needs_ipv6
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_pod_is_found_however_its_address_is_written(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    pods = running_pods(*map(pod_config, range(2)), hosts=["::1", "::1"])
    async with pods as running:
        ports = [each.address.rpartition(":")[2] for each in running]
        written = [f"[0:0:0:0:0:0:0:1]:{port}" for port in ports]
        config = {**router_config(running), "discovery": {"static": written}}
        async with (
            behind_envoy(config, http, mode, num_pods=2) as (_, client),
        ):
            answers = [await client.chat(f"only-{number % 2}") for number in range(NUM_REQUESTS)]

    assert [each.served_by for each in answers] == ["pod-0", "pod-1"] * (NUM_REQUESTS // 2)


async def test_an_original_destination_is_no_list(http: aiohttp.ClientSession) -> None:
    async with own_pods(2) as pods:
        config = router_config(pods, destination={"num_fallbacks": 1})
        async with (
            RouterProcess(config) as router,
            running_envoy(Mode.ORIGINAL_DST, router) as envoy,
        ):
            answer = await Client(envoy.url, http).chat("shared")
            invalid = await envoy.stats("cluster.pods.original_dst_host_invalid")

    assert answer.status == 503
    assert list(invalid.values()) == [1]
